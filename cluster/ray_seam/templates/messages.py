"""The request for a copy of a template process, as one message over its socket. Imports next to nothing.

`launch.py` sends it once for every process that Ray starts, before anything else happens there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
from typing import Final, NamedTuple, Self

FOLDER_VARIABLE: Final = "ATELIER_TEMPLATES"  # the folder with the templates' sockets
NAME_VARIABLE: Final = "ATELIER_TEMPLATE"  # the template that a process is to be a copy of
PROBLEMS: Final = "problems"  # the file in that folder that says why there was no copy
_LENGTH_BYTES: Final = 4
_STREAMS: Final = 3


class CopyRequest(NamedTuple):
    """The request of a process: what the kernel gave it, which its copy of a template takes over.

    `group` is its process group, which Ray ends together with it; `oom_score` tells the kernel which process to end
    first when memory is short; `limits` are soft and hard ones by the names of `resource`.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    group: int
    niceness: int
    oom_score: str
    umask: int
    limits: dict[str, tuple[int, int]]

    @classmethod
    def of_this_process(cls, arguments: list[str]) -> Self:
        """Return the request of this process, for a copy with these arguments."""
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            oom_score = file.read()
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        os.umask(umask := os.umask(0o077))
        limits = {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
        }
        return cls(arguments, dict(os.environ), os.getcwd(), os.getpgrp(), niceness, oom_score, umask, limits)

    def send(self, connection: socket.socket) -> None:
        """Send the request, with this process's standard streams."""
        body = json.dumps(self._asdict()).encode()
        length = len(body).to_bytes(_LENGTH_BYTES, "big")
        socket.send_fds(connection, [length], list(range(_STREAMS)))
        connection.sendall(body)

    @classmethod
    def receive(cls, connection: socket.socket) -> tuple[Self, list[int]]:
        """Return the next request and its streams, as file descriptors of this process. Raises OSError, ValueError."""
        head, streams, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _STREAMS)
        try:
            if len(streams) != _STREAMS:
                raise ValueError(f"{len(streams)} standard streams came, {_STREAMS} were expected")
            body = _receive_exactly(connection, int.from_bytes(head, "big"))
            return cls(**json.loads(body)), streams
        except BaseException:
            for stream in streams:
                os.close(stream)
            raise

    def apply(self) -> None:
        """Make this process what the one was that asked, but for its parent, its streams and what it has imported."""
        for limit, (soft, hard) in self.limits.items():
            with contextlib.suppress(OSError, ValueError):  # a hard limit cannot be raised
                resource.setrlimit(getattr(resource, limit), (soft, hard))
        with contextlib.suppress(OSError, ValueError):  # its group has ended with it
            os.setpgid(0, self.group)
        os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(self.oom_score)
        os.umask(self.umask)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)


def answer_as_copy(connection: socket.socket) -> None:
    """Answer a request as its copy: with a handle of this process, to watch and to end it by. Raises OSError.

    The kernel ends this process when the other side ends, whatever becomes of the template: the connection stays open.
    """
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | fcntl.FASYNC)
    handle = os.pidfd_open(os.getpid())
    try:
        socket.send_fds(connection, [b"y"], [handle])
    finally:
        os.close(handle)
    connection.detach()


def receive_copy(connection: socket.socket) -> int | None:
    """Return the handle of the copy (pidfd); None when the template makes none. Raises OSError when it has ended."""
    answer, handles, _, _ = socket.recv_fds(connection, 1, 1)
    if not answer:
        raise ConnectionResetError("it has ended")
    return handles[0] if handles else None


def note_problem(folder: str, problem: str) -> None:
    """Say why a process is no copy: in its log, and in the file that is shown when the cluster is up."""
    line = f"{problem}\n".encode()
    with contextlib.suppress(OSError):
        os.write(2, line)
    with contextlib.suppress(OSError):
        file = os.open(os.path.join(folder, PROBLEMS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, line)
        os.close(file)


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            raise ConnectionResetError(f"the other side ended after {len(received)} of {num_bytes} bytes")
        received += piece
    return received
