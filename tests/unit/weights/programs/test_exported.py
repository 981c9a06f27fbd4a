"""torch.export programs whose weights are in the store: same outputs, shared memory, small graphs."""

from __future__ import annotations

import copy
import json
import os
import random
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim, ExportedProgram

from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.programs.exported import externalize_program, load_program, self_contained
from weights.records.errors import FormatError, StoreError, WeightsError
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


class Cnn(nn.Module):
    """A convolution in channels_last, batch normalization and its integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())


class Tied(nn.Module):
    """Tied weights, buffers of all kinds, constants of the code, and a second, dynamic batch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("mask", torch.rand(width) > 0.5)
        self.register_buffer("table", torch.arange(width), persistent=False)
        self.register_buffer("wide", torch.rand(width, dtype=torch.float64))
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.frozen * self.mask + self.table + self.wide.float()
        return self.head(x) + torch.tensor([0.5]) + torch.cat([self.none.sum(0), torch.zeros(29)])


class Counting(nn.Module):
    """Writes its buffers: one by name, two inside of batch_norm, one through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, 4))
        self.register_buffer("still", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.seen[1].copy_(x[0])
        return self.norm(x) * self.still + self.count


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    return BertModel(config).eval()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]], Any]] = {
    "cnn": (lambda: Cnn().eval(), lambda n: (torch.rand(n, 3, 9, 7),), ({0: Dim("batch", min=2, max=64)},)),
    "tied": (lambda: Tied().eval(), lambda n: (torch.randint(0, 32, (n, 5)),), ({0: Dim("batch", min=2, max=64)},)),
    "bert": (bert, lambda n: (torch.randint(0, 50, (4, 6)),), None),
}


@dataclass
class Case:
    """A program, the same one from the store, and what the provider gave for it."""

    program: ExportedProgram
    inputs: Callable[[int], tuple[Any, ...]]
    manifest: Manifest
    loaded: ExportedProgram
    given: Mapping[str, np.ndarray]
    graph: Path


class HeldExtents(LocalExtents):
    """Remembers what it gave, as a node's shared memory does."""

    def fetch(self, extents):
        self.given = super().fetch(extents)
        return self.given


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    build, inputs, dynamic = CASES[request.param]
    program = torch.export.export(build(), inputs(4), dynamic_shapes=dynamic)
    store = WeightStore(tmp_path_factory.mktemp("case") / "store")
    manifest = externalize_program(store, "m", program)
    provider = HeldExtents(store.packs)
    loaded = load_program(store, "m", provider)
    return Case(program, inputs, manifest, loaded, provider.given, store.skeleton(manifest) / "graph.pt2")


@pytest.fixture(scope="module")
def linear() -> ExportedProgram:
    return torch.export.export(nn.Linear(6, 5), (torch.rand(2, 6),))


def outputs(program: ExportedProgram, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = program.module()(*inputs)
    return list(found.values()) if isinstance(found, dict) else [found]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.drawn
def test_a_stored_program_gives_the_same_outputs(case) -> None:
    for size in (4, 9):
        given = case.inputs(size)
        assert same(outputs(case.loaded, given), outputs(case.program, given))


def test_its_tensors_are_those_of_the_program(case) -> None:
    expected = {**case.program.state_dict, **case.program.constants}
    assert case.manifest.kind == "program"
    assert set(case.manifest.components["program"].tensors) == set(expected)
    for name, tensor in {**case.loaded.state_dict, **case.loaded.constants}.items():
        assert (type(tensor), tensor.dtype) == (type(expected[name]), expected[name].dtype)
        assert tensor.requires_grad == expected[name].requires_grad
        assert tensor.stride() == expected[name].stride()
        assert torch.equal(tensor, expected[name])


def test_nothing_is_copied(case) -> None:
    refs = case.manifest.components["program"].tensors
    run = dict(case.loaded.module().named_parameters(remove_duplicate=False))
    for name, tensor in {**case.loaded.state_dict, **case.loaded.constants}.items():
        if tensor.numel():
            start = case.given[refs[name].extent].ctypes.data + refs[name].offset
            assert tensor.data_ptr() == start
            if name in run:
                assert run[name].data_ptr() == start


def test_a_self_contained_program_is_a_stock_one(case, store, tmp_path: Path) -> None:
    self_contained(case.loaded, tmp_path / "whole.pt2")
    whole, given = torch.export.load(tmp_path / "whole.pt2"), case.inputs(7)
    assert same(outputs(whole, given), outputs(case.program, given))
    assert (tmp_path / "whole.pt2").stat().st_size < case.graph.stat().st_size + 1.2 * case.manifest.nbytes
    values = {**whole.state_dict, **whole.constants}
    assert all(torch.equal(values[name], tensor) for name, tensor in case.program.state_dict.items())


def test_the_program_that_was_given_is_left_as_it_was(case) -> None:
    # As torch has it after a save and a load of its own.
    assert case.program.example_inputs is not None
    assert case.loaded._guards_code == case.program._guards_code
    assert not any(0 in tensor.stride() for tensor in case.program.state_dict.values() if tensor.dim())


def test_the_graph_does_not_grow_with_the_weights_and_has_no_pickle(store) -> None:
    sizes = []
    for width in (8, 512):
        program = torch.export.export(Tied(width), (torch.randint(0, 32, (2, 3)),))
        manifest = externalize_program(store, f"m{width}", program)
        path = store.skeleton(manifest) / "graph.pt2"
        sizes.append(path.stat().st_size)
        with zipfile.ZipFile(path) as archive:
            assert archive.read("archive/data/sample_inputs/model.pt") == b""
            for config in ("weights/model_weights_config.json", "constants/model_constants_config.json"):
                records = json.loads(archive.read(f"archive/data/{config}"))["config"].values()
                assert not any(record["use_pickle"] for record in records)
    assert abs(sizes[1] - sizes[0]) < 500
    assert sizes[1] < 32 * 512 * 4 / 2


def test_tensors_are_shared_with_the_rest_of_the_store(store, tmp_path: Path) -> None:
    module = nn.Linear(40, 30)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(module.state_dict(), folder / "model.safetensors")
    checkpoint = externalize(store, "checkpoint", folder)
    packs = sorted(path.name for path in store.packs.iterdir())
    program = externalize_program(store, "program", torch.export.export(module, (torch.rand(2, 40),)))
    assert program.extents == checkpoint.extents
    assert sorted(path.name for path in store.packs.iterdir()) == packs


def test_tied_weights_are_stored_once(store) -> None:
    manifest = externalize_program(store, "m", torch.export.export(Tied(), (torch.randint(0, 32, (2, 3)),)))
    tensors = manifest.components["program"].tensors
    assert tensors["embed.weight"] == tensors["head.weight"]
    loaded = load_program(store, "m").state_dict
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr()


@pytest.mark.drawn
@pytest.mark.parametrize("decomposed", [False, True])
def test_buffers_that_the_program_writes_are_private(store, decomposed: bool) -> None:
    module = Counting().train()
    program = torch.export.export(module, (torch.rand(6, 4),))
    reference = torch.export.export(copy.deepcopy(module), (torch.rand(6, 4),))
    manifest = externalize_program(store, "m", program.run_decompositions() if decomposed else program)
    written = json.loads(manifest.components["program"].metadata["mutated"])
    assert written == ["count", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "seen"]
    provider = HeldExtents(store.packs)
    loaded = load_program(store, "m", provider)
    before = {id_: array.copy() for id_, array in provider.given.items()}
    run, stock = loaded.module(), reference.module()
    for _ in range(3):
        x = torch.rand(6, 4)
        assert torch.equal(run(x), stock(x))
    assert all(np.array_equal(provider.given[id_], array) for id_, array in before.items())
    assert loaded.state_dict["still"].data_ptr() != program.state_dict["still"].data_ptr()


def test_without_a_functional_form_every_buffer_is_private(store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("unsupported")

    program = torch.export.export(Counting().train(), (torch.rand(6, 4),))
    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    manifest = externalize_program(store, "m", program)
    written = json.loads(manifest.components["program"].metadata["mutated"])
    assert written == sorted(name for name, _ in Counting().named_buffers())


def test_a_manifest_that_lacks_a_tensor_of_the_graph_is_refused(store, linear) -> None:
    externalize_program(store, "m", linear)
    path = store.models / "m" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["components"]["program"]["tensors"]["bias"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=r"graph.pt2: the graph and the manifest .* same tensors: \['bias'\]"):
        load_program(store, "m")
    manifest["components"]["program"]["metadata"]["mutated"] = "{}"
    path.write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=r"metadata of component program: 'mutated': not a list of names"):
        load_program(store, "m")


def test_what_only_a_pickle_can_hold_is_refused(store, linear) -> None:
    class Subclass(torch.Tensor):
        pass

    changed = copy.copy(linear)
    changed._state_dict = {**linear.state_dict, "bias": torch.rand(5).as_subclass(Subclass)}
    with pytest.raises(WeightsError, match=r"'bias' is a Subclass, which only a pickle can hold"):
        externalize_program(store, "m", changed)
    changed._state_dict = {**linear.state_dict, "bias": torch.rand(5, device="meta")}
    with pytest.raises(WeightsError, match=r"'bias' is a torch.strided tensor on meta, without bytes"):
        externalize_program(store, "m", changed)
    assert not store.path.exists()


def test_a_target_that_cannot_be_written_is_a_store_error(linear, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"gone"):
        self_contained(linear, tmp_path / "gone" / "whole.pt2")


@pytest.mark.drawn
@pytest.mark.parametrize("layout", ["combined", "separate", "inline"])
def test_every_layout_holds_programs(store, linear, layout: str) -> None:
    externalize_program(store, "m", linear, layout=layout)
    given = (torch.rand(2, 6),)
    assert same(outputs(load_program(store, "m"), given), outputs(linear, given))


def test_a_file_is_opened_only_on_request(store, linear, tmp_path: Path) -> None:
    path = tmp_path / "stock.pt2"
    torch.export.save(linear, path)
    with pytest.raises(WeightsError, match=r"stock.pt2: opening an exported program can run code.*allow_torch=True"):
        externalize_program(store, "m", path)
    assert not store.path.exists()
    assert externalize_program(store, "m", path, allow_torch=True).source == str(path)
    given = (torch.rand(2, 6),)
    assert same(outputs(load_program(store, "m"), given), outputs(linear, given))


def test_what_is_no_program_is_refused(store, tmp_path: Path, linear) -> None:
    bad, empty, cut = (tmp_path / f"{name}.pt2" for name in ("bad", "empty", "cut"))
    bad.write_bytes(random.randbytes(500))
    with zipfile.ZipFile(empty, "w"):
        pass
    torch.export.save(linear, cut)
    os.truncate(cut, cut.stat().st_size // 2)
    for path in (bad, empty, cut, tmp_path / "missing.pt2"):
        with pytest.raises(FormatError, match=rf"{path.name}: not a torch.export program"):
            externalize_program(store, "m", path, allow_torch=True)
    assert not store.path.exists()


def test_unchanged_programs_are_not_stored_again(store, linear) -> None:
    first = externalize_program(store, "m", linear)
    stamp = (store.models / "m" / "manifest.json").stat().st_mtime_ns
    assert externalize_program(store, "m", linear) == first
    assert (store.models / "m" / "manifest.json").stat().st_mtime_ns == stamp


def test_a_dtype_without_a_name_stays_in_the_graph(store) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("wide", torch.rand(3, dtype=torch.complex128))
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.wide.real * self.weight

    program = torch.export.export(Complex(), (torch.rand(3),))
    manifest = externalize_program(store, "m", program)
    assert json.loads(manifest.components["program"].metadata["inline"]) == ["wide"]
    given = (torch.rand(3),)
    assert same(outputs(load_program(store, "m"), given), outputs(program, given))


def test_a_damaged_graph_is_found(store, linear) -> None:
    manifest = externalize_program(store, "m", linear)
    path = store.skeleton(manifest) / "graph.pt2"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match=r"graph.pt2: has sha256 [0-9a-f]{64}, the manifest says"):
        load_program(store, "m")
    path.unlink()
    with pytest.raises(WeightsError, match=r"m is a model of kind 'program' without a graph.pt2"):
        load_program(store, "m")


def test_a_model_that_is_no_program_is_refused(store, write_model) -> None:
    externalize(store, "llm", write_model("llm", {"w": torch.rand(3)}))
    with pytest.raises(WeightsError, match=r"llm is a model of kind 'llm' without a graph.pt2, not a torch.export"):
        load_program(store, "llm")
