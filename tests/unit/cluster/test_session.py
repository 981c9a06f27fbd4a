"""Finding clusters again, and saying what is in the way of a new one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private.services import find_bootstrap_address
from ray._private.utils import check_version_info, compute_version_info

from cluster.ray_seam import loopback
from cluster.records.errors import SessionError
from cluster.start import session
from cluster.start.ray_folders import _remove_old_sessions, own_folder
from cluster.start.session import _check_port_free, check_can_start
from cluster.start.session_records import (
    SessionFile,
    SessionRecord,
    config_digest,
    record_folder,
    running_sessions,
    stop_session,
)
from configs.cluster import ClusterConfig
from configs.http import HttpConfig
from infra.ports import free_port
from weights.platform.private_folder import private_folder

SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def config(name: str = "one", **more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"name": name, "models": [{"id": "m", "path": "/m"}], **more})


@pytest.fixture
def mine() -> SessionRecord:
    started = psutil.Process().create_time()
    return SessionRecord("one", os.getpid(), started, "http://127.0.0.1:8000", "/c.yaml")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.start.session._ray_processes", list)


def write(folder: Path, record: SessionRecord, **changes: Any) -> Path:
    file = folder / f"{record.name}.json"
    file.write_text(json.dumps(asdict(record) | changes))
    return file


@pytest.mark.parametrize(("ray_version", "python"), [("2.58.0", None), (None, "3.9.1")])
def test_a_ray_of_another_version_or_python_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, ray_version: str | None, python: str | None
) -> None:
    own = compute_version_info()
    there = {"ray_version": ray_version or own[0], "python_version": python or own[1]}
    # Ray's own words, whatever they are in this version of it.
    monkeypatch.setattr(ray, "init", lambda **_: check_version_info(there, "node 10.0.0.9"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(SessionError) as raised:
        session.join_ray("10.0.0.1:6379")
    assert str(raised.value) == (
        f"the Ray at 10.0.0.1:6379 is Ray {there['ray_version']} and Python {there['python_version']}, and here is "
        f"Ray {own[0]} and Python {own[1]}: install its versions here"
    )


def test_a_session_file_lives_as_long_as_its_block(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "records")
    with SessionFile(config(), "http://x", "/c.yaml", folder) as session:
        (record,) = running_sessions(folder)
        assert (record.name, record.pid, record.url, record.ready) == ("one", os.getpid(), "http://x", False)
        session.mark_ready()
        assert running_sessions(folder) == [replace(record, ready=True)]
        assert folder.stat().st_mode & 0o077 == 0
    assert running_sessions(folder) == []
    assert list(folder.iterdir()) == []


def test_records_of_dead_processes_are_dropped(tmp_path: Path, mine: SessionRecord) -> None:
    kept = write(tmp_path, mine)
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
    gone = write(tmp_path, replace(mine, name="gone", pid=process.pid, started=started))
    reused = write(tmp_path, replace(mine, name="reused", started=mine.started - 100))
    assert running_sessions(tmp_path) == [mine]
    assert (kept.exists(), gone.exists(), reused.exists()) == (True, False, False)


def test_a_process_that_ended_but_was_not_waited_for_is_dead(tmp_path: Path, mine: SessionRecord) -> None:
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
        record = replace(mine, pid=process.pid, started=started)
        assert record.alive
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert not record.alive


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"3", b"\xff", b'{"pid": 1}', {"pid": "x"}, {"pid": -1}, {"pid": None}, {"surplus": 1}],
)
def test_a_damaged_record_is_dropped(tmp_path: Path, mine: SessionRecord, text: bytes | dict[str, Any]) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(text if isinstance(text, bytes) else json.dumps(asdict(mine) | text).encode())
    assert running_sessions(tmp_path) == []
    assert not file.exists()


def test_records_are_private_to_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert record_folder() == tmp_path / "atelier"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert record_folder() == tmp_path / f"atelier-{os.getuid()}"
    assert record_folder().stat().st_mode & 0o777 == 0o700
    record_folder().chmod(0o755)
    with pytest.raises(SessionError, match=rf"atelier-{os.getuid()}: not used: its mode is 0755"):
        record_folder()


def test_the_same_cluster_is_already_up(tmp_path: Path, mine: SessionRecord) -> None:
    write(tmp_path, mine)
    with pytest.raises(SessionError, match=rf"'one' is already up at http://.*:8000 \(process {os.getpid()}\).*down"):
        check_can_start(config("one"), tmp_path)
    check_can_start(config("two", http={"port": free_port()}), tmp_path)


def test_a_config_has_one_digest_in_all_processes() -> None:
    ops = [f"aten::op{number}" for number in range(20)]
    made = config(simulated={"host_ops": ops})
    assert json.loads(made.model_dump_json())["simulated"]["host_ops"] == sorted(ops), "sets differ between processes"
    assert config_digest(made) == config_digest(config(simulated={"host_ops": ops[::-1]}))
    assert config_digest(made) != config_digest(config(simulated={"host_ops": ops[1:]}))


def test_a_port_that_is_taken_is_said_with_the_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            SessionError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*process {os.getpid()}, .*--port"
        ):
            check_can_start(config(http={"port": port}), tmp_path)
    _check_port_free(HttpConfig(port=port))


def test_a_host_that_is_not_ours_is_said() -> None:
    with pytest.raises(SessionError, match=r"cannot listen on 192\.0\.2\.1:"):
        _check_port_free(HttpConfig(host="192.0.2.1", port=free_port()))


def test_a_private_ray_has_a_folder_of_its_own_where_paths_of_sockets_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        found = {own_folder("one"), own_folder("one"), own_folder("two")}
        assert len(found) == 2
        assert all(folder and Path(folder).parent == Path(short) / f"atelier-{os.getuid()}" for folder in found)
        assert Path(short, f"atelier-{os.getuid()}").stat().st_mode & 0o777 == 0o700
        monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
        assert own_folder("one") is None
        monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a-long-path-of-a-temporary-folder"))
    assert own_folder("one") is None


def test_auto_means_the_ray_of_this_users_cluster_whatever_runs_beside_it(
    ray_environment: Path, mine: SessionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def init(address: str, _temp_dir: str | None = None, **_: Any) -> None:
        asked.append((address, _temp_dir and find_bootstrap_address(_temp_dir)))

    @contextlib.contextmanager
    def ray_on_loopback() -> Iterator[None]:
        on_loopback.append(len(asked))
        yield

    on_loopback: list[int] = []
    monkeypatch.setattr(loopback, "ray_on_loopback", ray_on_loopback)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:4321"))
    monkeypatch.setattr(session, "_ray_processes", list)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    session.join_ray()
    session._write_address(str(ray_environment))
    write(record_folder(), replace(mine, ray=str(ray_environment)))
    session.join_ray()
    session.join_ray("10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    session.join_ray()
    assert asked == [("auto", None), ("auto", "127.0.0.1:4321"), ("10.0.0.1:6379", None), ("auto", None)]
    assert on_loopback == [1]  # the second one alone is this machine's own


CHILD = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {!r}]); print(p.pid, flush=True); p.wait()"


@pytest.mark.parametrize("code", ["import time; time.sleep(60)"])
def test_stopping_ends_the_whole_family(mine: SessionRecord, code: str) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD.format(code)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        stop_session(replace(mine, pid=process.pid), timeout_s=0.1)
        assert not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE
        process.wait(5)
    stop_session(replace(mine, pid=process.pid))


NEVER_REAPED = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(p.pid, flush=True)\n"
    "time.sleep(60)"
)


def test_what_has_ended_and_is_reaped_by_nobody_has_ended(mine: SessionRecord) -> None:
    with subprocess.Popen([sys.executable, "-c", NEVER_REAPED], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        ended = psutil.Process(int(parent.stdout.readline()))
        begun_s = time.monotonic()
        stop_session(replace(mine, pid=ended.pid), timeout_s=30.0)
        assert time.monotonic() - begun_s < 15.0
        assert ended.status() == psutil.STATUS_ZOMBIE
        parent.kill()


@pytest.fixture
def ray_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty home folder, in an environment that says nothing of tokens."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what the test leaves there is undone
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return home


def test_the_token_of_a_private_ray_is_random_and_for_its_user_alone(ray_environment: Path) -> None:
    session._guard_ray_token()
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    token = path.read_text()
    assert len(bytes.fromhex(token)) == 32
    assert (path.parent, path.stat().st_mode & 0o777) == (record_folder(), 0o600)
    assert "RAY_AUTH_MODE" not in os.environ  # `ray.init` turns tokens on, but only where it is unset
    assert list(ray_environment.iterdir()) == []  # where a token would lock every Ray of this user
    del os.environ["RAY_AUTH_TOKEN_PATH"]
    session._guard_ray_token()
    assert path.read_text() == token
    path.unlink()
    del os.environ["RAY_AUTH_TOKEN_PATH"]
    session._guard_ray_token()
    assert path.read_text() != token


def test_who_joins_a_private_ray_takes_its_token(ray_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session._take_ray_token()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ  # there is none
    session._guard_ray_token()
    made = os.environ.pop("RAY_AUTH_TOKEN_PATH")
    session._take_ray_token()
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == made
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "another")
    session._take_ray_token()
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == "another"


@pytest.mark.parametrize("content", ["0" * 64, "", "\n"])
def test_a_token_that_is_there_stays_and_its_file_is_closed_to_others(ray_environment: Path, content: str) -> None:
    path = record_folder() / "ray_token"
    path.write_text(content)
    path.chmod(0o644)
    session._guard_ray_token()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text().strip()) == 64
    assert content.strip() in path.read_text()


@pytest.mark.parametrize(
    "given", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "p"}]
)
def test_an_environment_that_decides_about_tokens_is_left_alone(
    ray_environment: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    session._guard_ray_token()
    assert list(ray_environment.iterdir()) == []
    assert {name: os.environ[name] for name in given} == given


def test_clusters_are_found_without_importing_ray() -> None:
    """Ray takes most of a second, and every command that asks a cluster begins here."""
    code = "import sys, deployments.console.client, cluster.start.session; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NOW_S = 1_800_000_000.0


def session_folder(folder: Path, number: int, age_s: float) -> Path:
    path = folder / f"session_2026-01-{number:02}_10-00-00_000001_77"
    (path / "logs").mkdir(parents=True)
    log = path / "logs" / "raylet.out"
    log.write_text("x")
    for each in (log, log.parent, path):
        os.utime(each, (NOW_S - age_s, NOW_S - age_s))
    return path


def test_sessions_that_have_ended_go_but_for_the_last(tmp_path: Path) -> None:
    old = [session_folder(tmp_path, number, 10_000 - number) for number in (1, 2, 3)]
    writing = session_folder(tmp_path, 4, 20_000)
    (writing / "logs" / "debug_state.txt").touch()
    os.utime(writing / "logs" / "debug_state.txt", (NOW_S - 5, NOW_S - 5))
    other = tmp_path / "session_of_somebody"
    other.mkdir()
    (tmp_path / "session_latest").symlink_to(old[0])
    _remove_old_sessions(tmp_path, NOW_S)
    assert {path.name for path in tmp_path.iterdir()} == {old[2].name, writing.name, other.name, "session_latest"}


def test_a_silent_session_that_a_process_belongs_to_stays(tmp_path: Path) -> None:
    running, ended, _ = (session_folder(tmp_path, number, 10_000 - number) for number in (5, 6, 7))
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", f"--session-name={running.name}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        _remove_old_sessions(tmp_path, NOW_S)
        assert process.stdin is not None
        process.stdin.close()
    assert (running.exists(), ended.exists()) == (True, False)


def test_folders_of_other_users_and_no_folder_at_all_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [session_folder(tmp_path, number, 10_000) for number in (8, 9)]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    _remove_old_sessions(tmp_path, NOW_S)
    _remove_old_sessions(tmp_path / "none", NOW_S)
    assert all(path.exists() for path in both)


class FakeRay:
    """Ray as a session starts, joins and ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.address = "127.0.0.1"

        def begin(*given: Any) -> None:
            self.calls.append(given)
            if error:
                raise error

        monkeypatch.setattr(session, "_start_private_ray", lambda config, name: begin("start", name))
        monkeypatch.setattr(session, "join_ray", lambda address: begin("join", address))
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: self.address)
        monkeypatch.setattr(ray, "shutdown", lambda: self.calls.append("end"))
        for variable in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness", "RAY_AUTH_MODE"):
            monkeypatch.setenv(variable, "")
            monkeypatch.delenv(variable)


@pytest.mark.parametrize(("address", "call"), [(None, ("start", "one")), ("10.0.0.1:6379", ("join", "10.0.0.1:6379"))])
def test_a_session_starts_or_joins_a_ray_and_ends_with_it(
    address: str | None, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = FakeRay(monkeypatch)
    with session.ray_session(config(ray={"address": address})):
        assert found.calls == [call]
        assert [os.environ.get(name) for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness")] == ["0", "0"]
    assert found.calls == [call, "end"]


def test_a_private_ray_must_listen_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FakeRay(monkeypatch)
    found.address = "10.0.0.9"
    with pytest.raises(SessionError, match=r"listens on 10\.0\.0\.9 although"), session.ray_session(config()):
        raise AssertionError("it must not be used")
    assert found.calls[-1] == "end"
    with session.ray_session(config(ray={"address": "10.0.0.1:6379"})):
        pass


@pytest.mark.parametrize(
    ("address", "mode", "words"),
    [
        (None, "", "^Ray cannot be started: no room$"),
        ("10.0.0.1:6379", "", r"^Ray cannot be reached: no room; does it ask for a token\? \(RAY_AUTH_MODE=token\)$"),
        ("10.0.0.1:6379", "token", "^Ray cannot be reached: no room$"),
    ],
)
def test_a_ray_that_cannot_be_had_says_why(
    address: str | None, mode: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRay(monkeypatch, ConnectionError("no room"))
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(SessionError, match=words), session.ray_session(config(ray={"address": address})):
        raise AssertionError("there is none")


def test_a_taken_grpc_port_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = config(grpc={"port": server.getsockname()[1]}, ray={"address": "auto"})
        with pytest.raises(SessionError, match="choose another port with `grpc:"):
            check_can_start(taken, tmp_path)
    check_can_start(taken, tmp_path)
