"""Stored programs as models: what they give beside the module that they were exported from, and what they refuse."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.programs import MAX_LENGTH, MAX_ROWS, VOCABULARY, WIDTH, Classifier, export_bert, export_classifier, tiny_bert
from kit.seeding import seeded_rng
from torch import nn
from torch.export import Dim
from transformers import BertModel

from deployments.engines.programs import bound
from deployments.engines.programs.bound import BoundProgram, BoundPrograms
from deployments.engines.programs.rows import ProgramJob, jobs_of, run_jobs
from deployments.engines.records.protocol import EngineError
from weights.loading.provider import LocalExtents
from weights.operations.intake import import_model
from weights.programs.exported import externalize_program, open_graph
from weights.programs.signature import COMPONENT, signature_of
from weights.programs.storing import program_tensors
from weights.records.errors import FormatError
from weights.records.manifest import Component, Manifest
from weights.storage.store import WeightStore

torch.set_num_threads(1)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class HeldExtents(LocalExtents):
    """Remembers what it gave, as a node's shared memory does."""

    def fetch(self, extents):
        self.given = super().fetch(extents)
        return self.given


@dataclass
class Stored:
    """Programs of one store, bound as a replica does."""

    store: WeightStore
    graphs: BoundPrograms

    def bind(self, model: str, provider: LocalExtents | None = None) -> BoundProgram:
        manifest = self.store.manifest(model)
        tensors = program_tensors(self.store, model, provider)
        return self.graphs.bind(manifest.components[COMPONENT], self.store.skeleton(manifest), tensors)

    def put(self, model: str, module: nn.Module, *inputs: torch.Tensor, dynamic: object = None) -> Manifest:
        return externalize_program(self.store, model, torch.export.export(module, inputs, dynamic_shapes=dynamic))


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BertModel]:
    return {"base": tiny_bert(), "tuned": tiny_bert()}


@pytest.fixture(scope="module")
def stored(berts: dict[str, BertModel], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    store = WeightStore(tmp_path_factory.mktemp("programs") / "store")
    for name, module in berts.items():
        externalize_program(store, name, export_bert(module))
    return Stored(store, BoundPrograms())


@pytest.fixture
def fresh(tmp_path: Path) -> Stored:
    return Stored(WeightStore(tmp_path / "store"), BoundPrograms())


def texts_of(rng: np.random.Generator, lengths: list[int]) -> list[torch.Tensor]:
    return [torch.from_numpy(rng.integers(1, VOCABULARY, length)) for length in lengths]


def jobs_of_texts(program: BoundProgram, texts: list[torch.Tensor]) -> list[ProgramJob]:
    return [job for text in texts for job in jobs_of(program, {"input_ids": text[None]})]


@pytest.fixture
def rng() -> np.random.Generator:
    return seeded_rng()


def test_a_program_gives_what_its_module_gives(stored: Stored, berts: dict[str, BertModel], rng) -> None:
    program = stored.bind("base")
    for rows, length in ((1, 1), (3, 7), (MAX_ROWS, MAX_LENGTH)):
        ids = torch.from_numpy(rng.integers(0, VOCABULARY, (rows, length)))
        mask = torch.ones_like(ids)
        mask[0, length // 2 + 1 :] = 0
        found = run_jobs(jobs_of(program, {"input_ids": ids, "attention_mask": mask}))
        with torch.no_grad():
            expected = berts["base"](ids, mask)
        for name in ("last_hidden_state", "pooler_output"):
            ours = torch.stack([row[name] for row in found])
            torch.testing.assert_close(ours, expected[name], **CLOSE)


def test_rows_of_unlike_lengths_share_a_call_and_are_cut_again(
    stored: Stored, berts: dict[str, BertModel], rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, calls = stored.bind("base"), []
    call = BoundProgram.__call__
    monkeypatch.setattr(BoundProgram, "__call__", lambda self, given: calls.append(given) or call(self, given))
    texts = texts_of(rng, [9, 7, 8])
    jobs = jobs_of_texts(program, texts)
    assert len({job.group for job in jobs}) == 1
    found = run_jobs(jobs)
    assert [tuple(given["input_ids"].shape) for given in calls] == [(3, 9)]
    for text, row in zip(texts, found, strict=True):
        with torch.no_grad():
            expected = berts["base"](text[None])
        assert row["last_hidden_state"].shape == (len(text), 16)
        torch.testing.assert_close(row["last_hidden_state"], expected.last_hidden_state[0], **CLOSE)
        torch.testing.assert_close(row["pooler_output"], expected.pooler_output[0], **CLOSE)


def test_more_rows_than_the_range_take_several_calls(stored: Stored, berts: dict[str, BertModel], rng) -> None:
    program = stored.bind("base")
    texts = texts_of(rng, [4] * (2 * MAX_ROWS + 1))
    found = run_jobs(jobs_of_texts(program, texts))
    with torch.no_grad():
        expected = berts["base"](torch.stack(texts)).pooler_output
    torch.testing.assert_close(torch.stack([row["pooler_output"] for row in found]), expected, **CLOSE)


def test_fewer_rows_than_the_range_are_filled_up(fresh: Stored) -> None:
    classifier, features = Classifier(), torch.rand(1, WIDTH)
    externalize_program(fresh.store, "m", export_classifier(classifier, min_rows=3))
    (row,) = run_jobs(jobs_of(fresh.bind("m"), {"features": features}))
    torch.testing.assert_close(row["logits"], classifier.dense(features)[0], **CLOSE)


def test_a_fine_tune_is_another_list_of_tensors(stored: Stored, berts: dict[str, BertModel], rng) -> None:
    graphs = stored.graphs
    programs = {name: stored.bind(name) for name in berts}
    assert graphs.graph_stats()["graphs"] == 1
    assert programs["base"].module is programs["tuned"].module
    (text,) = texts_of(rng, [11])
    for name, module in berts.items():
        (row,) = run_jobs(jobs_of_texts(programs[name], [text]))
        with torch.no_grad():
            torch.testing.assert_close(row["pooler_output"], module(text[None]).pooler_output[0], **CLOSE)


def test_its_constants_are_views_of_what_the_node_holds(stored: Stored) -> None:
    provider = HeldExtents(stored.store.packs)
    program = stored.bind("base", provider)
    held = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in provider.given.values()]
    tensors = [value for value in program.arguments if isinstance(value, torch.Tensor)]
    assert len(tensors) > 20
    assert all(any(start <= tensor.data_ptr() < end for start, end in held) for tensor in tensors)


def test_its_signature_has_names_types_and_ranges(stored: Stored) -> None:
    signature = signature_of(stored.store.manifest("base").components[COMPONENT])
    assert [(one.name, one.dtype, one.shape, one.below) for one in signature.inputs] == [
        ("input_ids", "I64", ("batch", "input_ids.1"), VOCABULARY),
        ("attention_mask", "I64", ("batch", "input_ids.1"), None),
    ]
    assert [(one.name, one.shape) for one in signature.outputs] == [
        ("last_hidden_state", ("batch", "input_ids.1", 16)),
        ("pooler_output", ("batch", 16)),
    ]
    assert signature.ranges_text() == f"batch 1 to {MAX_ROWS}, input_ids.1 1 to {MAX_LENGTH}"
    assert signature.may_lack == {"attention_mask"}


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"input_ids": (9, 4)}, r"'input_ids' has size 9 in dimension 0, the program takes 1 to 8 \(batch\)"),
        ({"input_ids": (2, 49)}, r"'input_ids' has size 49 in dimension 1, the program takes 1 to 48 \(input_ids.1\)"),
        ({"input_ids": (0, 4)}, r"'input_ids' has size 0 in dimension 0, the program takes 1 to 8"),
        ({"input_ids": (4,)}, r"'input_ids' has 1 dimensions, the program takes 2"),
        ({"input_ids": (2, 4), "attention_mask": (2, 5)}, r"'attention_mask' has size 5 .* but 'input_ids' has 4"),
        ({"attention_mask": (2, 4)}, "missing input 'input_ids'"),
        ({"input_ids": (2, 4), "token_ids": (2, 4)}, "unknown input 'token_ids'"),
    ],
)
def test_sizes_beyond_the_range_are_refused(stored: Stored, inputs: dict[str, tuple[int, ...]], reason: str) -> None:
    given = {name: torch.ones(shape, dtype=torch.int64) for name, shape in inputs.items()}
    with pytest.raises(EngineError, match=reason):
        jobs_of(stored.bind("base"), given)


@pytest.mark.parametrize("value", [-1, VOCABULARY])
def test_ids_beyond_their_table_are_refused_before_anything_runs(stored: Stored, value: int) -> None:
    with pytest.raises(EngineError, match=f"input 'input_ids' has {value}, the program looks up 0 to 59"):
        jobs_of(stored.bind("base"), {"input_ids": torch.tensor([[1, value]])})


class Outputs(nn.Module):
    def forward(self, x: torch.Tensor, times: int) -> tuple[torch.Tensor, dict[str, object]]:
        return x * times, {"more": [x + 1, None], "sum": x.sum(1)}


def test_outputs_are_named_as_their_caller_knows_them(fresh: Stored) -> None:
    program = torch.export.export(Outputs(), (torch.rand(2, 3), 5), dynamic_shapes=({0: Dim("n", max=9)}, None))
    externalize_program(fresh.store, "m", program)
    x = torch.rand(4, 3)
    found = run_jobs(jobs_of(fresh.bind("m"), {"x": x}))
    assert list(found[0]) == ["output_0", "output_1_more_0", "output_1_sum"]
    torch.testing.assert_close(torch.stack([row["output_0"] for row in found]), x * 5)
    torch.testing.assert_close(torch.stack([row["output_1_sum"] for row in found]), x.sum(1))


class Similar(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.T


class Fixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)


@pytest.mark.parametrize(
    ("module", "dynamic", "wrong"),
    [(Similar(), ({0: Dim("n", min=2, max=6)},), (7, 4)), (Fixed(), None, (2, 4))],
)
def test_what_counts_no_independent_rows_runs_request_by_request(
    fresh: Stored, module: nn.Module, dynamic: object, wrong: tuple[int, ...]
) -> None:
    fresh.put("m", module, torch.rand(3, 4), dynamic=dynamic)
    program, requests = fresh.bind("m"), [torch.rand(3, 4), torch.rand(3, 4)]
    assert not program.signature.has_batch
    jobs = [job for x in requests for job in jobs_of(program, {"x": x})]
    assert len(jobs) == 2
    for x, found in zip(requests, run_jobs(jobs), strict=True):
        torch.testing.assert_close(found["output"], module(x))
    with pytest.raises(EngineError, match="'x' has size"):
        jobs_of(program, {"x": torch.rand(wrong)})


class Lengths(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


def test_without_a_mask_only_equal_lengths_run_together(fresh: Stored) -> None:
    fresh.put("m", Lengths(), torch.rand(2, 5), dynamic=({0: Dim("n", max=8), 1: Dim("length", max=9)},))
    program = fresh.bind("m")
    groups = [jobs_of(program, {"x": torch.rand(1, length)})[0].group for length in (4, 5, 4)]
    assert groups[0] == groups[2] != groups[1]


def test_what_torch_says_of_values_is_the_requests_error(fresh: Stored) -> None:
    class Looking(nn.Module):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return x.index_select(1, at)

    fresh.put("m", Looking(), torch.rand(2, 5), torch.tensor([0, 1]))
    with pytest.raises(EngineError, match="the program refuses these values: INDICES element is out of DATA bounds"):
        run_jobs(jobs_of(fresh.bind("m"), {"x": torch.rand(2, 5), "at": torch.tensor([0, 9])}))


def test_who_writes_buffers_is_not_served(fresh: Stored) -> None:
    manifest = fresh.put("m", nn.BatchNorm1d(4), torch.rand(3, 4))
    with pytest.raises(FormatError, match=r"it writes its buffers \(num_batches_tracked, .*eval mode"):
        signature_of(manifest.components[COMPONENT])


def test_a_bound_that_nobody_named_is_this_servers(fresh: Stored) -> None:
    manifest = fresh.put("m", Classifier(), torch.rand(3, 16), dynamic=({0: Dim.AUTO},))
    signature = signature_of(manifest.components[COMPONENT])
    assert signature.ranges == {"batch": (2, 8192)}


def changed_header(source: Path, target: Path, change: Callable[[dict], object]) -> Path:
    """Copy an archive with another header."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("models/model.json"):
                header = json.loads(data)
                change(header)
                data = json.dumps(header).encode()
            new.writestr(info.filename, data)
    return target


def test_a_missing_operator_is_named_before_the_file_is_opened(fresh: Stored, tmp_path: Path) -> None:
    torch.export.save(export_classifier(Classifier()), tmp_path / "sound.pt2")

    def rename(header: dict) -> None:
        header["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.elsewhere.linear.default"

    path = changed_header(tmp_path / "sound.pt2", tmp_path / "other.pt2", rename)
    with pytest.raises(FormatError, match=r"other.pt2: operator 'torch.ops.elsewhere.linear.default' is missing in"):
        import_model(fresh.store, "m", path, allow_torch=True)
    assert fresh.store.model_names() == []


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04nothing", b"{}" * 1000])
def test_what_is_no_program_is_refused(fresh: Stored, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "no.pt2").write_bytes(data)
    with pytest.raises(FormatError, match=r"no.pt2: not a torch.export program"):
        import_model(fresh.store, "m", tmp_path / "no.pt2", allow_torch=True)


def test_the_graph_that_was_not_used_for_longest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, read = Stored(WeightStore(tmp_path / "store"), BoundPrograms(max_graphs=2)), list[str]()

    def noted(component: Component, folder: Path) -> torch.export.ExportedProgram:
        read.append(component.config_hash)
        return open_graph(component, folder)

    monkeypatch.setattr(bound, "open_graph", noted)
    hashes = {}
    for size, name in enumerate("abc", 2):
        manifest = stored.put(name, nn.Linear(size, size), torch.ones(1, size))
        hashes[manifest.components[COMPONENT].config_hash] = name
    for name in "abaca":
        stored.bind(name)
    stored.bind("b")
    assert "".join(hashes[one] for one in read) == "abcb"
    assert stored.graphs.graph_stats()["graphs"] == 2


def test_a_graph_whose_constants_the_store_lacks_is_refused(stored: Stored) -> None:
    manifest = stored.store.manifest("base")
    component = manifest.components[COMPONENT]
    tensors = dict(program_tensors(stored.store, "base", None))
    del tensors["pooler.dense.bias"]
    with pytest.raises(FormatError, match=r"not have the same tensors: \['pooler.dense.bias'\]"):
        stored.graphs.bind(component, stored.store.skeleton(manifest), tensors)
