"""Each lack of a node is one sentence, which names the node, what it has, and what to do."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from kit.clock import Clock

from cluster.start.node_checks import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LOOK_S,
    NodeWatch,
    Wanted,
    describe_failed_look,
    describe_look,
    look_at_node,
    node_problems,
    problems_by_node,
    running_code,
    wanted_of,
    why_other_code,
)
from configs.cluster import ClusterConfig
from infra.ports import free_port

ROOT = Path(__file__).parents[3]
ROOMS = ("cluster", "configs", "deployments", "weights")


def config(**more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"name": "one", "models": [{"id": "m", "path": "/m"}], **more})


def code_of(tree: Path) -> list[str]:
    """Return the code that a process runs whose rooms are those of another tree."""
    program = "from cluster.start.node_checks import running_code; print(*running_code(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tree,
        env={"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_equal_files_are_the_same_code_wherever_they_lie_and_one_changed_file_is_another(tmp_path: Path) -> None:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    assert code_of(tmp_path) == list(running_code())
    (tmp_path / "cluster" / "errors.py").open("a").write("# another\n")
    other = code_of(tmp_path)
    assert other[0] != running_code()[0]
    assert other[1] == running_code()[1] == f"Python {sys.version_info[0]}.{sys.version_info[1]}"


def test_what_a_node_has_otherwise_is_named_and_nothing_else() -> None:
    here = ("Atelier 2 (b)", "Python 3.12")
    assert why_other_code("10.0.0.3", here, here) == ""
    end = ": install the same there, and start Ray of that node again"
    assert why_other_code("10.0.0.3", ("Atelier 2 (b)", "Python 3.11"), here) == (
        f"node 10.0.0.3 has Python 3.11, and this cluster Python 3.12{end}"
    )
    assert why_other_code("10.0.0.3", ["Atelier 1 (a)", "Python 3.11"], here) == (
        f"node 10.0.0.3 has Atelier 1 (a) and Python 3.11, and this cluster Atelier 2 (b) and Python 3.12{end}"
    )


@pytest.mark.parametrize(
    ("fields", "has_serve", "expected"),
    [
        ({}, False, {"http.port": ("127.0.0.1", 8000)}),
        ({}, True, {}),
        (
            {"http": {"haproxy": {"stats_port": 8404}}, "grpc": {"port": 9000}},
            False,
            {
                "http.port": ("127.0.0.1", 8000),
                "http.haproxy.stats_port": ("127.0.0.1", 8404),
                "grpc.port": ("127.0.0.1", 9000),
            },
        ),
        ({"http": {"haproxy": {"stats_port": 8404}}, "grpc": {"port": 9000}}, True, {"grpc.port": ("127.0.0.1", 9000)}),
        ({"http": {"proxy": "serve", "port": 81}}, False, {"http.port": ("127.0.0.1", 81)}),
    ],
)
def test_the_ports_of_a_node_are_those_of_its_ingress(
    fields: dict[str, Any], has_serve: bool, expected: dict[str, tuple[str, int]]
) -> None:
    assert wanted_of(config(**fields), has_serve=has_serve, needs_haproxy=False) == Wanted(expected, {}, False)


def lines(wanted: Wanted, node: str = "10.0.0.3") -> list[str]:
    """Return the facts of this very machine."""
    return [*describe_look(node, look_at_node(wanted.ports, wanted.files), wanted)]


def test_a_port_that_is_taken_is_named_with_its_node_and_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = {"http.port": ("127.0.0.1", taken), "grpc.port": ("127.0.0.1", free_port())}
        found = lines(Wanted(ports, needs_haproxy=False))
    assert found == [
        f"node 10.0.0.3 cannot listen on 127.0.0.1:{taken} (Address already in use): end the program there, or choose "
        "another `http.port`"
    ]
    assert lines(Wanted(ports, needs_haproxy=False)) == []


def test_a_keys_file_that_a_node_cannot_read_is_named_with_the_node_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    wanted = wanted_of(config(access={"keys_file": str(path)}), has_serve=True, needs_haproxy=False)
    assert lines(wanted) == [
        f"node 10.0.0.3 cannot read {path} (No such file or directory), the `access.keys_file`: copy it there"
    ]
    path.write_text("")
    assert lines(wanted) == []


def test_an_address_that_a_node_has_not_is_told_as_what_it_is() -> None:
    ports = {"http.port": ("203.0.113.9", free_port())}  # an address for documents, RFC 5737
    (line,) = lines(Wanted(ports, needs_haproxy=False))
    assert "Cannot assign requested address" in line


def test_a_node_without_haproxy_is_named_where_haproxy_is_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/no/such/program")
    assert lines(Wanted(needs_haproxy=False)) == []
    (line,) = lines(Wanted())
    assert line.startswith("node 10.0.0.3 answers no HTTP: /no/such/program does not run")
    assert line.endswith("; install the missing packages there")


class Nodes:
    """Ray's nodes by address: each runs what it is given, raises an error of Ray's, or does not answer (None)."""

    def __init__(self, answers: dict[str, Callable[..., Any] | Exception | None]) -> None:
        self._answers = answers
        self.addresses = {f"{number:056x}": address for number, address in enumerate(answers, 1)}  # by id
        self._asked: dict[str, tuple[Any, ...]] = {}

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: SimpleNamespace(
            options=lambda scheduling_strategy: self._on(self.addresses[scheduling_strategy.node_id])
        )

    def _on(self, node: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._asked.setdefault(node, arguments) and node)

    def wait(self, refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert (num_returns, timeout) == (len(refs), LOOK_S)
        return [ref for ref in refs if self._answers[ref]], [ref for ref in refs if not self._answers[ref]]

    def get(self, ref: str) -> Any:
        answer = self._answers[ref]
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer(*self._asked[ref])


def test_each_node_is_asked_and_what_does_not_answer_or_breaks_is_told_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other_code(*arguments: Any) -> dict[str, Any]:
        return look_at_node(*arguments) | {"code": ["Atelier 0 (0)", running_code()[1]]}

    broken = ray.exceptions.RaySystemError("ModuleNotFoundError: No module named 'cluster'")
    nodes = Nodes({"10.0.0.1": look_at_node, "10.0.0.2": other_code, "10.0.0.3": broken, "10.0.0.4": None})
    for name in ("remote", "wait", "get"):
        monkeypatch.setattr(ray, name, getattr(nodes, name))
    monkeypatch.setattr("cluster.process.ray_calls.node_addresses", lambda: nodes.addresses)
    found = sorted(node_problems(Wanted({"grpc.port": ("127.0.0.1", free_port())}, needs_haproxy=False)))
    assert [line.split()[1] for line in found] == ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert "has Atelier 0 (0), and this cluster Atelier" in found[0]
    assert "cannot run Atelier" in found[1]
    assert "No module named 'cluster'" in found[1]
    assert found[2] == "node 10.0.0.4 does not answer within 20 s: is it overloaded, or cut off?"


def test_a_port_that_the_cluster_itself_has_taken_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*arguments: Any) -> dict[str, Any]:
        return look_at_node(*arguments) | {"ports": {"http.port": "Address already in use"}}

    nodes = Nodes({"10.0.0.1": busy, "10.0.0.2": busy})
    for name in ("remote", "wait", "get"):
        monkeypatch.setattr(ray, name, getattr(nodes, name))
    first, second = nodes.addresses
    wanted = Wanted({"http.port": ("0.0.0.0", 8000)}, needs_haproxy=False)
    found = problems_by_node(nodes.addresses, wanted, lambda: {first})
    assert (found[first], len(found[second])) == ([], 1)
    assert found[second][0].startswith("node 10.0.0.2 cannot listen on 0.0.0.0:8000 (Address already in use)")


def test_a_node_that_joins_is_looked_at_while_it_has_a_problem_and_named_once_that_was_seen_twice() -> None:
    clock, asked = Clock(), list[dict[str, str]]()
    problems = {"b": ["no HAProxy"], "c": ["a port is taken"], "d": []}
    watch = NodeWatch(known={"a"})

    def look(nodes: Mapping[str, str]) -> list[str]:
        due = watch.due(nodes, clock.now_s)
        if due:
            asked.append(due)
        return watch.note(nodes, {node_id: problems[node_id] for node_id in due}, clock.now_s)

    nodes = {node_id: f"10.0.0.{number}" for number, node_id in enumerate("abcd", 1)}
    assert look({"a": nodes["a"]}) == []
    assert asked == [], "`up` has looked at it"
    assert look(nodes) == []
    assert (asked.pop().keys(), watch.problems) == ({"b", "c", "d"}, {})
    problems["c"] = []  # it was one that starts with the cluster
    assert look(nodes) == []
    assert not asked
    clock.now_s += FIRST_PAUSE_S
    assert look(nodes) == ["no HAProxy"]
    assert asked.pop().keys() == {"b", "c"}
    for _ in range(5):
        clock.now_s += LONGEST_PAUSE_S
        assert look(nodes) == [], "it was named already"
        assert (asked.pop().keys(), watch.problems) == ({"b"}, {"b": ["no HAProxy"]})
    del nodes["b"]
    assert look(nodes) == []
    assert watch.problems == {}
    assert look(nodes | {"b": "10.0.0.2"}) == []
    assert asked.pop().keys() == {"b"}, "another one of that name"


def test_a_node_without_atelier_is_named_with_what_to_install() -> None:
    error = RuntimeError(
        "The remote function failed to import:\n\nTraceback\nModuleNotFoundError: No module named 'x'\n"
    )
    atelier, python = running_code()
    assert describe_failed_look("10.0.0.3", error) == (
        f"node 10.0.0.3 cannot run Atelier (ModuleNotFoundError: No module named 'x'): install {atelier} and {python} "
        "there"
    )
    assert "(RuntimeError)" in describe_failed_look("10.0.0.3", RuntimeError())
