"""Imports in a process of their own: what comes back, and what becomes of one that crashes, computes or hangs."""

from __future__ import annotations

import asyncio
import builtins
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from kit.seeding import seeded_rng
from kit.waiting import wait_until
from safetensors.numpy import save_file
from unit.cluster.registry.model_sources import Sources

from cluster.records.errors import ImportFailed, ModelUnservable, WeightsUnavailable
from cluster.registry.importing import ImportLimits, ImportProcess, ImportSettings, import_checkpoint, owned_program
from cluster.registry.registrations import Registrations
from cluster.registry.served_models import ServedModels
from configs.model import AdapterConfig, ModelConfig
from weights.operations.intake import import_model
from weights.records.errors import FormatError, StoreError
from weights.storage.store import WeightStore

Start = Callable[..., ImportProcess]
HOSTILE = """
import ctypes, os, re, sys, time
from cluster.registry import importing
from weights.records.errors import StoreError

class Strange(Exception):
    pass

sound = importing.import_checkpoint

def import_checkpoint(store, entry, *rest):
    exec(entry.description)
    return sound(store, entry, *rest)

importing.import_checkpoint = import_checkpoint
importing._main(*map(int, sys.argv[1:]))
"""
GIL_HELD = "re.match('(a+)+b', 'a' * 60)"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: ModelConfig) -> Callable[[str], ModelConfig]:
    """A model whose files get their reader into trouble. The process that reads them is the real one but for that."""
    (tmp_path / "hostile_importing.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("cluster.registry.importing.MODULE", "hostile_importing")
    return lambda trouble: entry.model_copy(update={"id": "hostile", "description": trouble})


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts import processes of one store."""
    monkeypatch.setattr("cluster.registry.importing.POLL_S", 0.02)
    started: list[ImportProcess] = []

    def start(memory_bytes: int = 2**33, check: str = "", **limits: float) -> ImportProcess:
        settings = ImportSettings(store=tmp_path / "store", options={}, memory_bytes=memory_bytes, check=check)
        started.append(ImportProcess(settings, ImportLimits(**limits)))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def entry(tmp_path: Path) -> ModelConfig:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"]}))
    save_file({"w": seeded_rng().random((3, 5), np.float32)}, folder / "model.safetensors")
    return ModelConfig(id="m", path=folder)


def test_the_summary_equals_that_of_an_import_in_this_process(start: Start, entry: ModelConfig, tmp_path: Path) -> None:
    found = start().import_model(entry)
    assert found == import_checkpoint(WeightStore(tmp_path / "other"), entry)
    assert (found.kind, found.nbytes) == ("llm", 60)


def test_what_no_engine_could_run_is_refused_before_its_weights_are_read(
    start: Start, entry: ModelConfig, tmp_path: Path
) -> None:
    process = start(check="deployments.engines.servable:why_unservable")
    with pytest.raises(ModelUnservable, match=r"architecture 'TinyForCausalLM' in .* is not supported"):
        process.import_model(entry)
    program = tmp_path / "graph.onnx"
    program.write_bytes(b"")
    with pytest.raises(
        ModelUnservable, match=r"graph.onnx: a program may take any time .*externalize .*--model p --store"
    ):
        process.import_model(ModelConfig(id="p", path=program))
    assert WeightStore(tmp_path / "store").model_names() == []


def test_an_onnx_model_is_served_where_its_owner_has_brought_it_in(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx import TensorProto, helper, save

    path, store = tmp_path / "relu.onnx", WeightStore(tmp_path / "store")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    import_model(store, "relu", path)
    entry = ModelConfig(id="relu", path=path)
    found = start(check="deployments.engines.servable:why_unservable").import_model(entry)
    assert found.signature is not None
    assert found.signature.ranges_text() == "batch 1 to 8192"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelUnservable, match=r"needs onnxruntime: pip install 'atelier-serve\[onnx\]'"):
        owned_program(store, entry, path)


@pytest.mark.slow
def test_a_program_is_served_where_the_owner_of_the_store_has_brought_it_in(start: Start, tmp_path: Path) -> None:
    """Opening one may run its code: who registers a path is not asked to be trusted."""
    import torch
    from kit.programs import Classifier, export_classifier

    path, store = tmp_path / "classes.pt2", WeightStore(tmp_path / "store")
    torch.export.save(export_classifier(Classifier()), path)
    entry = ModelConfig(id="classes", path=path)
    process = start(check="deployments.engines.servable:why_unservable")
    with pytest.raises(ModelUnservable, match=r"externalize .*classes.pt2 --model classes --allow-torch --store"):
        process.import_model(entry)
    assert store.model_names() == []
    import_model(store, "classes", path, allow_torch=True)
    path.write_bytes(b"what is there now is not looked at")
    found = process.import_model(entry)
    assert found.kind == "program"
    assert found.signature is not None
    assert found.signature.ranges_text() == "batch 1 to 8"
    with pytest.raises(ModelUnservable, match="only the store's owner"):  # of another file
        process.import_model(ModelConfig(id="classes", path=tmp_path / "m" / ".." / "other" / "classes.pt2"))


@pytest.mark.long
def test_a_program_that_writes_its_buffers_is_refused_with_the_reason(start: Start, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "norm.pt2"
    torch.export.save(torch.export.export(torch.nn.BatchNorm1d(3), (torch.rand(4, 3),)), path)
    import_model(WeightStore(tmp_path / "store"), "norm", path, allow_torch=True)
    with pytest.raises(ModelUnservable, match=r"norm.pt2: it writes its buffers \(num_batches_tracked, running_mean"):
        start(check="deployments.engines.servable:why_unservable").import_model(ModelConfig(id="norm", path=path))


def test_errors_come_back_as_themselves_and_the_process_goes_on(
    start: Start, entry: ModelConfig, hostile: Any, tmp_path: Path
) -> None:
    process = start()
    with pytest.raises(FormatError, match="nowhere: no such folder"):
        process.import_model(ModelConfig(id="n", path=tmp_path / "nowhere"))
    before = process._process
    with pytest.raises(StoreError, match="no room"):
        process.import_model(hostile("raise StoreError('no room')"))
    for error in ("RecursionError", "OverflowError", "KeyError"):
        with pytest.raises(getattr(builtins, error), match="why"):
            process.import_model(hostile(f"raise {error}('why')"))
    with pytest.raises(ImportFailed, match=r"^Strange: its class is not known elsewhere$"):
        process.import_model(hostile("raise Strange('its class is not known elsewhere')"))
    assert process.import_model(entry).kind == "llm"
    assert process._process is before


TROUBLES = [
    ("ctypes.string_at(0)", "the process that imported it was killed by SIGSEGV"),
    ("os.kill(os.getpid(), 9)", r"was killed by SIGKILL \(perhaps because memory was short\)"),
    ("os._exit(3)", "ended with exit code 3"),
    (GIL_HELD, "its import was stopped: it computed for 1 s without reading or writing anything"),
    ("bytearray(2**36)", "to import it takes more than 8589934592 bytes of memory"),
]


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize(("trouble", "text"), TROUBLES)
def test_a_file_that_breaks_its_reader_breaks_one_import(
    start: Start, entry: ModelConfig, hostile: Any, trouble: str, text: str
) -> None:
    process = start(computing_s=1.0)
    with pytest.raises(ImportFailed, match=text):
        process.import_model(hostile(trouble))
    assert process.import_model(entry).kind == "llm"


def test_one_that_waits_for_ever_is_stopped(start: Start, hostile: Any) -> None:
    with pytest.raises(ImportFailed, match="its import was stopped: nothing was read or written for 2 s"):
        start(silent_s=2.0).import_model(hostile("time.sleep(600)"))


def test_one_that_ended_while_it_had_nothing_to_do_is_started_again(start: Start, entry: ModelConfig) -> None:
    process = start()
    first = process.import_model(entry)
    for number in (signal.SIGTERM, signal.SIGKILL):
        assert process._process
        process._process.send_signal(number)
        process._process.wait()
        assert process.import_model(entry) == first


def test_one_that_cannot_start_is_said(start: Start, entry: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ImportFailed, match="the import process does not start: it ended with exit code 1"):
        start().import_model(entry)


@pytest.mark.slow
async def test_the_others_are_served_while_one_model_takes_for_ever_and_then_it_is_unavailable(
    start: Start, entry: ModelConfig, hostile: Any, tmp_path: Path
) -> None:
    process = start(computing_s=0.5)
    bad = entry.model_copy(update={"id": "bad"})

    def take_in(wanted: Any) -> Any:
        return process.import_model(hostile(GIL_HELD) if wanted.id == "bad" else wanted)

    store = WeightStore(tmp_path / "store")
    models = ServedModels({"m": entry, "bad": bad}, store, Registrations(tmp_path / "r"), Sources(take_in), "e")
    await models.begin_imports()
    assert (await models.find_model("m")).state == "ready"
    waiting, num_turns = asyncio.ensure_future(models.find_model("bad")), 0
    while not waiting.done():
        assert (await models.manifest("m")).model == "m"
        await asyncio.sleep(0.01)
        num_turns += 1
    assert num_turns > 10  # a directory that stands still with its importer would have had one turn
    record = await waiting
    assert record.state == "unavailable"
    assert "its import was stopped: it computed for" in record.error
    with pytest.raises(WeightsUnavailable, match="its import was stopped"):
        await models.manifest("bad")


PARENT = """
import pathlib, sys, threading
sys.path.insert(0, sys.argv[1])
from cluster.registry import importing
from configs.model import AdapterConfig, ModelConfig
importing.MODULE = "hostile_importing"
settings = importing.ImportSettings(store=pathlib.Path(sys.argv[1]) / "store", options={}, memory_bytes=2**33)
process = importing.ImportProcess(settings)
threading.Thread(target=process.import_model, args=[ModelConfig.model_validate_json(sys.argv[2])]).start()
"""


@pytest.mark.slow
def test_it_ends_with_its_parent_whatever_it_is_doing(hostile: Any, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    entry = hostile(f"open({str(told)!r}, 'w').write(str(os.getpid()) + '.'); {GIL_HELD}")
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), entry.model_dump_json()]) as parent:
        wait_until(lambda: parent.poll() is not None or (told.exists() and told.read_text().endswith(".")))
        assert parent.poll() is None
        child = psutil.Process(int(told.read_text()[:-1]))
        assert child.ppid() == parent.pid
        parent.kill()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_is_no_lora_for_images_cannot_be_merged(tmp_path: Path) -> None:
    demo = Path(__file__).parents[4] / "infra" / "demo" / "models"
    store = WeightStore(tmp_path / "store")
    entry = AdapterConfig(id="outline", path=demo / "outline", base=("m",), merged_scale=1.0)
    with pytest.raises(ModelUnservable, match="outline: merged_scale is for LoRAs of diffusion pipelines"):
        import_checkpoint(store, entry)
    import_checkpoint(store, entry.model_copy(update={"merged_scale": None}))
    import_checkpoint(store, entry.model_copy(update={"id": "bold", "path": demo / "bold"}))
