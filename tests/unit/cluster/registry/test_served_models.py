"""Models come, change and go while others are served, and are there again after the registry was killed."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.waiting import until
from safetensors.numpy import save_file
from unit.cluster.registry.model_sources import Sources
from unit.counting import operations

from cluster.records.errors import (
    ModelUnknown,
    ModelUnservable,
    NotKept,
    RegistrationConflict,
    RegistrationRefused,
    WeightsUnavailable,
)
from cluster.registry.directory import Entry, ModelRecord
from cluster.registry.importing import import_checkpoint
from cluster.registry.manifests import ModelSummary
from cluster.registry.publishing import Publishing
from cluster.registry.registrations import Registration, Registrations
from cluster.registry.served_models import ServedModels
from configs.model import AdapterConfig, ModelConfig
from configs.workflow import WorkflowConfig, WorkflowInput, WorkflowOutput
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

ImportModel = Callable[[Entry], ModelSummary]


def checkpoint(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"]}))
    staged = folder.with_suffix(".staged")
    save_file({"w": np.random.default_rng(seed).random((3, 5 + seed), np.float32)}, staged)
    staged.replace(folder / "model.safetensors")
    return folder


def model(path: Path | str, id_: str = "m", **more: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": id_, "path": path, **more})


class Life:
    """One life of a registry after another, over the same disk."""

    def __init__(self, folder: Path) -> None:
        self.store = WeightStore(folder / "store")
        self.folder = self.store.path / "registrations" / "one"

        self.forgotten: list[str] = []

    async def begin(self, *configured: Entry, import_checkpoint: ImportModel | None = None) -> ServedModels:
        entries: Mapping[str, Entry] = {entry.id: entry for entry in configured}
        models = ServedModels(
            entries,
            self.store,
            Registrations(self.folder),
            Sources(import_checkpoint or self.import_checkpoint, forget_source=self.forgotten.append),
            epoch="e",
        )
        await models.begin_imports()
        return models

    def import_checkpoint(self, entry: Entry) -> ModelSummary:
        return import_checkpoint(self.store, entry)


class Gate:
    """A source that gives its models when it is told to."""

    def __init__(self, import_checkpoint: ImportModel) -> None:
        self._import_checkpoint = import_checkpoint
        self.began, self.open = threading.Event(), threading.Event()

    def __call__(self, entry: Entry) -> ModelSummary:
        self.began.set()
        assert self.open.wait(20)
        return self._import_checkpoint(entry)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def record(models: ServedModels, id_: str = "m") -> ModelRecord:
    found = models.directory.get(id_)
    assert found
    return found


async def test_a_registered_model_is_there_and_known_after_a_kill(life: Life, tmp_path: Path) -> None:
    entry = model(checkpoint(tmp_path / "c"), defaults={"max_tokens": 3})
    models = await life.begin()
    made = await models.register(entry)
    assert (made.state, made.kind, made.nbytes, made.entry) == ("ready", "llm", 60, entry)
    assert (await models.manifest("m")).fingerprint == made.fingerprint
    details = await models.model_details("m")
    assert (details.num_parameters, details.quantization, details.format) == (15, "F32", "safetensors")
    again = await (await life.begin()).find_model("m")
    assert (again.state, again.fingerprint, again.defaults.max_tokens) == ("ready", made.fingerprint, 3)


async def test_the_config_of_a_solver_is_that_of_the_pipeline(life: Life, tmp_path: Path) -> None:
    models = await life.begin()
    made = await models.register(model(checkpoint(tmp_path / "c")))
    assert await models.solver_config("m") == {}  # a language model has none
    skeleton = life.store.skeleton(await models.manifest("m"))
    assert made.kind == "llm"
    (skeleton / "scheduler").mkdir()
    (skeleton / "scheduler/scheduler_config.json").write_text('{"beta_start": 0.5}')
    assert await models.solver_config("m") == {"beta_start": 0.5}


async def test_the_same_again_changes_nothing_that_is_served(life: Life, tmp_path: Path) -> None:
    models = await life.begin()
    first = await models.register(model(checkpoint(tmp_path / "c")))
    second = await models.register(model(tmp_path / "c"))
    assert (second.state, second.fingerprint, second.nbytes) == ("ready", first.fingerprint, first.nbytes)


async def test_a_changed_checkpoint_is_another_version_and_the_one_before_serves_until_then(
    life: Life, tmp_path: Path
) -> None:
    models = await life.begin(model(checkpoint(tmp_path / "c")))
    before = await models.find_model("m")
    models._sources.import_model = gate = Gate(life.import_checkpoint)
    checkpoint(tmp_path / "c", seed=1)
    updating = await models.register(model(tmp_path / "c"), wait=False)
    assert (updating.state, updating.fingerprint, updating.kind) == ("updating", before.fingerprint, "llm")
    assert (await models.find_model("m")).state == "updating"
    assert (await models.manifest("m")).fingerprint == before.fingerprint
    gate.open.set()
    await models.register(model(tmp_path / "c"))
    after = await models.find_model("m")
    assert (after.state, after.nbytes) == ("ready", 72)
    assert after.fingerprint != before.fingerprint
    assert (await models.manifest("m")).fingerprint == after.fingerprint
    assert (await models.manifest("m", before.fingerprint)).nbytes == 60


async def test_an_update_that_fails_leaves_the_version_before_and_says_why(life: Life, tmp_path: Path) -> None:
    good = model(checkpoint(tmp_path / "c"), defaults={"max_tokens": 3})
    models = await life.begin()
    before = await models.register(good)
    failed = await models.register(model(tmp_path / "nowhere"))
    assert (failed.state, failed.fingerprint, failed.defaults) == ("ready", before.fingerprint, before.defaults)
    assert "nowhere: no such folder" in failed.error
    again = await (await life.begin()).find_model("m")
    assert (again.state, again.fingerprint, again.error) == ("ready", before.fingerprint, "")


async def test_a_first_version_that_fails_is_unavailable_and_may_be_mended(life: Life, tmp_path: Path) -> None:
    models = await life.begin()
    assert (await models.register(model(tmp_path / "c"))).state == "unavailable"
    with pytest.raises(WeightsUnavailable, match="no such folder"):
        await models.manifest("m")
    checkpoint(tmp_path / "c")
    assert (await models.register(model(tmp_path / "c"))).state == "ready"


async def test_of_many_versions_at_once_the_last_one_wins(life: Life, tmp_path: Path) -> None:
    models = await life.begin(import_checkpoint=(gate := Gate(life.import_checkpoint)))
    waiting = [
        asyncio.ensure_future(models.register(model(checkpoint(tmp_path / f"c{seed}", seed)))) for seed in range(5)
    ]
    await asyncio.to_thread(gate.began.wait)
    gate.open.set()
    await asyncio.gather(*waiting)
    last = await models.find_model("m")
    assert (last.state, last.nbytes, (await models.manifest("m")).nbytes) == ("ready", 108, 108)
    assert life.store.manifest("m").fingerprint == last.fingerprint


async def test_a_removed_model_is_unknown_and_stays_in_the_store_unless_it_is_purged(
    life: Life, tmp_path: Path
) -> None:
    models = await life.begin()
    await models.register(model(checkpoint(tmp_path / "c")))
    await models.unregister("m")
    with pytest.raises(ModelUnknown, match="known: none"):
        await models.manifest("m")
    assert life.store.model_names() == ["m"]
    assert len((await life.begin()).directory) == 0
    await models.register(model(tmp_path / "c"))
    await models.unregister("m", purge=True)
    assert life.store.model_names() == []
    with pytest.raises(ModelUnknown):
        await models.unregister("m")


async def test_a_model_removed_while_it_comes_in_does_not_appear(life: Life, tmp_path: Path) -> None:
    models = await life.begin(import_checkpoint=(gate := Gate(life.import_checkpoint)))
    coming = asyncio.ensure_future(models.register(model(checkpoint(tmp_path / "c"))))
    await asyncio.to_thread(gate.began.wait)
    leaving = asyncio.ensure_future(models.unregister("m", purge=True))
    while "m" in models.directory:
        await asyncio.sleep(0)
    gate.open.set()
    await leaving
    with pytest.raises(RegistrationConflict, match="removed while"):
        await coming
    assert ("m" in models.directory, life.store.model_names()) == (False, [])


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_model_removed_while_the_store_is_searched_for_it_does_not_come_back(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    if is_stored:
        checkpoint(tmp_path / "c")
    await (await life.begin()).register(model(tmp_path / "c"))
    if is_stored:
        (tmp_path / "c").rename(tmp_path / "gone")
    search, began, go_on = Publishing._find_stored, threading.Event(), threading.Event()

    def search_when_told(self: Publishing, entry: Entry) -> ModelSummary | None:
        began.set()
        assert go_on.wait(20)
        return search(self, entry)

    monkeypatch.setattr(Publishing, "_find_stored", search_when_told)
    models = await life.begin()
    await asyncio.to_thread(began.wait, 20)
    coming = models._publishing.tasks["m"]
    await models.unregister("m")
    go_on.set()
    await coming
    assert (len(models.directory), models.extents.by_model) == (0, {})


async def test_adapters_without_their_base_are_named_and_go_on(life: Life, tmp_path: Path) -> None:
    models = await life.begin()
    for id_ in ("m", "n"):
        await models.register(model(checkpoint(tmp_path / "c"), id_))
    for id_, base in (("a", ("m",)), ("b", ("n", "m")), ("c", ("n",))):
        await models.register(AdapterConfig(id=id_, path=tmp_path / "lora", base=base))
    assert await models.unregister("m") == ("a", "b")
    again = await life.begin()
    assert {found.id: found.base for found in again.directory} == {"a": ("m",), "b": ("n", "m"), "c": ("n",), "n": ()}


@pytest.mark.parametrize(
    ("entry", "error", "field", "text"),
    [
        (AdapterConfig(id="m", path=Path("/l"), base=("m",)), RegistrationConflict, "id", "'m' is a model already"),
        (ModelConfig(id="lora", path=Path("/l")), RegistrationConflict, "id", "'lora' is an adapter already"),
        (
            AdapterConfig(id="x", path=Path("/l"), base=("no", "m")),
            RegistrationRefused,
            "base",
            r"unknown no \(models: m\)",
        ),
        (AdapterConfig(id="x", path=Path("/l"), base=("lora",)), RegistrationRefused, "base", "base: unknown lora"),
        (ModelConfig(id="x", path=Path("some/where")), RegistrationRefused, "path", "'some/where' is relative"),
    ],
)
async def test_an_entry_that_does_not_fit_is_refused_before_anything_changes(
    life: Life, tmp_path: Path, entry: Entry, error: type[RegistrationRefused], field: str, text: str
) -> None:
    configured = [model(checkpoint(tmp_path / "c")), AdapterConfig(id="lora", path=tmp_path / "l", base=("m",))]
    models = await life.begin(*configured)
    await asyncio.gather(*(models.find_model(item.id) for item in configured))
    revision = models.directory.revision
    with pytest.raises(error, match=text) as refused:
        await models.register(entry)
    over_actors = pickle.loads(pickle.dumps(refused.value))
    assert (over_actors.field, str(over_actors)) == (field, str(refused.value))
    assert (models.directory.revision, life.folder.exists()) == (revision, False)


async def test_a_model_that_is_like_another_comes_after_it(life: Life, tmp_path: Path) -> None:
    came: list[str] = []

    def note(entry: Entry) -> ModelSummary:
        came.append(entry.id)
        return life.import_checkpoint(entry.model_copy(update={"like": None}))

    first = model(checkpoint(tmp_path / "a"), "single", like="base")
    models = await life.begin(first, model(checkpoint(tmp_path / "b"), "base"), import_checkpoint=note)
    await models.register(model(checkpoint(tmp_path / "c"), "another", like="base"))
    assert came.index("base") < came.index("single")
    for like, problem in {
        "nobody": "'nobody' is no pipeline with configs of its own",
        "single": "'single' is no pipeline with configs of its own",
        "some/folder": "'some/folder' is relative",
    }.items():
        with pytest.raises(RegistrationRefused, match=problem):
            await models.register(model(tmp_path / "c", "third", like=like))


async def test_a_model_that_is_like_itself_is_refused_and_its_id_stays_usable(life: Life, tmp_path: Path) -> None:
    models = await life.begin()
    before = await models.register(model(checkpoint(tmp_path / "a"), "sd"))
    async with asyncio.timeout(20):
        with pytest.raises(RegistrationRefused, match=r"'sd' is this model itself \(models: none\)") as refused:
            await models.register(model(tmp_path / "b.safetensors", "sd", like="sd"))
        assert refused.value.field == "like"
        assert await models.find_model("sd") == before
        assert (await models.register(model(checkpoint(tmp_path / "c", seed=1), "sd"))).nbytes == 72
        assert await models.unregister("sd", purge=True) == ()


async def test_registrations_that_rest_on_themselves_are_named_and_nothing_else_waits_for_them(
    life: Life, tmp_path: Path
) -> None:
    """An earlier registry could save such files, and its successor has to come up with them."""
    path, saved = checkpoint(tmp_path / "a"), Registrations(life.folder)
    entries: list[Entry] = [
        model(path, "own", like="own"),
        model(path, "one", like="other"),
        model(path, "other", like="one"),
        AdapterConfig(id="lora", path=path, base=("own",)),
        AdapterConfig(id="first", path=path, base=("second", "sound")),
        AdapterConfig(id="second", path=path, base=("first",)),
        model(path, "None"),  # a model's name, and not what a model without `like` is like
        model(path, "sound"),
    ]
    for entry in entries:
        saved.save(Registration(entry=entry))
    async with asyncio.timeout(20):
        models = await life.begin()
        found = {entry.id: await models.find_model(entry.id) for entry in entries}
        assert {id_: one.error for id_, one in found.items() if one.state == "unavailable"} == {
            "own": "it rests on itself (own on own), so that nothing can come first",
            "one": "it rests on itself (one on other on one), so that nothing can come first",
            "other": "it rests on itself (other on one on other), so that nothing can come first",
            "first": "it rests on itself (first on second on first), so that nothing can come first",
            "second": "it rests on itself (second on first on second), so that nothing can come first",
        }
        mended = await models.register(model(path, "own"))
        assert (mended.state, mended.error) == ("ready", "")


async def test_a_config_that_closes_a_circle_over_a_registration_leaves_the_versions_before(
    life: Life, tmp_path: Path
) -> None:
    x, z = model(checkpoint(tmp_path / "x"), "x"), model(checkpoint(tmp_path / "z", seed=1), "z")
    without_like = partial(ModelConfig.model_copy, update={"like": None})
    models = await life.begin(x, z, import_checkpoint=lambda entry: life.import_checkpoint(without_like(entry)))
    async with asyncio.timeout(20):
        await models.find_model("x")
        await models.register(model(tmp_path / "z", "z", like="x"))
        await models.configure({"x": model(tmp_path / "x", "x", like="z"), "z": z})
        await until(lambda: record(models, "x").state != "updating")
        assert (record(models, "x").state, record(models, "x").entry) == ("ready", x)
        assert "it rests on itself (x on z on x)" in record(models, "x").error
        assert (await models.register(model(tmp_path / "z", "z", like="x"))).error == ""


async def test_a_configured_model_can_be_replaced_but_not_removed(life: Life, tmp_path: Path) -> None:
    configured = model(checkpoint(tmp_path / "c"))
    replacement = model(checkpoint(tmp_path / "d", seed=2))
    models = await life.begin(configured)
    await models.register(replacement)
    with pytest.raises(RegistrationConflict, match="cluster config"):
        await models.unregister("m")
    assert (await (await life.begin(configured)).find_model("m")).entry == replacement
    changed = model(tmp_path / "c", description="edited since")
    assert (await (await life.begin(changed)).find_model("m")).entry == changed
    assert (await (await life.begin(configured)).find_model("m")).entry == configured


async def test_a_registration_that_the_disk_does_not_let_go_stops_nothing_else(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    configured = model(checkpoint(tmp_path / "c"))
    models = await life.begin(configured)
    before = await models.find_model("m")
    await models.register(model(checkpoint(tmp_path / "d", seed=2)))
    await models.register(model(checkpoint(tmp_path / "e", seed=3), "own"))
    await models.register(configured)  # and there is no file any more
    models._sources.import_model = gate = Gate(life.import_checkpoint)
    updating = asyncio.ensure_future(models.register(model(tmp_path / "nowhere")))
    await until(gate.began.is_set)

    def refuse(path: Path) -> None:
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr("cluster.registry.registrations.remove_path", refuse)
    gate.open.set()  # the update fails, and what it had saved cannot be removed
    failed = await updating
    assert (failed.state, failed.fingerprint) == ("ready", before.fingerprint)
    with pytest.raises(RegistrationRefused, match=r"own\.json: cannot be removed: Stale file handle"):
        await models.unregister("own")
    assert record(models, "own").state == "ready"
    again = await life.begin(model(tmp_path / "c", description="edited since"))
    assert (await again.find_model("m")).description == "edited since"
    assert "m.json: cannot be removed" in caplog.text


@pytest.mark.parametrize("goes_back", [False, True])
async def test_a_config_that_was_taken_in_by_half_is_taken_in_wholly_by_the_next_call(
    life: Life, tmp_path: Path, goes_back: bool
) -> None:
    paths = [checkpoint(tmp_path / str(seed), seed) for seed in range(5)]
    a, b, c, d, other = (model(path, id_) for path, id_ in zip(paths, "abcda", strict=True))
    models = await life.begin(a, b)
    await models.register(other)  # overrules the config's entry: there is a file to remove
    sound, refused = models._known._registrations.remove, {"b", "c"}

    def remove(id_: str) -> None:
        if id_ in refused:
            refused.discard(id_)
            raise OSError(116, "Stale file handle")
        sound(id_)

    models._known._registrations.remove = remove  # type: ignore[method-assign]
    new = {one.id: one for one in (c, d)}
    for done in ({"b"}, set[str]()):
        with pytest.raises(OSError, match="Stale"):
            await models.configure(new)
        assert set(models.configured) == done
    wanted = {"a": a, "b": b} if goes_back else new
    await models.configure(wanted)
    found = {id_: (await models.find_model(id_)).entry for id_ in wanted}
    assert (found, {one.id for one in models.directory}) == (wanted, set(wanted))


async def test_another_config_takes_the_place_of_the_one_before_and_leaves_what_it_does_not_name(
    life: Life, tmp_path: Path
) -> None:
    paths = [checkpoint(tmp_path / str(seed), seed) for seed in range(4)]
    stays, goes, changes = (model(path, id_) for path, id_ in zip(paths, ("stays", "goes", "changes"), strict=False))
    models = await life.begin(stays, goes, changes)
    await models.register(model(paths[3], "beside"))
    await models.register(model(paths[3], "stays"))  # by an operator, over the config
    await models.register(model(paths[3], "goes"))
    before = {id_: await models.find_model(id_) for id_ in ("stays", "beside", "changes")}
    changed, new = model(paths[3], "changes", description="another"), model(paths[0], "new")
    assert await models.configure({entry.id: entry for entry in (new, stays, changed)}) == ["goes"]
    assert (await models.find_model("new")).state == "ready"
    await until(lambda: record(models, "changes").state == "ready")
    assert [found.id for found in models.directory] == ["stays", "changes", "beside", "new"]
    assert [record(models, id_) for id_ in ("stays", "beside")] == [before["stays"], before["beside"]]
    assert record(models, "changes").description == "another"
    assert record(models, "changes").fingerprint != before["changes"].fingerprint
    assert (await models.manifest("changes", before["changes"].fingerprint)).nbytes == before["changes"].nbytes
    again = await life.begin(new, stays, changed)
    assert {found.id for found in again.directory} == {found.id for found in models.directory}
    with pytest.raises(ModelUnknown):
        await models.find_model("goes")


async def test_a_changed_entry_that_cannot_be_used_leaves_the_version_before(life: Life, tmp_path: Path) -> None:
    models = await life.begin(model(checkpoint(tmp_path / "c")))
    before = await models.find_model("m")
    await models.configure({"m": model(tmp_path / "nowhere")})
    await until(lambda: record(models).state == "ready")
    assert (record(models).fingerprint, record(models).entry) == (before.fingerprint, before.entry)
    assert "nowhere: no such folder" in record(models).error


@pytest.mark.parametrize(
    "damage", ["", "{", '{"entry": {"id": "m"}}', '{"entry": {"id": "m", "path": "/c", "colour": 1}}', "\xff"]
)
async def test_a_damaged_registration_takes_down_its_own_model_only(life: Life, tmp_path: Path, damage: str) -> None:
    models = await life.begin()
    for id_ in ("m", "n"):
        await models.register(model(checkpoint(tmp_path / "c"), id_))
    (life.folder / "m.json").write_text(damage, encoding="latin-1")
    (life.folder / "no id.json").write_text("{}")
    again = await life.begin()
    assert (await again.find_model("n")).state == "ready"
    broken = await again.find_model("m")
    assert broken.state == "unavailable"
    assert f"{life.folder / 'm.json'}: damaged registration" in broken.error
    assert (await again.register(model(tmp_path / "c"))).state == "ready"


async def test_a_registration_under_another_name_is_damaged(life: Life, tmp_path: Path) -> None:
    await (await life.begin()).register(model(checkpoint(tmp_path / "c")))
    (life.folder / "m.json").rename(life.folder / "x.json")
    assert "it is of 'm'" in record(await life.begin(), "x").error


async def test_a_folder_that_cannot_be_written_refuses_registration(life: Life, tmp_path: Path) -> None:
    life.store.path.mkdir()
    (life.store.path / "registrations").write_text("in the way")
    with pytest.raises(NotKept, match="cannot be written"):
        await (await life.begin()).register(model(checkpoint(tmp_path / "c")))


async def test_a_stored_model_is_served_without_its_checkpoint(life: Life, tmp_path: Path) -> None:
    configured = model(checkpoint(tmp_path / "c"))
    before = await (await life.begin(configured)).find_model("m")
    (tmp_path / "c").rename(tmp_path / "gone")
    found = await (await life.begin(configured)).find_model("m")
    assert (found.state, found.fingerprint) == ("ready", before.fingerprint)
    assert "the checkpoint cannot be read" in found.error
    other = await (await life.begin(model(tmp_path / "elsewhere"))).find_model("m")
    assert other.state == "unavailable"


async def test_a_stored_model_that_no_engine_runs_is_not_served_from_the_store(life: Life, tmp_path: Path) -> None:
    entry = model(checkpoint(tmp_path / "c"))
    assert (await (await life.begin(entry)).find_model("m")).state == "ready"  # by an Atelier that did not ask

    def refuse(entry: Entry) -> ModelSummary:
        raise ModelUnservable("architecture 'TinyForCausalLM' is not supported")

    models = await life.begin(entry, import_checkpoint=refuse)
    found = await models.find_model("m")
    assert (found.state, found.kind) == ("unavailable", None)
    with pytest.raises(WeightsUnavailable, match="'m' is unavailable: architecture 'TinyForCausalLM'"):
        await models.manifest("m")


async def test_a_model_is_unavailable_when_every_replica_has_failed_with_it(life: Life, tmp_path: Path) -> None:
    models = await life.begin(model(checkpoint(tmp_path / "c")))
    version = (await models.find_model("m")).fingerprint
    one, two, other = (f"SERVE_REPLICA::app#{name}" for name in ("worker#1", "worker#2", "text_encoder#1"))
    models.loads.follow_replicas([one, two, other])

    async def report(replica: str, error: str | None, of: str = version) -> tuple[str, str]:
        await models.loads.report_attach("m", of, replica, "0123456789abcdef", error)
        return record(models).state, record(models).error

    assert await report(one, "tensor w is torn") == ("ready", "")
    assert await report(two, "no such file") == (
        "unavailable",
        "worker 1 on node 01234567: tensor w is torn; worker 2 on node 01234567: no such file",
    )
    assert await models.manifest("m")  # it is still tried
    assert await report(two, None) == ("ready", "")
    assert await report(two, "no such file", of="an older version") == ("ready", "")
    assert (await report(one, "torn"), (await report(two, "torn"))[0]) == (("ready", ""), "unavailable")
    models.loads.follow_replicas([one, other, f"{two}-after"])
    assert record(models).state == "ready"  # the one that replaces it may load it
    models.loads.follow_replicas([one, other])
    assert (await report(one, "torn"))[0] == "unavailable"
    await models.loads.report_attach("nobody", version, one, "node", "x")


async def test_a_failed_load_hides_no_update_and_a_new_version_begins_anew(life: Life, tmp_path: Path) -> None:
    models = await life.begin(model(checkpoint(tmp_path / "c")))
    version = (await models.find_model("m")).fingerprint
    await models.loads.report_attach("m", version, "app#worker#1", "node", "torn")
    assert record(models).state == "unavailable"
    await models.register(model(checkpoint(tmp_path / "d", seed=1)))
    assert record(models).fingerprint != version
    assert (record(models).state, record(models).error) == ("ready", "")
    await models.loads.report_attach("m", version, "app#worker#1", "node", "torn")
    assert record(models).state == "ready"


async def test_any_error_of_a_source_is_told_and_the_others_come_in(life: Life, tmp_path: Path) -> None:
    def import_checkpoint(entry: Entry) -> ModelSummary:
        if entry.id == "n":
            raise FormatError("model.safetensors: tensor 'w' is torn")
        if entry.id == "o":
            raise MemoryError
        return life.import_checkpoint(entry)

    path = checkpoint(tmp_path / "c")
    models = await life.begin(*(model(path, id_) for id_ in "mno"), import_checkpoint=import_checkpoint)
    found = {id_: (await models.find_model(id_)) for id_ in "mno"}
    assert [found[id_].state for id_ in "mno"] == ["ready", "unavailable", "unavailable"]
    assert [found[id_].error for id_ in "no"] == ["model.safetensors: tensor 'w' is torn", "MemoryError()"]


def test_many_models_start_linearly_and_are_looked_up_at_once(life: Life, tmp_path: Path) -> None:
    stored = life.import_checkpoint(model(checkpoint(tmp_path / "c")))

    def costs(num_models: int) -> tuple[int, int]:
        """Count the operations of a start, and of fifty look-ups."""
        entries = [model(tmp_path / "c", f"m{number}") for number in range(num_models)]
        begun: list[ServedModels] = []

        async def start() -> None:
            begun.append(await life.begin(*entries, import_checkpoint=lambda entry: stored))
            await begun[0].find_model(f"m{num_models - 1}")

        async def look_up() -> None:
            for number in range(0, num_models, num_models // 50):
                assert (await begun[0].find_model(f"m{number}")).state == "ready"

        async def ask_for_none() -> None:
            with pytest.raises(ModelUnknown, match=f"and {num_models - 30} more"):
                await begun[0].find_model("nope")

        with asyncio.Runner() as runner:
            found = (operations(lambda: runner.run(start())), operations(lambda: runner.run(look_up())))
            runner.run(ask_for_none())
        return found

    (few_start, few_found), (many_start, many_found) = costs(100), costs(500)
    assert many_start < 5 * few_start * 1.2
    assert many_found < 1.1 * few_found


async def test_a_url_is_forgotten_with_the_last_model_from_there(life: Life, tmp_path: Path) -> None:
    local = checkpoint(tmp_path / "c")

    def import_local(entry: Entry) -> ModelSummary:
        return import_checkpoint(life.store, entry.model_copy(update={"path": local}))

    gate = Gate(import_local)
    models = await life.begin(model("s3://bucket/kept", "configured"), import_checkpoint=import_local)
    for id_ in ("x", "y"):
        await models.register(model("s3://bucket/a", id_))
    await models.register(model("s3://bucket/kept", "x"))
    assert life.forgotten == []
    await models.register(model("s3://bucket/b", "y"))
    assert life.forgotten == ["s3://bucket/a"]
    await models.unregister("x")
    assert life.forgotten == ["s3://bucket/a"]  # a configured model is from where that one was
    models._sources.import_model = gate
    await models.register(model("s3://bucket/c", "late"), wait=False)
    await asyncio.to_thread(gate.began.wait, 20)
    downloading = models._publishing.tasks["late"]
    await models.unregister("late")
    gate.open.set()
    await downloading
    assert life.forgotten[1:] == ["s3://bucket/c"] * 2  # asked for while it was coming, and when it had come


def workflow(id_: str = "posters", **nodes: Any) -> WorkflowConfig:
    inputs = {"prompt": WorkflowInput(node="1", input="text", type="text")}
    outputs = {"image": WorkflowOutput(node="2", type="image")}
    return WorkflowConfig(id=id_, nodes=nodes, inputs=inputs, outputs=outputs, description="Posters")


async def test_a_workflow_is_kept_as_a_model_is(life: Life, tmp_path: Path) -> None:
    own = model(checkpoint(tmp_path / "own"), "own")
    models = await life.begin(own)
    await models.find_model("own")
    for registered in (workflow(a=1), workflow(a=2)):
        record = await models.register_workflow(registered)
        assert (record.state, record.workflow, record.description) == ("ready", registered, "Posters")
        assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(RegistrationConflict, match="'own' is a model already"):
        await models.register_workflow(workflow("own"))
    with pytest.raises(RegistrationConflict, match="'posters' is a workflow already"):
        await models.register(model(tmp_path / "own", "posters"))
    with pytest.raises(RegistrationRefused, match=r"unknown posters \(models: own\)"):
        await models.register(AdapterConfig(id="ink", path=tmp_path / "ink", base=("posters",)))
    models = await life.begin(own)
    assert (await models.find_model("posters")).workflow == workflow(a=2), "a killed registry has it again"
    assert await models.unregister("posters", purge=True) == ()
    with pytest.raises(ModelUnknown):
        await models.find_model("posters")
    assert "posters" not in (await life.begin(own)).directory
