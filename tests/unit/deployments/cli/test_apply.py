"""`atelier apply`: what it finds, what it refuses, and in which order it acts, over fakes of the cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from cluster.ray_seam.serve_control import DeployedApp, ReplicaCount
from cluster.records.errors import SessionError
from cluster.registry.actor import WeightRegistry
from cluster.registry.directory import ModelRecord
from cluster.start.session_records import SessionFile, config_digest, record_folder, running_sessions
from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.cli import applying
from deployments.cli.applying import _await_replicas, carry_out

pytestmark = pytest.mark.slow  # imports Serve

ROOT = Path(__file__).parents[4]
ADDER = {"id": "adder", "path": str(ROOT / "infra/demo/models/adder")}
Run = Callable[..., tuple[int, str, str]]


def config(**more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"name": "one", "models": [{"id": "m", "path": "/m"}]} | more)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "one.yaml"


def write(file: Path, **more: Any) -> ClusterConfig:
    store = {"path": str(file.parent / "store")}
    file.write_text(yaml.safe_dump({"name": "one", "models": [ADDER], "store": store} | more))
    return load_cluster_config(file)


class Running:
    """A cluster `one` that runs with a config, and what is done to it."""

    def __init__(self, running: ClusterConfig) -> None:
        self.config = running
        self.done: list[Any] = []

    def carry_out(self, registry: Any, running: ClusterConfig, wanted: ClusterConfig, say: Any) -> list[str]:
        self.done.append(wanted)
        say("it is done")
        return ["m: torn"] if wanted.entries["adder"].description == "torn" else []  # type: ignore[union-attr]


@pytest.fixture
def running(file: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    made = Running(write(file))
    monkeypatch.setattr("deployments.cli.apply.clusters_at", lambda at: (["one"], ""))
    monkeypatch.setattr(applying, "running_config", lambda wanted: ("registry", made.config))
    monkeypatch.setattr(applying, "carry_out", made.carry_out)
    return made


def apply(run: Run, file: Path, *options: str) -> tuple[int, str]:
    code, out, err = run("apply", str(file), *options)
    return code, out + err


def test_a_plan_shows_each_key_with_what_happens_and_does_nothing(run: Run, file: Path, running: Running) -> None:
    write(file, worker={"num_threads": 2}, adapters=[{"id": "new", "path": ADDER["path"], "base": ["adder"]}])
    # The adapter is none: `check` says so before anything is asked.
    code, said = apply(run, file, "--plan")
    assert (code, "one.yaml" in said, "adapters.0" in said) == (2, True, True)
    write(file, worker={"num_threads": 2}, admission={"max_waiting": 9}, controller={"tick_s": 0.5})
    code, said = apply(run, file, "--plan")
    assert code == 0
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert "workers are replaced one by one" in lines["worker.num_threads"]
    assert "set while it serves" in lines["admission.max_waiting"]
    assert lines["controller.tick_s"].split()[1:3] == ["0.25", "0.5"]
    assert "set while it serves" in lines["controller.tick_s"]
    assert running.done == []


def test_it_does_what_the_plan_says_and_problems_are_its_exit_code(run: Run, file: Path, running: Running) -> None:
    wanted = write(file, admission={"max_waiting": 9})
    code, said = apply(run, file)
    assert (code, "it is done" in said, running.done) == (0, True, [wanted])
    write(file, models=[ADDER | {"description": "torn"}])
    assert apply(run, file)[0] == 1
    code, said = apply(run, file, "--json")
    assert code == 1
    answer = json.loads(said.splitlines()[0])
    assert (answer["changes"][0]["key"], answer["problems"]) == ("models.adder.description", ["m: torn"])


def test_the_same_config_has_nothing_to_do_and_options_of_up_count(run: Run, file: Path, running: Running) -> None:
    code, said = apply(run, file)
    assert (code, "nothing to change" in said, running.done) == (0, True, [])
    http = running.config.http.model_copy(update={"port": 8123})
    running.config = running.config.model_copy(update={"http": http})
    code, said = apply(run, file)
    assert (code, "http.port: no running cluster takes" in said) == (1, True)
    assert "nothing to change" in apply(run, file, "--port", "8123")[1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["two"], "there are 'two'; another name is another cluster"), ([], "no Ray answers at auto")],
)
def test_a_cluster_that_is_not_up_is_named(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], expected: str
) -> None:
    write(file)
    monkeypatch.setattr("deployments.cli.apply.clusters_at", lambda at: (names, f"no Ray answers at {at}"))
    code, said = apply(run, file)
    assert (code, said) == (1, f"error: no cluster 'one' is up: {expected}\n")


def test_a_mistake_of_the_config_is_told_with_its_line(run: Run, file: Path, running: Running) -> None:
    file.write_text(file.read_text() + "worker: {num_replica: 2}\n")
    code, said = apply(run, file)
    assert (code, "worker.num_replica" in said, "did you mean 'num_replicas'" in said) == (2, True, True)
    assert running.done == []


class Registry:
    """Notes what a registry is asked, and has its models: of each look at them, the state of the new one."""

    def __init__(self, states: Iterator[ModelRecord]) -> None:
        self.states = states
        self.asked: list[Any] = []

    def ask(self, registry: Any, method: Any, *arguments: Any) -> Any:
        assert registry is self
        if method == WeightRegistry.configure:
            self.asked.append(arguments[0])
            return None
        adapter = config(adapters=[{"id": "a", "path": "/a", "base": ["m"]}]).entries["a"]
        return [next(self.states), ModelRecord("a", "ready", entry=adapter)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The calls of everybody but the registry, in their order."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made: list[str] = []
    for name in ("_follow", "_replace", "_await_replicas"):
        monkeypatch.setattr(applying, name, lambda *_, name=name: made.append(name) or [])
    monkeypatch.setattr(applying, "_POLL_S", 0.0)
    return made


def test_models_are_there_before_replicas_are_replaced_and_the_rest_is_kept_when_serve_has_it(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    before, wanted = config(), config(models=[{"id": "n", "path": "/n"}], worker={"num_threads": 2})
    states = [ModelRecord("n", "registering"), ModelRecord("n", "unavailable", error="torn")]
    registry, said = Registry(iter(states)), []
    monkeypatch.setattr(applying, "_ask", registry.ask)
    with SessionFile(before, "http://127.0.0.1:8000", "one.yaml", record_folder()):
        assert carry_out(registry, before, wanted, said.append) == ["n: torn"]
        (record,) = running_sessions(record_folder())
        assert record.digest == config_digest(wanted), "`atelier up` compares its config with that"
    assert registry.asked == [before.model_copy(update={"models": wanted.models}), wanted]
    assert calls == ["_follow", "_replace", "_await_replicas"]
    assert said[0] == "adapters of models that are gone, registered beside the config: a"


def test_what_serve_does_not_take_is_not_kept_as_done(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    def refuse(running: ClusterConfig, wanted: ClusterConfig) -> None:
        raise SessionError("Serve is away")

    monkeypatch.setattr(applying, "_replace", refuse)
    registry = Registry(iter(()))
    monkeypatch.setattr(applying, "_ask", registry.ask)
    with pytest.raises(SessionError, match="away"):
        carry_out(registry, config(), config(worker={"num_threads": 2}), print)
    assert registry.asked == []


def app(num_running: int, num_unplaced: int, *, is_settled: bool = False, failure: str = "") -> DeployedApp:
    return DeployedApp({"worker": ReplicaCount(num_running, num_unplaced, 1)}, failure, is_settled=is_settled)


@pytest.mark.parametrize(
    ("looks", "lacking", "problem"),
    [
        ([app(1, 0), app(2, 0), app(1, 0, is_settled=True)], True, None),
        ([app(1, 1), app(1, 0, failure="no such module")], True, "could not be replaced: no such module"),
        ([app(1, 1)] * 2, True, "the replicas before serve on until there is room for one more\nworker: no room"),
        ([*[app(1, 1)] * 9, app(2, 0), app(1, 0, is_settled=True)], False, None),
    ],
    ids=["room", "failure", "no room", "a process that begins late"],
)
def test_replicas_are_waited_for_until_serve_says_so_or_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, looks: list[DeployedApp], lacking: bool, problem: str | None
) -> None:
    found = iter(looks)
    lines = {"worker": "worker: no room"} if lacking else {}
    monkeypatch.setattr(applying, "deployed_app", lambda name: next(found))
    monkeypatch.setattr("deployments.console.running.unplaced_lines", lambda config, app: lines)
    monkeypatch.setattr(applying, "_POLL_S", 0.0)
    if problem is None:
        _await_replicas(config(), no_room_s=0.0)
    else:
        with pytest.raises(SessionError, match=problem):
            _await_replicas(config(), no_room_s=0.0)
    assert next(found, None) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"policy": "throughput-first", "tick_s": 0.5}, ["configure", "_follow"]),
        # Whether the controller scales, Serve learns first: it takes no number from who is not to tell it.
        ({"scaling": {"max_workers": 2}}, ["_follow", "_replace", "configure", "_await_replicas"]),
    ],
)
def test_what_the_controller_goes_by_reaches_the_registry_which_it_asks(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], change: dict[str, Any], expected: list[str]
) -> None:
    before, wanted = config(), config(controller=change)

    def ask(registry: Any, method: Any, *arguments: Any) -> Any:
        if arguments == (wanted,):
            calls.append("configure")
        return []

    monkeypatch.setattr(applying, "_ask", ask)
    assert carry_out("registry", before, wanted, lambda line: None) == []
    assert calls == expected


class Asked:
    """A deployment of Serve's that notes how many replicas it is asked for."""

    def __init__(self, names: tuple[str, ...], asked: list[Any]) -> None:
        self._names, self._asked = names, asked

    async def set_target(self, num_replicas: int) -> None:
        self._asked.append((self._names, num_replicas))


def test_a_replica_that_has_a_place_and_never_begins_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(applying, "deployed_app", lambda name: app(1, 1))
    monkeypatch.setattr("deployments.console.running.unplaced_lines", lambda config, app: {})
    with pytest.raises(SessionError, match=r"no process of another has begun for 0\.01 s"):
        _await_replicas(config(), no_room_s=0.0, no_start_s=0.01)


@pytest.mark.parametrize(("scaling", "expected"), [(None, 1), ({"max_workers": 5}, 4)])
def test_where_the_controller_scales_its_number_of_workers_stays(
    monkeypatch: pytest.MonkeyPatch, scaling: dict[str, int] | None, expected: int
) -> None:
    ran: list[ClusterConfig] = []
    environments: Mapping[str, Any] = {"worker": {"A": "1"}}
    deployed = DeployedApp({"worker": ReplicaCount(4, 0, 4)}, "", environments)
    monkeypatch.setattr(applying, "deployed_app", lambda name: deployed)
    monkeypatch.setattr("deployments.app.versioned_app", lambda config, found: (config, found))
    monkeypatch.setattr("deployments.console.running.run_application", lambda config, app: ran.append(config))
    asked: list[Any] = []
    monkeypatch.setattr(applying, "ServeReplicas", lambda *names: Asked(names, asked))
    scaled = config(controller={"scaling": {"max_workers": 9}})
    applying._replace(scaled, config(controller={"scaling": scaling}))
    assert [one.worker.num_replicas for one in ran] == [expected]
    # Serve was deployed with one, and takes one for no change.
    assert asked == ([(("one", "worker"), 1)] if scaling is None else [])
    applying._replace(config(), config())
    assert len(asked) == (scaling is None), "nobody but the controller's number is to be undone"
    deployed = DeployedApp({})
    with pytest.raises(SessionError, match="Serve runs no application 'one' now"):
        applying._replace(config(), config())


def test_who_does_not_answer_is_named_and_nothing_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> Any:
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(applying, "get", die)
    monkeypatch.setattr(applying, "call_actor", lambda *_: None)
    monkeypatch.setattr(applying, "named_actors", lambda: ["keeper:one:a:n", "registry:one:a", "registry:two:b"])
    asked: list[str] = []
    monkeypatch.setattr(applying, "find_registry", lambda name: asked.append(name) or name)
    with pytest.raises(SessionError, match="the registry does not answer"):
        applying.running_config(config())
    assert asked == ["registry:one:a"], "that of another control plane, whose config tells why"
    monkeypatch.setattr(applying, "named_actors", lambda: ["keeper:one:a:n"])
    with pytest.raises(SessionError, match="the registry of cluster 'one' is restarting"):
        applying.running_config(config())
    monkeypatch.setattr(applying, "deployed_app", die)
    with pytest.raises(SessionError, match="Serve does not answer"):
        applying._replace(config(), config())
