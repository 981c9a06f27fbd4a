"""Copies of template processes, of scripts that tell what they found. No Ray."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.waiting import wait_until

from cluster.ray_seam.ray_files import setup_script, worker_script
from cluster.ray_seam.template_records import Template, TemplateStats
from cluster.ray_seam.templates import launch, setup_worker, starting
from cluster.ray_seam.templates.messages import FOLDER_VARIABLE, NAME_VARIABLE
from cluster.ray_seam.templates.process_files import count_copies, template_problems
from cluster.ray_seam.templates.starting import _running_templates, template_environment
from cluster.ray_seam.templates.template import _why_no_copy

_SCRIPT = """
import json, os, random, resource, sys
import numpy
told = {
    "arguments": sys.argv[1:], "folder": os.getcwd(), "process": os.getpid(), "parent": os.getppid(),
    "group": os.getpgrp(), "niceness": os.nice(0), "variable": os.environ.get("RAY_RAYLET_PID"), "name": __name__,
    "imported": [name for name in ("colorsys", "wave") if name in sys.modules], "path": sys.path[0],
    "drawn": [random.random(), float(numpy.random.rand())], "descriptors": sorted(os.listdir("/proc/self/fd")),
    "umask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
}
print(json.dumps(told), flush=True)
sys.stdin.read()
sys.stderr.write("done")
"""

_CHANGING = "PYTEST_CURRENT_TEST"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates are copied on Linux only")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("scripts") / "worker.py"
    file.write_text(_SCRIPT)
    return file


@contextlib.contextmanager
def templates_for(template: Template, script: Path) -> Iterator[Path]:
    """Run templates whose environment has nothing that changes from test to test. Yield the folder of their sockets."""
    said = os.environ.pop(_CHANGING)
    try:
        running = contextlib.ExitStack()
        running.enter_context(_running_templates(template, str(script)))
    finally:
        os.environ[_CHANGING] = said
    with running:
        yield Path(os.environ[FOLDER_VARIABLE])


@pytest.fixture(scope="module", autouse=True)
def templates(script: Path) -> Iterator[None]:
    """Templates for all tests of this module, of which nothing stays after them."""
    further = Template("further", ["wave:open"], {"RAY_SERVE_ANYTHING": "1"})
    base = Template("ray", ["numpy.random", "colorsys"], further=[Template("", [], {}, [further])])
    with templates_for(base, script) as folder:
        assert {"ray", "further"} <= {file.name for file in folder.iterdir()}
        yield
        # Where one test runs alone, the last one has yet to come.
        wait_until(lambda: len(template_processes()) == 3, "all templates")
        running = template_processes()
    assert psutil.wait_procs(running, timeout=30)[1] == []
    assert not folder.exists()
    assert template_environment("further") == {}


def template_processes(of: int | None = None) -> list[psutil.Process]:
    """The templates that are children of a process, or come from this one by any number of copies."""
    children = psutil.Process(of).children(recursive=of is None)
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and is_template(child)]


def is_template(process: psutil.Process) -> bool:
    return "cluster.ray_seam.templates.template" in " ".join(process.cmdline())


def started(
    folder: Path, *arguments: str, limit: tuple[int, int] | None = None, **variables: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, launch.__file__, *arguments],
        cwd=folder,
        env=worker_environment() | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        umask=0o027,
        preexec_fn=limit and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)),
    )


def worker_environment() -> dict[str, str]:
    """Return the environment that a raylet would give to a worker."""
    own = {name: value for name, value in os.environ.items() if name != _CHANGING}
    return own | {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(os.getpid())}


def told_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    told: dict[str, Any] = json.loads(process.stdout.readline())
    return told


def test_a_copy_is_the_process_that_asked_but_for_its_imports(tmp_path: Path, script: Path) -> None:
    limit = (123, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    variables = template_environment("ray")
    with started(tmp_path, "--one", "two words", limit=limit, **variables) as asking:
        told = told_by(asking)
        parent = psutil.Process(told["parent"])
        output = asking.communicate("", timeout=30)
    assert told["arguments"] == ["--one", "two words"]
    assert (told["folder"], told["name"], told["umask"], told["files"]) == (str(tmp_path), "__main__", 0o027, 123)
    assert told["variable"] == str(os.getpid())
    assert told["imported"] == ["colorsys"]
    assert told["path"] == str(script.parent)
    assert told["group"] == asking.pid
    assert told["process"] != asking.pid
    assert parent.ppid() == os.getpid()  # a template, which is a child of this process
    # Its streams, the connection to who asked, and what lists them.
    assert len(told["descriptors"]) <= 5, "a copy keeps nothing open of its template"
    assert output == ("", "done")
    assert asking.returncode == 0


def test_copies_draw_their_own_numbers(tmp_path: Path) -> None:
    copies = [started(tmp_path) for _ in range(3)]
    drawn = [number for copy in copies for number in told_by(copy)["drawn"]]
    for copy in copies:
        copy.communicate("", timeout=30)
    assert len(set(drawn)) == len(drawn)


def test_a_template_builds_on_another_one(tmp_path: Path) -> None:
    variables = template_environment("further") | {"RAY_SERVE_ANYTHING": "1"}
    with started(tmp_path, **variables) as asking:
        assert told_by(asking)["imported"] == ["colorsys", "wave"]
        asking.communicate("", timeout=30)


def test_a_copy_ends_with_the_process_that_asked(tmp_path: Path) -> None:
    with started(tmp_path) as asking:
        copy = psutil.Process(told_by(asking)["process"])
        asking.kill()
        assert psutil.wait_procs([copy], timeout=30)[0] == [copy]
    with started(tmp_path) as another:  # the template goes on
        told_by(another)
        another.communicate("", timeout=30)


def test_a_copy_ends_with_the_parent_of_the_process_that_asked(tmp_path: Path) -> None:
    """The parent is the raylet in a cluster."""
    command = f"exec 3<&0; {sys.executable} {launch.__file__} <&3 & wait"
    with subprocess.Popen(
        ["/bin/sh", "-c", command],
        env=worker_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as parent:
        copy = psutil.Process(told_by(parent)["process"])
        parent.kill()
        assert psutil.wait_procs([copy], timeout=30)[0] == [copy]


def test_a_process_ends_when_its_copy_is_killed(tmp_path: Path) -> None:
    with started(tmp_path) as asking:
        os.kill(told_by(asking)["process"], 9)
        assert asking.wait(30) == 0


def test_what_is_no_request_gets_no_copy_and_harms_nobody(tmp_path: Path) -> None:
    for sent in (b"", b"x", (2**31).to_bytes(4, "big"), (2).to_bytes(4, "big") + b"{}"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{os.environ[FOLDER_VARIABLE]}/ray")
            connection.sendall(sent)
    with started(tmp_path) as asking:
        assert told_by(asking)["imported"] == ["colorsys"]
        asking.communicate("", timeout=30)


def test_a_template_that_is_killed_is_started_again_and_its_copies_go_on(tmp_path: Path) -> None:
    variables = template_environment("further") | {"RAY_SERVE_ANYTHING": "1"}
    with started(tmp_path, **variables) as before:
        template = psutil.Process(told_by(before)["parent"])
        parent = template.parent()
        template.kill()
        with started(tmp_path, **variables) as after:
            told = told_by(after)
            assert told["imported"] == ["colorsys", "wave"]
            assert told["parent"] != template.pid
            assert psutil.Process(told["parent"]).parent() == parent
            after.communicate("", timeout=30)
        assert before.communicate("", timeout=30) == ("", "done")


def test_copies_of_a_killed_template_are_counted_and_reaped_and_end_with_who_asked(tmp_path: Path) -> None:
    variables = template_environment("further") | {"RAY_SERVE_ANYTHING": "1"}
    asking = [started(tmp_path, **variables) for _ in range(2)]
    copies = [psutil.Process(told_by(one)["process"]) for one in asking]
    template = copies[0].parent()
    assert template is not None
    survivors = [process.pid for process in template.parents()]
    wait_until(lambda: stats_of("further") == TemplateStats("further", is_ready=True, num_copies=2))
    template.kill()
    wait_until(lambda: all(copy.ppid() in survivors for copy in copies))
    assert all(copy.ppid() in {process.pid for process in template_processes()} for copy in copies), "no child of init"
    wait_until(lambda: stats_of("further") == TemplateStats("further", is_ready=True, num_copies=2))
    asking[0].kill()
    asking[1].communicate("", timeout=30)
    assert psutil.wait_procs(copies, timeout=30)[1] == [], "ended, and no zombie"
    wait_until(lambda: stats_of("further").num_copies == 0)
    asking[0].communicate(timeout=30)


def stats_of(name: str) -> TemplateStats:
    return next(one for one in count_copies() or [] if one.name == name)


def test_copies_of_killed_templates_are_not_counted_when_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that would strike them off may be killed as well."""
    (tmp_path / "worker").touch()
    (tmp_path / "problems").touch()
    with subprocess.Popen(["/bin/true"]) as ended:
        pass
    zombie = subprocess.Popen(["/bin/true"])
    wait_until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE)
    for file in (f"copy=worker={ended.pid}", f"copy=worker={os.getpid()}", f"template=worker={zombie.pid}"):
        (tmp_path / file).touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert count_copies() == [TemplateStats("worker", is_ready=False, num_copies=1)]
    zombie.wait()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    assert count_copies() is None
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert count_copies() is None


def test_a_template_that_ends_at_once_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    script = tmp_path / "script.py"
    script.write_text("")
    base = Template("base", [], {}, [Template("broken", ["no_such_module"]), Template("sound", [])])
    with templates_for(base, script):
        for name in ("sound", "broken", "broken"):
            with started(tmp_path, **template_environment(name)) as asking:
                assert ("usage:" in asking.communicate("", timeout=30)[1]) == (name == "broken")
        problems = template_problems()
    assert "no template 'broken': no_such_module cannot be imported" in problems[0]
    assert problems[1:]  # each once: as the template ends, and when it has
    assert all("no copy of template 'broken'" in problem for problem in problems[1:])
    assert template_problems() == []


_FAILING_FORK = """
import os, pathlib
fork, left = os.fork, pathlib.Path({left!r})
def failing():
    if left.exists() and (number := int(left.read_text())):
        left.write_text(str(number - 1))
        raise OSError(11, "Resource temporarily unavailable")
    return fork()
os.fork = failing
"""


@pytest.fixture
def refuse_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the next so many forks of templates that import `failing_fork` fail, as when there are too many processes."""
    left = tmp_path / "left"
    (tmp_path / "failing_fork.py").write_text(_FAILING_FORK.format(left=str(left)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(FOLDER_VARIABLE)
    return lambda number: (left.write_text(str(number)), None)[1]


def test_a_fork_that_fails_costs_one_copy_and_no_template(
    tmp_path: Path, script: Path, refuse_forks: Callable[[int], None]
) -> None:
    with templates_for(Template("base", ["failing_fork", "numpy.random", "colorsys"]), script):
        variables = template_environment("base")
        for number in (1, 2):
            refuse_forks(number)
            for _ in range(number):
                with started(tmp_path, **variables) as ordinary:
                    assert "usage:" in ordinary.communicate("", timeout=30)[1]
            with started(tmp_path, **variables) as copy:
                assert told_by(copy)["imported"] == ["colorsys"]
                copy.communicate("", timeout=30)
        assert template_problems() == ["no copy of template 'base': Resource temporarily unavailable"]


@pytest.mark.drawn
@pytest.mark.parametrize("number", [1, 2])
def test_a_template_that_could_not_be_forked_is_started_when_it_is_asked_for(
    tmp_path: Path, script: Path, refuse_forks: Callable[[int], None], number: int
) -> None:
    refuse_forks(number)
    further = Template("further", ["wave:open"])
    base = Template("base", ["failing_fork", "numpy.random"], {}, [Template("", [], {}, [further])])
    with templates_for(base, script):
        for _ in range(number - 1):  # once at the start, and at the first request
            with started(tmp_path, **template_environment("further")) as ordinary:
                assert "usage:" in ordinary.communicate("", timeout=30)[1]
        for name in ("further", "base", "further"):
            with started(tmp_path, **template_environment(name)) as copy:
                assert told_by(copy)["imported"] == ["wave"] * (name == "further")
                copy.communicate("", timeout=30)
        problems = template_problems()
    assert "no template '' for now: Resource temporarily unavailable" in problems
    assert len(problems) == number


def test_a_template_that_ends_by_itself_says_so(tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    (tmp_path / "ending.py").write_text("import os, gc\ngc.freeze = lambda: os._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    base = Template("base", ["numpy.random"], {}, [Template("ending", ["ending"])])
    with templates_for(base, script):
        wait_until(lambda: template_problems() == ["no template 'ending' any more: it ended with 7"])


def test_without_pidfds_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> int:
        raise OSError("Function not implemented")

    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with _running_templates(Template("ray", []), str(tmp_path)):
        assert FOLDER_VARIABLE not in os.environ
        assert template_environment("ray") == {}
    (line,) = caplog.messages
    assert "Function not implemented" in line


def test_no_copy_where_the_environment_was_another_one_at_import() -> None:
    own = {"RAY_SERVE_ANYTHING": "1", "PYTHONPATH": "here"}
    like = own | {"RAY_RAYLET_PID": "7", "OMP_NUM_THREADS": "3"}
    assert "environment" not in _why_no_copy(own, like)  # the threads of a whole run of tests are another reason
    assert "RAY_SERVE_ANYTHING" in _why_no_copy(own, {"PYTHONPATH": "here"})
    assert "PYTHONPATH" in _why_no_copy(own, own | {"PYTHONPATH": "there"})
    assert "HF_HOME" in _why_no_copy(own, own | {"HF_HOME": "there"})


def test_no_copy_of_a_process_with_threads() -> None:
    before: list[str] | None = None
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    try:
        while before != (before := os.listdir("/proc/self/task")):  # threads of libraries may come and go
            why = _why_no_copy({}, {})
        assert why == f"its imports have started {len(before) - 1} threads"
    finally:
        go_on.set()
        thread.join()


@pytest.mark.drawn
@pytest.mark.parametrize("draws", ["pass", "ray.WorkerID.from_random()"])
def test_no_two_copies_give_the_same_ids(draws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of objects name bytes in shared memory: equal ones would be other processes' bytes."""
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "with_an_actor.py").write_text(f"import ray\n\n@ray.remote\nclass Actor: ...\n\n{draws}\n")
    (tmp_path / "script.py").write_text(
        "import json, ray\nfrom threading import Thread\nids = []\n"
        "def draw(): ids.extend(id.hex() for id in (ray.WorkerID.from_random(), ray.ObjectRef.from_random()))\n"
        "draw()\nthread = Thread(target=draw)\nthread.start()\nthread.join()\nprint(json.dumps(ids))\n"
    )
    with templates_for(Template("ray", ["ray", "with_an_actor"]), tmp_path / "script.py"):
        copies = [started(tmp_path) for _ in range(2 if draws == "pass" else 1)]
        outputs = [copy.communicate("", timeout=60)[0] for copy in copies]
        problems = template_problems()
    if draws != "pass":
        assert outputs == [""]  # an ordinary worker of Ray, which misses its arguments
        assert any("generator of ids" in problem for problem in problems)
        return
    assert problems == []
    drawn = [id_ for output in outputs for id_ in json.loads(output)]
    assert len(set(drawn)) == len(drawn) == 8


class _Executed(Exception):
    pass


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command that this process would have become."""
    commands: list[list[str]] = []

    def note(_: str, command: list[str]) -> None:
        commands.append(command)
        raise _Executed

    monkeypatch.setattr(os, "execv", note)
    return commands


@pytest.mark.parametrize(("folder", "name"), [("", "ray"), ("/nowhere", "ray"), (None, "unknown")])
def test_without_a_template_ray_starts_its_own_worker(
    folder: str | None,
    name: str,
    executed: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if folder is not None:
        monkeypatch.setenv(FOLDER_VARIABLE, folder)
    monkeypatch.setenv(NAME_VARIABLE, name)
    with pytest.raises(_Executed):
        launch.launch_worker(["--node-id=1"])
    assert executed == [[sys.executable, worker_script(), "--node-id=1"]]
    assert Path(worker_script()).is_file()
    assert bool(folder == "") != (f"template {name!r}" in capfd.readouterr().err)


def test_a_runtime_environment_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[str]] = []
    monkeypatch.setattr(setup_worker, "launch_worker", launched.append)
    monkeypatch.setenv("BASE_OF_THIS", "a")
    monkeypatch.setenv("MADE", "")
    context = {"env_vars": {"MADE": "${BASE_OF_THIS}b${NOT_SET_HERE}"}, "py_executable": sys.executable}
    arguments = [
        f"--serialized-runtime-env-context={json.dumps(context)}",
        "--language=PYTHON",
        launch.__file__,
        "--a=b",
    ]
    setup_worker._main(arguments)
    assert os.environ["MADE"] == "ab"
    assert launched == [["--a=b"]]


@pytest.mark.parametrize("changed", [{"py_executable": "uv run"}, {"command_prefix": ["nice"]}])
def test_other_runtime_environments_are_left_to_ray(changed: dict[str, Any], executed: list[list[str]]) -> None:
    context = f"--serialized-runtime-env-context={json.dumps(changed)}"
    with pytest.raises(_Executed):
        setup_worker._main([launch.__file__, "--a=b", "--language=PYTHON", context])
    assert executed == [[sys.executable, setup_script(), worker_script(), "--a=b", "--language=PYTHON", context]]
    assert Path(setup_script()).is_file()


def test_templates_that_do_not_end_with_their_input_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_END_TIMEOUT_S", 0.01)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        starting._end(process)
        assert process.returncode == -signal.SIGKILL  # and nothing of it is left
