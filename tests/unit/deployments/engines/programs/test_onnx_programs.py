"""ONNX models as models: what they give beside onnxruntime run plainly and transformers, and what they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from kit.programs import MAX_LENGTH, MAX_ROWS, VOCABULARY, WIDTH, onnx_bert, tiny_bert
from kit.seeding import seeded_rng
from onnx import ModelProto, TensorProto, helper, numpy_helper
from transformers import BertModel

from deployments.engines.programs.bound import BoundPrograms, OnnxProgram
from deployments.engines.programs.rows import ProgramJob, jobs_of, run_jobs
from deployments.engines.records.protocol import EngineError
from weights.operations.intake import import_model
from weights.programs.signature import COMPONENT, ProgramSignature, signature_of
from weights.programs.storing import program_tensors
from weights.records.errors import FormatError, WeightsError
from weights.storage.store import WeightStore

torch.set_num_threads(1)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
Shape = list[int | str | None] | None


@dataclass
class Stored:
    """ONNX models in a store, bound as a replica does; `held` are the tensors of each, as the node would hold them."""

    folder: Path
    held: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def store(self) -> WeightStore:
        return WeightStore(self.folder / "store")

    def put(self, name: str, model: ModelProto) -> Stored:
        onnx.save(model, self.folder / f"{name}.onnx")
        import_model(self.store, name, self.folder / f"{name}.onnx")
        return self

    def signature(self, name: str) -> ProgramSignature:
        return signature_of(self.store.manifest(name).components[COMPONENT])

    def bind(self, name: str) -> OnnxProgram:
        manifest = self.store.manifest(name)
        if name not in self.held:
            self.held[name] = program_tensors(self.store, name, None)
        found = BoundPrograms().bind(manifest.components[COMPONENT], self.store.skeleton(manifest), self.held[name])
        assert isinstance(found, OnnxProgram)
        return found

    def plain(self, name: str, **inputs: np.ndarray) -> list[np.ndarray]:
        """Return the outputs of onnxruntime over the file that was brought in."""
        session = onnxruntime.InferenceSession(self.folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
        return list(session.run(None, inputs))


@pytest.fixture(scope="module")
def berts() -> dict[str, BertModel]:
    return {"base": tiny_bert(), "tuned": tiny_bert()}


@pytest.fixture(scope="module")
def stored(berts: dict[str, BertModel], tmp_path_factory: pytest.TempPathFactory) -> Stored:
    found = Stored(tmp_path_factory.mktemp("onnx"))
    for name, module in berts.items():
        found.put(name, onnx_bert(module))
    return found


@pytest.fixture
def fresh(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


@pytest.fixture
def rng() -> np.random.Generator:
    return seeded_rng()


def model_of(
    nodes: list[Any],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    dtype: int = TensorProto.FLOAT,
    opsets: Mapping[str, int] | None = None,
    **properties: str,
) -> ModelProto:
    infos = [
        [
            helper.make_tensor_value_info(*one, shape)
            for *one, shape in ((name, dtype, sizes) for name, sizes in of.items())
        ]
        for of in (inputs, outputs)
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    imports = [helper.make_opsetid(*one) for one in (opsets or {"": 21}).items()]
    model = helper.make_model(helper.make_graph(nodes, "g", *infos, initializers), opset_imports=imports, ir_version=10)
    helper.set_model_props(model, properties)
    return model


def unary(operator: str = "Relu", sizes: Shape = ("n", 4), **options: Any) -> ModelProto:
    """A model of one operator: x -> y."""
    node = helper.make_node(operator, ["x"], ["y"], domain=options.pop("domain", ""), **options.pop("attributes", {}))
    return model_of([node], {"x": sizes}, {"y": options.pop("out", sizes)}, **options)


def jobs_of_texts(program: OnnxProgram, texts: list[torch.Tensor]) -> list[ProgramJob]:
    return [job for text in texts for job in jobs_of(program, {"input_ids": text[None]})]


def test_its_signature_has_names_types_and_ranges(stored: Stored) -> None:
    signature = stored.signature("base")
    assert [(one.name, one.dtype, one.shape, one.below) for one in signature.inputs] == [
        ("input_ids", "I64", ("batch", "input_ids.1"), VOCABULARY),
        ("attention_mask", "I64", ("batch", "input_ids.1"), None),
    ]
    assert [(one.name, one.dtype, one.shape) for one in signature.outputs] == [
        ("last_hidden_state", "F32", ("batch", "input_ids.1", WIDTH)),
        ("pooler_output", "F32", ("batch", WIDTH)),
    ]
    assert signature.ranges_text() == f"batch 1 to {MAX_ROWS}, input_ids.1 1 to {MAX_LENGTH}"
    assert signature.may_lack == {"attention_mask"}


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 7), (MAX_ROWS, MAX_LENGTH)])
def test_a_model_gives_what_plain_onnxruntime_and_transformers_give(
    stored: Stored, berts: dict[str, BertModel], rng: np.random.Generator, rows: int, length: int
) -> None:
    ids = rng.integers(0, VOCABULARY, (rows, length))
    mask = np.ones_like(ids)
    mask[0, length // 2 + 1 :] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    found = run_jobs(jobs_of(stored.bind("base"), tensors))
    with torch.no_grad():
        expected = berts["base"](**tensors)
    for name, plain in zip(("last_hidden_state", "pooler_output"), stored.plain("base", **given), strict=True):
        ours = torch.stack([row[name] for row in found])
        torch.testing.assert_close(ours, torch.from_numpy(plain), **CLOSE)
        torch.testing.assert_close(ours, expected[name], **CLOSE)


def test_rows_of_unlike_lengths_share_a_call_and_are_cut_again(
    stored: Stored, berts: dict[str, BertModel], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, call = [], OnnxProgram.__call__
    monkeypatch.setattr(OnnxProgram, "__call__", lambda self, given: calls.append(given) or call(self, given))
    texts = [torch.from_numpy(rng.integers(1, VOCABULARY, length)) for length in (9, 7, 8)]
    jobs = jobs_of_texts(stored.bind("base"), texts)
    assert len({job.group for job in jobs}) == 1
    found = run_jobs(jobs)
    assert [tuple(given["input_ids"].shape) for given in calls] == [(3, 9)]
    for text, row in zip(texts, found, strict=True):
        with torch.no_grad():
            expected = berts["base"](text[None]).last_hidden_state[0]
        torch.testing.assert_close(row["last_hidden_state"], expected, **CLOSE)


def test_a_fine_tune_is_a_session_of_the_same_graph(
    stored: Stored, berts: dict[str, BertModel], rng: np.random.Generator
) -> None:
    hashes = {stored.store.manifest(name).components[COMPONENT].config_hash for name in berts}
    assert len(hashes) == 1
    text = torch.from_numpy(rng.integers(1, VOCABULARY, 11))
    for name, module in berts.items():
        (row,) = run_jobs(jobs_of_texts(stored.bind(name), [text]))
        with torch.no_grad():
            torch.testing.assert_close(row["pooler_output"], module(text[None]).pooler_output[0], **CLOSE)


def test_every_large_weight_is_read_where_the_node_holds_it(stored: Stored) -> None:
    program = stored.bind("tuned")
    held = {tensor.data_ptr(): tensor for tensor in stored.held["tuned"].values()}
    assert all(value.data_ptr() in held for value in program.weights.values())
    large = [tensor for tensor in held.values() if tensor.is_floating_point() and tensor.nbytes >= 1024]
    assert len(large) > 6
    given = {"input_ids": torch.arange(40)[None], "attention_mask": torch.ones(1, 40, dtype=torch.int64)}
    for tensor in large:
        before, kept = torch.cat([value.flatten() for value in program(given).values()]), tensor.clone()
        tensor += 1.5  # a copy of it anywhere would not know
        assert not torch.equal(torch.cat([value.flatten() for value in program(given).values()]), before)
        tensor.copy_(kept)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"input_ids": (9, 4)}, r"'input_ids' has size 9 in dimension 0, the program takes 1 to 8 \(batch\)"),
        ({"input_ids": (2, 49)}, r"'input_ids' has size 49 in dimension 1, the program takes 1 to 48 \(input_ids.1\)"),
        ({"input_ids": (2, 4), "attention_mask": (2, 5)}, r"'attention_mask' has size 5 .* but 'input_ids' has 4"),
    ],
)
def test_sizes_beyond_the_range_are_refused(stored: Stored, inputs: dict[str, tuple[int, ...]], reason: str) -> None:
    given = {name: torch.ones(shape, dtype=torch.int64) for name, shape in inputs.items()}
    with pytest.raises(EngineError, match=reason):
        jobs_of(stored.bind("base"), given)


def test_ids_beyond_their_table_are_refused_before_anything_runs(stored: Stored) -> None:
    with pytest.raises(EngineError, match=f"input 'input_ids' has {VOCABULARY}, the program looks up 0 to 59"):
        jobs_of(stored.bind("base"), {"input_ids": torch.tensor([[1, VOCABULARY]])})


def test_without_ranges_what_onnxruntime_says_of_a_size_is_the_requests_error(fresh: Stored) -> None:
    model = onnx_bert(tiny_bert())
    del model.metadata_props[:]
    program = fresh.put("m", model).bind("m")
    assert program.signature.ranges == {"batch": (1, 8192), "input_ids.1": (1, 8192)}
    jobs = jobs_of(program, {"input_ids": torch.ones((1, MAX_LENGTH + 1), dtype=torch.int64)})
    with pytest.raises(EngineError, match=r"the program refuses these values: [^\[]"):
        run_jobs(jobs)


def test_tensors_of_nodes_and_subgraphs_are_the_models_too(fresh: Stored, rng: np.random.Generator) -> None:
    matrices = {name: rng.standard_normal((16, 16)).astype(np.float32) for name in ("main", "node", "yes", "no")}
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 16])
    branches = {
        f"{kind}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["h", "w"], ["z"])],
            name,
            [],
            [out],
            [numpy_helper.from_array(matrices[name], "w")],
        )
        for kind, name in (("then", "yes"), ("else", "no"))
    }
    nodes = [
        helper.make_node("Constant", [], ["node"], value=numpy_helper.from_array(matrices["node"], "node")),
        helper.make_node("MatMul", ["x", "main"], ["m"]),
        helper.make_node("Add", ["m", "bias"], ["a"]),
        helper.make_node("MatMul", ["a", "node"], ["h"]),
        helper.make_node("If", ["flag"], ["y"], **branches),
    ]
    weights = {"main": matrices["main"], "bias": matrices["no"][0], "flag": np.array(True)}
    fresh.put("m", model_of(nodes, {"x": ["n", 16]}, {"y": ["n", 16]}, weights))
    x = rng.standard_normal((5, 16)).astype(np.float32)
    found = run_jobs(jobs_of(fresh.bind("m"), {"x": torch.from_numpy(x)}))
    expected = (x @ matrices["main"] + weights["bias"]) @ matrices["node"] @ matrices["yes"]
    ours = torch.stack([row["y"] for row in found]).numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ours, fresh.plain("m", x=x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["BOOL", "UINT8", "INT32", "UINT64", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_tensors_keep_their_types(fresh: Stored, dtype: str, rng: np.random.Generator) -> None:
    fresh.put("m", unary("Identity", dtype=getattr(TensorProto, dtype)))
    names = {"DOUBLE": torch.float64}
    x = torch.from_numpy(rng.integers(0, 2, (3, 4))).to(names.get(dtype) or getattr(torch, dtype.lower()))
    found = torch.stack([row["y"] for row in run_jobs(jobs_of(fresh.bind("m"), {"x": x}))])
    assert found.dtype == x.dtype
    assert torch.equal(found, x)


def test_a_size_that_no_input_has_runs_request_by_request(fresh: Stored) -> None:
    fresh.put("m", unary("NonZero", out=[2, "found"], dtype=TensorProto.INT64))
    program = fresh.bind("m")
    assert not program.signature.has_batch
    (found,) = run_jobs(jobs_of(program, {"x": torch.tensor([[0, 3, 0, 1]])}))
    assert found["y"].tolist() == [[0, 0], [1, 3]]


def test_outputs_that_are_not_as_the_model_says_are_refused(fresh: Stored) -> None:
    model = model_of(
        [helper.make_node("NonZero", ["x"], ["f"]), helper.make_node("Transpose", ["f"], ["y"])],
        {"x": ["n", 4]},
        {"y": ["n", 2]},
        dtype=TensorProto.INT64,
    )
    program = fresh.put("m", model).bind("m")
    with pytest.raises(EngineError, match=r"its output 'y' has shape \[3, 2\], the model says \['batch', 2\]"):
        run_jobs(jobs_of(program, {"x": torch.tensor([[1, 1, 0, 1]])}))


def test_memory_that_is_not_there_is_no_error_of_the_values(fresh: Stored) -> None:
    repeats = model_of(
        [helper.make_node("Expand", ["x", "sizes"], ["y"])],
        {"x": ["n", 1]},
        {"y": ["n", "wide"]},
        {"sizes": np.array([1, 1 << 50])},  # beyond any address space
    )
    with pytest.raises(MemoryError, match="alloc"):
        fresh.put("m", repeats).bind("m")({"x": torch.ones(1, 1)})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (unary(opsets={"": 99}), "onnxruntime .* cannot run it: .*[Oo]pset 99"),
        (unary("Nothing"), "onnxruntime .* cannot run it: .*Nothing"),
        (unary("Mine", domain="own", opsets={"": 21, "own": 1}), r"cannot run it: .*own:Mine.* is not a registered"),
        (unary("Relu", dtype=TensorProto.INT4), "its tensor 'x' is of type 22, which requests cannot have"),
        (unary("Identity", dtype=TensorProto.STRING), "its tensor 'x' is of type 8, which requests cannot have"),
        (unary(out=None), "its output 'y' has no shape; onnx.shape_inference may find it"),
        (
            unary(ranges="[3]"),
            r"'ranges' of its metadata_props are '\[3\]', expected .* of sizes by name \(n\), as JSON",
        ),
        (unary(ranges=json.dumps({"m": [1, 2]})), "expected the least and the largest of sizes by name"),
        (unary(ranges=json.dumps({"n": [4, 2]})), "expected the least and the largest of sizes by name"),
        (model_of([], {}, {"w": [4]}, {"w": np.ones(4, np.float32)}), "it takes no tensors"),
    ],
)
def test_what_cannot_be_served_says_why_when_it_comes(fresh: Stored, model: ModelProto, reason: str) -> None:
    fresh.put("m", model)
    with pytest.raises(FormatError, match=reason):
        fresh.signature("m")
    with pytest.raises(FormatError, match=reason):
        fresh.bind("m")


def test_a_graph_whose_weights_the_store_lacks_is_refused(stored: Stored) -> None:
    manifest = stored.store.manifest("base")
    stored.bind("base")
    tensors = dict(stored.held["base"])
    del tensors["bert.pooler.dense.weight"]
    component, folder = manifest.components[COMPONENT], stored.store.skeleton(manifest)
    with pytest.raises(FormatError, match=r"tensor 'bert.pooler.dense.weight' is not in the store"):
        BoundPrograms().bind(component, folder, tensors)
    tensors["bert.pooler.dense.weight"] = torch.ones(16, 17)
    with pytest.raises(FormatError, match=r"is F32 \[16, 17\], the graph takes F32 \[16, 16\]"):
        BoundPrograms().bind(component, folder, tensors)


def test_weights_on_a_device_are_refused(stored: Stored) -> None:
    manifest = stored.store.manifest("base")
    with pytest.raises(FormatError, match="an ONNX model runs on the CPU, the text encoders' device is meta"):
        BoundPrograms().bind(
            manifest.components[COMPONENT], stored.store.skeleton(manifest), {"w": torch.ones(1, device="meta")}
        )


def test_without_the_package_the_refusal_names_the_extra(fresh: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    fresh.put("m", unary())
    assert fresh.signature("m").ranges == {"batch": (1, 8192)}  # it can be stored
    with pytest.raises(WeightsError, match=r"pip install 'atelier-serve\[onnx\]'"):
        fresh.bind("m")
    manifest = fresh.store.manifest("m")
    with pytest.raises(WeightsError, match=r"pip install 'atelier-serve\[onnx\]'"):
        BoundPrograms().prepare(manifest.components[COMPONENT], fresh.store.skeleton(manifest))
