"""Quantized language models as others publish them, against plain formulas of each format, element by element."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kit.seeding import seeded_rng
from safetensors.numpy import save_file

from weights.formats.checkpoint import read_checkpoint
from weights.formats.language_models import CLASS_NAMES
from weights.formats.published_quantization import INT8_CLASSES, ComputedTensor
from weights.formats.source import Checkpoint
from weights.operations.externalize import externalize, stored_dtypes, unpacked_bytes, unpacked_types
from weights.records.errors import FormatError
from weights.storage.store import WeightStore

NAME = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS, GROUP = 24, 64, 16
DTYPES = {"I8": np.int8, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
SCALES = np.ones((32, 32), np.float16)


def packed(values: np.ndarray, bits: int, places: Any = None) -> np.ndarray:
    """Words of int32 along the last axis, one element after the other."""
    per_word = 32 // bits
    places = range(per_word) if places is None else places
    words = np.zeros((*values.shape[:-1], values.shape[-1] // per_word), np.uint32)
    for word in range(words.shape[-1]):
        for place, element in enumerate(places):
            words[..., word] |= values[..., word * per_word + element].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def compressed(bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": GROUP}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}, **more}


def save(folder: Path, method: Mapping[str, Any], parts: Mapping[str, np.ndarray], **said: Any) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **said}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(method)}))
    tensors = {f"{NAME}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}
    save_file(tensors | {"model.norm.weight": np.ones(8, np.float16)}, folder / "model.safetensors")
    return read_checkpoint(folder)


def arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in checkpoint.components[0].tensors.items():
        data = tensor.read()
        assert len(data) == tensor.nbytes
        found[name] = np.frombuffer(data, DTYPES[tensor.dtype]).reshape(tensor.shape)
    return found


def check_int8(checkpoint: Checkpoint, integers: np.ndarray, scales: np.ndarray) -> None:
    """Every element is the integer times its own scale, with nothing lost."""
    found, quantization = arrays(checkpoint), checkpoint.config["quantization_config"]
    assert found.keys() == {f"{NAME}.weight", f"{NAME}.scales", "model.norm.weight"}
    assert quantization["quant_method"] == "int8-group"
    values, flat = found[f"{NAME}.weight"], found[f"{NAME}.scales"]
    assert values.dtype == np.int8
    assert np.array_equal(values, integers)
    spread = np.repeat(flat, quantization["group_size"]).reshape(values.shape)
    assert np.array_equal(spread, scales.astype(np.float32))
    assert unpacked_types(checkpoint) == ()
    assert stored_dtypes(checkpoint, "bfloat16") == {"model": "auto"}  # a scale of fewer bits would be another one


def check_wide(checkpoint: Checkpoint, expected: np.ndarray) -> None:
    found = arrays(checkpoint)
    assert found.keys() == {f"{NAME}.weight", "model.norm.weight"}
    assert "quantization_config" not in checkpoint.config
    wide = found[f"{NAME}.weight"]
    assert wide.dtype == np.float16  # as the norm is
    assert np.array_equal(wide, expected.astype(np.float32).astype(np.float16))
    assert unpacked_bytes(unpacked_types(checkpoint)) > 0


def awq_parts(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    values, zeros = rng.integers(0, 16, (COLUMNS, ROWS)), rng.integers(0, 16, (COLUMNS // GROUP, ROWS))
    scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(values, 4, order), "qzeros": packed(zeros, 4, order), "scales": scales}
    return parts, (values - np.repeat(zeros, GROUP, 0)).T, np.repeat(scales, GROUP, 0).T


def test_awq_becomes_int8_without_a_loss(tmp_path: Path) -> None:
    parts, integers, scales = awq_parts(seeded_rng())
    check_int8(save(tmp_path / "m", AWQ, parts), integers, scales)


def test_a_class_that_computes_with_plain_weights_alone_gets_these(tmp_path: Path) -> None:
    parts, integers, scales = awq_parts(seeded_rng())
    checkpoint = save(tmp_path / "m", AWQ, parts, architectures=["Gemma3ForCausalLM"])
    check_wide(checkpoint, integers * scales.astype(np.float32))
    assert frozenset(CLASS_NAMES.values()) == INT8_CLASSES


def gptq_parts(
    rng: np.random.Generator, bits: int, offset: int, *, is_ordered: bool = False, zero: int | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    shape = (COLUMNS // GROUP, ROWS)
    values = rng.integers(0, 2**bits, (COLUMNS, ROWS))
    zeros = rng.integers(0, 2**bits, shape) if zero is None else np.full(shape, zero)
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float16)
    groups = np.arange(COLUMNS) // GROUP
    if is_ordered:
        groups = rng.permutation(groups)
    parts = {
        "qweight": packed(values.T, bits).T,
        "qzeros": packed((zeros - offset) % 2**bits, bits),
        "scales": scales,
        "g_idx": groups.astype(np.int32),
    }
    return parts, (values - zeros[groups]).T, scales[groups].T


@pytest.mark.parametrize("has_g_idx", [True, False])
@pytest.mark.parametrize(("version", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_becomes_int8_without_a_loss(tmp_path: Path, version: str, offset: int, has_g_idx: bool) -> None:
    parts, integers, scales = gptq_parts(seeded_rng(), 4, offset)
    if not has_g_idx:
        del parts["g_idx"]
    check_int8(save(tmp_path / "m", GPTQ | {"checkpoint_format": version}, parts), integers, scales)


def test_gptq_of_8_bits_around_the_middle_becomes_int8(tmp_path: Path) -> None:
    parts, integers, scales = gptq_parts(seeded_rng(), 8, 1, zero=128)
    check_int8(save(tmp_path / "m", GPTQ | {"bits": 8, "sym": True}, parts), integers, scales)
    parts, *_ = gptq_parts(seeded_rng(), 8, 1, zero=40)
    wrong = save(tmp_path / "wrong", GPTQ | {"bits": 8, "sym": True}, parts)
    with pytest.raises(FormatError, match="has zero points that are not in the middle"):
        arrays(wrong)


@pytest.mark.parametrize("change", [{"desc_act": True}, {"bits": 8}, {"bits": 8, "desc_act": True, "sym": True}])
def test_gptq_that_no_group_of_int8_can_hold_becomes_wide(tmp_path: Path, change: dict[str, Any]) -> None:
    method = GPTQ | change
    parts, integers, scales = gptq_parts(seeded_rng(), method["bits"], 1, is_ordered=method["desc_act"])
    check_wide(save(tmp_path / "m", method, parts), integers * scales.astype(np.float32))


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("groups", [COLUMNS // GROUP, 1])
def test_packed_tensors_become_int8_without_a_loss(tmp_path: Path, has_zeros: bool, groups: int) -> None:
    rng = seeded_rng()
    values, zeros = rng.integers(-8, 8, (ROWS, COLUMNS)), rng.integers(-8, 8, (ROWS, groups)) * has_zeros
    scales = rng.uniform(0.01, 0.1, (ROWS, groups)).astype(ml_dtypes.bfloat16)
    parts = {"weight_packed": packed(values + 8, 4), "weight_scale": scales.astype(np.float32)}
    parts["weight_shape"] = np.array([ROWS, COLUMNS])
    if has_zeros:
        parts["weight_zero_point"] = packed((zeros + 8).T, 4).T
    integers = values - np.repeat(zeros, COLUMNS // groups, 1)
    spread = np.repeat(scales.astype(np.float32), COLUMNS // groups, 1)
    check_int8(save(tmp_path / "m", compressed(4, format="pack-quantized"), parts), integers, spread)


@pytest.mark.parametrize("shape", [(ROWS, 1), (ROWS, 4), (1,)])
def test_int8_tensors_stay_what_they_are(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rng = seeded_rng()
    values = rng.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    parts = {"weight": values, "weight_scale": scales}
    full = scales.reshape(-1, shape[-1]) if len(shape) == 2 else np.full((ROWS, 1), scales[0])
    spread = np.repeat(full, COLUMNS // full.shape[1], 1)
    check_int8(save(tmp_path / "m", compressed(8, format="int-quantized"), parts), values, spread)


def float8(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 20, (ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("block", [[16, 24], [128, 128], None])
def test_float8_with_scales_of_blocks_becomes_wide(tmp_path: Path, block: list[int] | None) -> None:
    rng = seeded_rng()
    values, (height, width) = float8(rng), block or (ROWS, COLUMNS)
    scales = rng.uniform(0.01, 0.1, (-(-ROWS // height), -(-COLUMNS // width))).astype(np.float32)
    expected = np.array(
        [[float(values[r, c]) * scales[r // height, c // width] for c in range(COLUMNS)] for r in range(ROWS)],
        np.float32,
    )
    given = scales if block else scales.reshape(())
    method = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    check_wide(save_float8(tmp_path / "m", method, values, {"weight_scale_inv": given}), expected)


def save_float8(
    folder: Path, method: Mapping[str, Any], values: np.ndarray, parts: Mapping[str, np.ndarray]
) -> Checkpoint:
    """Write bytes, and then say in the header that they are floats of 8 bits, which numpy's writer does not know."""
    save(folder, {"quant_method": "none"}, {"weight": values.view(np.uint8), **parts})
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[f"{NAME}.weight"]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(method)}))
    return read_checkpoint(folder)


@pytest.mark.parametrize("shape", [(ROWS, 1), (1,)])
def test_float8_of_compressed_tensors_becomes_wide(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rng = seeded_rng()
    values, scales = float8(rng), rng.uniform(0.01, 0.1, shape).astype(np.float32)
    method = compressed(8, "float", format="float-quantized")
    parts = {"weight_scale": scales, "input_scale": np.ones(1, np.float32)}
    check_wide(save_float8(tmp_path / "m", method, values, parts), values.astype(np.float32) * scales)


def test_a_store_has_the_values_and_a_config_that_fits_them(tmp_path: Path) -> None:
    parts, integers, _ = awq_parts(seeded_rng())
    save(tmp_path / "m", AWQ, parts)
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "m", tmp_path / "m")
    config = json.loads((store.skeleton(manifest) / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "int8-group", "group_size": GROUP}
    assert manifest.components["model"].tensors[f"{NAME}.weight"].nbytes == integers.size
    assert externalize(store, "m", tmp_path / "m") == manifest


def without(parts: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {part: value for part, value in parts.items() if part != name}


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        (AWQ | {"version": "gemv"}, {}, r"config.json: quantization_config .* supported is AWQ of 4 bits"),
        (AWQ | {"bits": 3}, {}, "supported is AWQ of 4 bits"),
        (AWQ, {"qzeros": None}, "has no qzeros"),
        (AWQ, {"qzeros": np.zeros((4, 4), np.int32)}, r"qzeros' is I32 \[4, 4\], expected \[4, 3\]"),
        (AWQ, {"scales": np.zeros((4, 24), np.int32)}, r"scales' is I32 .* expected F32 or F16 or BF16"),
        (AWQ, {"scales": np.zeros((5, 24), np.float16)}, "expected whole groups of 64 inputs"),
        (AWQ, {"scales": np.zeros((4, 32), np.float16)}, "expected 32 outputs, as the scales have"),
        (AWQ, {"qweight": np.zeros((64, 3, 1), np.int32)}, "expected I32 of 2 axes"),
        (AWQ, {"qweight": np.zeros((64, 3), np.float32)}, "expected I32 of 2 axes"),
        (GPTQ | {"bits": 2}, {}, "supported is GPTQ of 4 or 8 bits"),
        (GPTQ | {"bits": "4"}, {}, "supported is GPTQ of 4 or 8 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, {}, "in the format 'gptq' or 'gptq_v2'"),
        (GPTQ | {"desc_act": True}, {}, "has no g_idx"),
        (compressed(4, sparsity_config={"format": "sparse-24"}), {}, "with quantized, dense weights"),
        (compressed(4) | {"config_groups": {"g": {"weights": None}}}, {}, "with quantized, dense weights"),
        (compressed(4) | {"config_groups": []}, {}, "with quantized, dense weights"),
        (compressed(3), {}, "compressed-tensors of 4 or 8 bits"),
        (GPTQ, {"qweight": np.zeros((8, 20), np.int32), "scales": SCALES[:4, :20]}, "expected a multiple of 8 outputs"),
        (compressed(4), {"weight_g_idx": np.zeros(64, np.int32)}, "weight_g_idx: activation order is not supported"),
        (compressed(4), {"weight_scale": None}, "has no weight_scale"),
        (compressed(4), {"weight_scale": SCALES[:24, :4].astype(np.int32)}, "weight_scale' .* expected F32 or F16 or"),
        (compressed(4), {"weight_scale": SCALES[:24, :5]}, r"expected whole groups of rows of \[24, 64\]"),
        (compressed(4), {"weight_scale": SCALES[:23, :4]}, r"expected whole groups of rows of \[24, 64\]"),
        (compressed(4), {"weight_scale": SCALES[:24, :0]}, r"expected whole groups of rows of \[24, 64\]"),
        (compressed(4), {"weight_scale": SCALES[:24, :4, None]}, r"expected whole groups of rows of \[24, 64\]"),
        (compressed(4), {"weight_zero_point": np.zeros((3, 5), np.int32)}, r"I32 \[3, 5\], expected \[3, 4\]"),
        (compressed(8), {"weight_zero_point": np.zeros((6, 4), np.int32)}, "expected none beside 8 bits"),
        (
            compressed(8),
            {"weight_packed": None, "weight": np.zeros((24, 64), np.int8), "weight_zero_point": np.zeros(24, np.int8)},
            "8 bits without a middle are not supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, {}, r"fp8 with weight_block_size \[rows, columns\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, {}, "fp8 with weight_block_size"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_headers(
    tmp_path: Path, method: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    parts = awq_parts(seeded_rng())[0]
    if method["quant_method"] == "gptq":
        parts = without(gptq_parts(seeded_rng(), 4, 1)[0], "g_idx")
    elif method["quant_method"] == "compressed-tensors":
        parts = {"weight_packed": np.zeros((24, 8), np.int32), "weight_scale": SCALES[:24, :4]}
    for name, value in change.items():
        parts = without(parts, name) if value is None else parts | {name: value}
    with pytest.raises(FormatError) as caught:
        save(tmp_path / "m", method, parts)
    assert re.search(message, str(caught.value))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("block", "parts", "message"),
    [
        (None, {"weight_scale": SCALES[:23, :1]}, r"expected floats of one number, or \[24, 1\]"),
        (None, {"weight_scale": np.ones(24, np.int32)}, r"expected floats of one number, or \[24, 1\]"),
        ([16, 24], {"weight_scale_inv": SCALES[:2, :2]}, r"expected floats of one number, or \[2, 3\]"),
        ([16, 24], {"weight_scale_inv": SCALES[:24, 0]}, r"expected floats of one number, or \[2, 3\]"),
    ],
)
def test_scales_of_float8_that_do_not_fit_are_refused(
    tmp_path: Path, block: list[int] | None, parts: dict[str, np.ndarray], message: str
) -> None:
    method = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(FormatError, match=message):
        save_float8(tmp_path / "m", method, float8(seeded_rng()), parts)


@pytest.mark.parametrize("groups", [np.full(COLUMNS, 99), np.full(COLUMNS, -1), np.arange(COLUMNS)[::-1] // GROUP])
def test_an_order_that_cannot_be_is_said_when_it_is_read(tmp_path: Path, groups: np.ndarray) -> None:
    parts = gptq_parts(seeded_rng(), 4, 1)[0] | {"g_idx": groups.astype(np.int32)}
    checkpoint = save(tmp_path / "m", GPTQ, parts)
    assert isinstance(checkpoint.components[0].tensors[f"{NAME}.weight"], ComputedTensor)
    with pytest.raises(FormatError, match="g_idx"):
        arrays(checkpoint)


def test_a_quantization_that_no_tensor_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config.json: quantization_config .*, but no tensor is quantized so"):
        save(tmp_path / "m", AWQ, {"weight": np.ones((8, 8), np.float16)})


def test_other_methods_and_plain_models_are_left_alone(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "m", {"quant_method": "hqq"}, {"weight": np.ones((8, 8), np.float16)})
    assert checkpoint.headers == {}
    assert checkpoint.config["quantization_config"] == {"quant_method": "hqq"}
