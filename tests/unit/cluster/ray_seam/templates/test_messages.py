"""Requests for copies: a copy is what its asker was, ends with it, and leaves nothing open of a request that failed."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.ray_seam.templates.messages import CopyRequest, answer_as_copy, receive_copy

WAIT_S = 10.0


def fork(work: Callable[[], None]) -> int:
    """Do `work` in a copy of this process; return its id."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as asking:
        server.bind("")  # a name of the kernel's own
        server.listen()
        asking.connect(server.getsockname())
        answering, _ = server.accept()
        for end in (asking, answering):
            end.settimeout(WAIT_S)
        with answering:
            yield asking, answering


def state_of_this_process() -> dict[str, Any]:
    os.umask(umask := os.umask(0o077))
    return {
        "group": os.getpgrp(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),
        "umask": umask,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
    }


def test_a_copy_is_what_its_asker_was(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    asking, answering = ends
    told, telling = os.pipe()

    def tell() -> None:
        os.write(telling, json.dumps(state_of_this_process()).encode() + b"\n")

    def ask() -> None:
        os.setpgid(0, 0)
        os.nice(3)
        os.umask(0o027)
        os.chdir(tmp_path)
        os.environ.clear()
        os.environ["HERE"] = "1"
        Path("/proc/self/oom_score_adj").write_text("321")
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        CopyRequest.of_this_process(["a", "b"]).send(asking)
        tell()
        asking.recv(1)  # its group lives as long as it does

    def become() -> None:
        request, streams = CopyRequest.receive(answering)
        assert request.arguments == ["a", "b"]
        assert [os.path.sameopenfile(stream, place) for place, stream in enumerate(streams)] == [True] * 3
        request.apply()
        tell()

    asker = fork(ask)
    copy = fork(become)
    assert os.waitpid(copy, 0)[1] == 0
    answering.sendall(b"x")
    assert os.waitpid(asker, 0)[1] == 0
    os.close(telling)
    with open(told) as file:
        of_asker, of_copy = map(json.loads, file)
    assert of_copy == of_asker
    assert (of_copy["group"], of_copy["niceness"]) == (asker, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    assert of_copy["environment"]["HERE"] == "1"


def test_a_limit_that_cannot_be_raised_and_a_group_that_has_ended_are_left(tmp_path: Path) -> None:
    request = CopyRequest.of_this_process([])._replace(group=2**22, limits={"RLIMIT_NOFILE": (2**40, 2**40)})
    assert os.waitpid(fork(request.apply), 0)[1] == 0


@pytest.mark.parametrize("num_streams", [2, 3])
@pytest.mark.parametrize("body", [b"{", b"{}", b"[1]"])
def test_a_request_that_is_none_leaves_no_stream_open(
    ends: tuple[socket.socket, socket.socket], num_streams: int, body: bytes
) -> None:
    asking, answering = ends
    before = psutil.Process().num_fds()
    announced = len(body) + (body == b"[1]")  # its end never comes
    socket.send_fds(asking, [announced.to_bytes(4, "big")], list(range(num_streams)))
    asking.sendall(body)
    asking.shutdown(socket.SHUT_WR)
    with pytest.raises((OSError, ValueError, TypeError)):
        CopyRequest.receive(answering)
    assert psutil.Process().num_fds() == before


def test_a_request_with_too_few_streams_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    asking, answering = ends
    before = psutil.Process().num_fds()
    body = json.dumps(CopyRequest.of_this_process([])._asdict()).encode()
    socket.send_fds(asking, [len(body).to_bytes(4, "big")], [0, 1])
    asking.sendall(body)
    with pytest.raises(ValueError, match="2 standard streams came, 3 were expected"):
        CopyRequest.receive(answering)
    assert psutil.Process().num_fds() == before


def test_a_copy_is_watched_by_its_handle_and_ends_with_its_asker(ends: tuple[socket.socket, socket.socket]) -> None:
    asking, answering = ends

    def copy() -> None:
        asking.close()
        answer_as_copy(answering)
        select.select([], [], [], WAIT_S)

    child = fork(copy)
    answering.close()
    handle = receive_copy(asking)
    assert handle is not None
    assert select.select([handle], [], [], 0)[0] == []  # it runs
    asking.close()
    assert select.select([handle], [], [], WAIT_S)[0] == [handle]
    os.close(handle)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_template_that_makes_no_copy_is_told_from_one_that_has_ended(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    asking, answering = ends
    answering.sendall(b"n")
    assert receive_copy(asking) is None
    answering.close()
    with pytest.raises(ConnectionResetError, match="it has ended"):
        receive_copy(asking)
