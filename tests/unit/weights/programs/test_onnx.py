"""ONNX models whose tensors are in the store: the same numbers before and after, by the onnx package itself."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from kit.seeding import seeded_rng
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file

from weights.operations.externalize import externalize
from weights.programs.onnx_models import MIN_EXTERNAL_BYTES, externalize_onnx, load_onnx, write_onnx
from weights.programs.signature import UNSERVABLE
from weights.records.errors import FormatError, StoreError, WeightsError

pytestmark = pytest.mark.slow

WIDTH = 24


def floats(*shape: int) -> np.ndarray:
    return seeded_rng().standard_normal(shape).astype(np.float32)


def raw(array: np.ndarray, name: str) -> TensorProto:
    return numpy_helper.from_array(array, name)


def typed(array: np.ndarray, name: str) -> TensorProto:
    """Write values into float_data, int64_data, ..., as exporters did before raw_data."""
    data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor(name, data_type, array.shape, array.reshape(-1))


def graph(nodes: list[Any], initializers: list[TensorProto], name: str = "g", inputs: bool = True) -> Any:
    x = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])]
    y = [helper.make_tensor_value_info(f"y_{name}", TensorProto.FLOAT, ["n", WIDTH])]
    return helper.make_graph(nodes, name, x if inputs else [], y, initializers)


def make_model() -> onnx.ModelProto:
    """Matrices, typed fields, constants, a function, and an If whose bodies have weights of equal names."""
    bodies = [
        graph([helper.make_node("MatMul", ["h", "w"], [f"y_{name}"])], [raw(floats(WIDTH, WIDTH), "w")], name, False)
        for name in ("yes", "no")
    ]
    function = helper.make_function(
        "local",
        "Shift",
        ["a"],
        ["b"],
        [
            helper.make_node("Constant", [], ["c"], value=raw(floats(20, WIDTH), "c")),
            helper.make_node("ReduceSum", ["c"], ["s"], keepdims=0, noop_with_empty_axes=0),
            helper.make_node("Add", ["a", "s"], ["b"]),
        ],
        [helper.make_opsetid("", 21)],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["m"]),
        helper.make_node("Add", ["m", "bias"], ["a"]),
        helper.make_node("Constant", [], ["large"], value=raw(floats(20, WIDTH), "large")),
        helper.make_node("Constant", [], ["small"], value=raw(floats(WIDTH), "small")),
        helper.make_node("ReduceMax", ["large"], ["top"], keepdims=0),
        helper.make_node("Add", ["a", "top"], ["b"]),
        helper.make_node("Mul", ["b", "small"], ["c"]),
        helper.make_node("Shift", ["c"], ["h"], domain="local"),
        helper.make_node("Cast", ["flag"], ["cond"], to=TensorProto.BOOL),
        helper.make_node("If", ["cond"], ["d"], then_branch=bodies[0], else_branch=bodies[1]),
        helper.make_node("Cast", ["half"], ["half32"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["d", "half32"], ["e"]),
        helper.make_node("Gather", ["tied", "ids"], ["f"]),
        helper.make_node("Add", ["e", "f"], ["y_g"]),
    ]
    weight = floats(WIDTH, WIDTH)
    initializers = [
        raw(weight, "weight"),
        typed(floats(WIDTH), "bias"),
        raw(np.array(random.randint(0, 1), np.int64), "flag"),
        typed(floats(WIDTH).astype(np.float16), "half"),
        raw(weight, "tied"),
        typed(np.array([3], np.int64), "ids"),
        raw(np.zeros((0, 3), np.float32), "none"),
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    return helper.make_model(graph(nodes, initializers), opset_imports=opsets, functions=[function], ir_version=10)


def constants(model: onnx.ModelProto) -> list[np.ndarray]:
    """Every tensor of the main graph, by the onnx package."""
    return [numpy_helper.to_array(tensor) for tensor in model.graph.initializer]


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


@pytest.fixture
def model() -> onnx.ModelProto:
    return make_model()


@pytest.fixture(params=["raw", "external", "external attributes"])
def path(request: pytest.FixtureRequest, tmp_path: Path, model: onnx.ModelProto) -> Path:
    """The model in one file, or with external data as onnx writes it."""
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "model.onnx"
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    if request.param == "raw":
        onnx.save(copy, path)
    else:
        onnx.save(
            copy,
            path,
            save_as_external_data=True,
            location="weights.bin",
            size_threshold=0,
            convert_attribute=request.param == "external attributes",
        )
    return path


def test_the_outputs_are_the_same_before_and_after(store, model, path, tmp_path: Path) -> None:
    x = floats(5, WIDTH)
    expected = run(model, x)
    manifest = externalize_onnx(store, "m", path)
    assert manifest.kind == "program"
    for external in (False, True):
        target = tmp_path / f"back-{external}.onnx"
        write_onnx(store, "m", target, external=external)
        onnx.checker.check_model(str(target), full_check=True)
        back = onnx.load(target)
        assert np.array_equal(run(back, x), expected)
        assert all(
            first.dtype == second.dtype and first.tobytes() == second.tobytes()
            for first, second in zip(constants(back), constants(model), strict=True)
        )
        assert [tensor.name for tensor in back.graph.initializer] == [t.name for t in model.graph.initializer]
    assert np.array_equal(run(load_onnx(store, "m"), x), expected)


def test_the_graph_has_locations_instead_of_bytes(store, model, path) -> None:
    manifest = externalize_onnx(store, "m", path)
    tensors = manifest.components["program"].tensors
    assert {"weight", "bias", "flag", "half", "tied", "ids", "large/value", "local:Shift/c/value"} <= set(tensors)
    assert {"d/then_branch/w", "d/else_branch/w"} <= set(tensors)
    assert "small/value" not in tensors
    assert tensors["weight"] == tensors["tied"]
    skeleton = store.skeleton(manifest) / "model.onnx"
    assert skeleton.stat().st_size < 6000 < manifest.nbytes
    stored = onnx.load(skeleton, load_external_data=False).graph.initializer
    locations = {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in stored}
    assert locations.pop("none") == {}
    for name, location in locations.items():
        assert location == {"location": name, "offset": "0", "length": str(tensors[name].nbytes)}


def test_external_data_is_page_aligned_and_written_once(store, path, tmp_path: Path) -> None:
    externalize_onnx(store, "m", path)
    write_onnx(store, "m", tmp_path / "back.onnx", external=True)
    written = onnx.load(tmp_path / "back.onnx", load_external_data=False).graph.initializer
    places = {}
    for tensor in written:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "back.onnx.data"
            assert int(entries["offset"]) % 4096 == 0
            assert int(entries["length"]) >= MIN_EXTERNAL_BYTES
            places[tensor.name] = entries["offset"]
    assert set(places) == {"weight", "tied"}
    assert places["weight"] == places["tied"]
    # Three matrices: the one of the graph, and those of the bodies of the If.
    assert (tmp_path / "back.onnx.data").stat().st_size == 2 * 4096 + WIDTH * WIDTH * 4
    assert sorted(file.name for file in tmp_path.glob("*back.onnx*")) == ["back.onnx", "back.onnx.data"]


def test_tensors_are_shared_with_the_rest_of_the_store(store, model, path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weight = torch.from_numpy(numpy_helper.to_array(model.graph.initializer[0]).copy())
    save_file({"w": weight}, folder / "model.safetensors")
    checkpoint = externalize(store, "checkpoint", folder)
    manifest = externalize_onnx(store, "m", path)
    ours, theirs = manifest.components["program"].tensors["weight"], checkpoint.components["model"].tensors["w"]
    assert (ours.extent, ours.offset) == (theirs.extent, theirs.offset)


DATA_TYPES = sorted(set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED})
STORED = {
    "FLOAT",
    "UINT8",
    "INT8",
    "UINT16",
    "INT16",
    "INT32",
    "INT64",
    "BOOL",
    "FLOAT16",
    "DOUBLE",
    "UINT32",
    "UINT64",
}
STORED |= {"COMPLEX64", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E8M0"}


def tensor_of(data_type: int) -> TensorProto:
    """Seven elements, so that packed types end within a byte."""
    if data_type == TensorProto.STRING:
        return helper.make_tensor("w", data_type, [7], [f"é{number}".encode() for number in range(7)])
    values = seeded_rng().integers(0, 2, 7).astype(helper.tensor_dtype_to_np_dtype(data_type))
    return numpy_helper.from_array(values, "w")


@pytest.mark.drawn(14)
@pytest.mark.parametrize("data_type", DATA_TYPES)
@pytest.mark.parametrize("external", [False, True])
def test_every_data_type_survives(store, tmp_path: Path, data_type: int, external: bool) -> None:
    tensor = tensor_of(data_type)
    expected = numpy_helper.to_array(tensor)
    proto = helper.make_model(helper.make_graph([], "g", [], [], [tensor]))
    (tmp_path / "in").mkdir()
    onnx.save(proto, tmp_path / "in" / "m.onnx", save_as_external_data=external, location="m.bin", size_threshold=0)
    manifest = externalize_onnx(store, "m", tmp_path / "in" / "m.onnx")
    name = TensorProto.DataType.Name(data_type)
    component = manifest.components["program"]
    assert (set(component.tensors), json.loads(component.metadata["inline"])) == (
        ({"w"}, []) if name in STORED else (set(), ["w"])
    )
    write_onnx(store, "m", tmp_path / "out.onnx", external=True)
    (back,) = onnx.load(tmp_path / "out.onnx").graph.initializer
    assert back.data_type == data_type
    found = numpy_helper.to_array(back)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tolist() == expected.tolist() if found.dtype == object else found.tobytes() == expected.tobytes()


def bad_model(tmp_path: Path, **entries: str) -> Path:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    folder = tmp_path / "bad"
    folder.mkdir(exist_ok=True)
    (folder / "data").write_bytes(bytes(20))
    (folder / "m.onnx").write_bytes(helper.make_model(helper.make_graph([], "g", [], [], [tensor])).SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize(
    "location",
    ["../secret", "/etc/passwd", "sub/../../secret", "", ".", "link", "linked/secret", "missing", "a\0b", "fifo"],
)
def test_external_data_outside_of_the_folder_is_refused(store, tmp_path: Path, location: str) -> None:
    (tmp_path / "outside").mkdir()
    for secret in (tmp_path / "secret", tmp_path / "outside" / "secret"):
        secret.write_bytes(bytes(64))
    path = bad_model(tmp_path, location=location)
    (path.parent / "link").symlink_to(tmp_path / "secret")
    (path.parent / "linked").symlink_to(tmp_path / "outside")
    (path.parent / "sub").mkdir()
    os.mkfifo(path.parent / "fifo")
    with pytest.raises(FormatError, match=r"m.onnx: tensor 'w': external data at "):
        externalize_onnx(store, "m", path)
    assert not store.path.exists()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "8"}, r"ends at byte 24 of data, which has 20 bytes"),
        ({"offset": "-4"}, r"16 bytes expected, external data has"),
        ({"length": "12"}, r"16 bytes expected, external data has"),
        ({"offset": "x"}, r"offset and length must be integers"),
        ({"offset": "9" * 30}, r"ends at byte 10+15 of"),
    ],
)
def test_external_data_that_does_not_fit_is_refused(store, tmp_path: Path, entries, message: str) -> None:
    with pytest.raises(FormatError, match=rf"m.onnx: tensor 'w'.*{message}"):
        externalize_onnx(store, "m", bad_model(tmp_path, location="data", **entries))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dims": [3], "raw_data": bytes(8)}, r"F32 \[3\] takes 12 bytes, it has 8"),
        ({"dims": [-1], "raw_data": bytes(4)}, r"shape \[-1\], expected at most 64 sizes from 0"),
        ({"dims": [3], "float_data": [1.0]}, r"reshape"),
        ({"dims": [2**62, 2**62], "raw_data": b""}, r"with a product below 2\^64"),
        ({"dims": [2**62] * 100_000, "raw_data": b""}, r"at most 64 sizes"),
        ({"dims": [3]}, r"reshape"),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(store, tmp_path: Path, fields, message: str) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, **fields)
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(helper.make_graph([], "g", [], [], [tensor])).SerializeToString())
    with pytest.raises(FormatError, match=rf"m.onnx: tensor 'w'.*{message}"):
        externalize_onnx(store, "m", path)


def test_names_that_are_not_text_are_no_obstacle(store, tmp_path: Path) -> None:
    contents = bad_model(tmp_path, location="data").read_bytes()
    for old, new in ((b"data", b"da\xffa"), (b"location", b"loca\xffion"), (b"\x01w", b"\x01\xff")):
        path = tmp_path / "bad" / "changed.onnx"
        path.write_bytes(contents.replace(old, new))
        if old == b"\x01w":
            assert set(externalize_onnx(store, "m", path).components["program"].tensors) == {"\ufffd"}
        else:
            with pytest.raises(FormatError, match=r"changed.onnx: tensor 'w': external data at"):
                externalize_onnx(store, "m", path)


@pytest.mark.parametrize("role", ["input", "output"])
@pytest.mark.parametrize("part", ["name", "dimension"])
def test_names_that_are_no_text_are_not_served(store, tmp_path: Path, model, role: str, part: str) -> None:
    value = getattr(model.graph, role)[0]
    if part == "name":
        value.name = "named!"
    else:
        value.type.tensor_type.shape.dim[0].dim_param = "named!"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(b"named!", b"named\x80"))
    manifest = externalize_onnx(store, "m", tmp_path / "m.onnx")
    assert re.search(f"its {role} .* has a name that is no UTF-8", manifest.components["program"].metadata[UNSERVABLE])


def test_damaged_models_are_typed_errors(store, tmp_path: Path, model) -> None:
    whole = model.SerializeToString()
    path = tmp_path / "m.onnx"
    for _ in range(40):
        changed = bytearray(whole)
        for _ in range(random.choice([1, 3, 10])):
            changed[random.randrange(len(changed))] = random.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(WeightsError):
            externalize_onnx(store, "m", path)


def test_what_is_no_model_is_refused(store, tmp_path: Path, model) -> None:
    whole = model.SerializeToString()
    for number, content in enumerate((b"", b"text", random.randbytes(300), whole[: len(whole) // 2])):
        path = tmp_path / f"bad{number}.onnx"
        path.write_bytes(content)
        with pytest.raises(FormatError, match=rf"bad{number}.onnx"):
            externalize_onnx(store, "m", path)
    with pytest.raises(FormatError, match=r"missing.onnx: No such file"):
        externalize_onnx(store, "m", tmp_path / "missing.onnx")
    assert not store.path.exists()


@pytest.mark.parametrize("layout", ["combined", "separate", "inline"])
def test_every_layout_holds_models(store, model, tmp_path: Path, layout: str) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    externalize_onnx(store, "m", tmp_path / "m.onnx", layout=layout)
    x = floats(3, WIDTH)
    assert np.array_equal(run(load_onnx(store, "m"), x), run(model, x))


def test_without_the_package_it_is_named(store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(WeightsError, match=r"pip install 'atelier-serve\[onnx\]'"):
        externalize_onnx(store, "m", tmp_path / "m.onnx")


def test_models_too_large_for_one_file_are_refused(store, model, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    externalize_onnx(store, "m", tmp_path / "m.onnx")
    monkeypatch.setattr("weights.programs.onnx_models._MAX_PROTOBUF_BYTES", 8000)
    with pytest.raises(WeightsError, match=r"m: \d+ bytes of tensors do not fit into one ONNX file"):
        write_onnx(store, "m", tmp_path / "back.onnx", external=False)
    assert not (tmp_path / "back.onnx").exists()


def test_a_target_that_cannot_be_written_leaves_nothing(store, model, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    externalize_onnx(store, "m", tmp_path / "m.onnx")
    for external in (False, True):
        with pytest.raises(StoreError, match=r"gone"):
            write_onnx(store, "m", tmp_path / "gone" / "back.onnx", external=external)


def test_a_model_that_is_no_onnx_model_is_refused(store, write_model) -> None:
    externalize(store, "llm", write_model("llm", {"w": torch.rand(3)}))
    with pytest.raises(WeightsError, match=r"llm is a model of kind 'llm' without a model.onnx, not an ONNX model"):
        load_onnx(store, "llm")
