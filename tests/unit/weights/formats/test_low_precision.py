"""Matrices in low precision against the formulas of those who write them, and against diffusers' own readers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.quantizers.bfl.utils import dequantize_fp8r, dequantize_nvfp4, quantize_fp8r, quantize_nvfp4
from safetensors.torch import save_file

from weights.formats.low_precision import read_as_plain, read_quantized_parts
from weights.formats.safetensors import read_header
from weights.records.errors import FormatError

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]  # what a file has of layer "x", and the matrix that it stands for
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def as_json(value: Mapping[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """By the rule itself: tiles of 128 x 4, one after the other; in one, (row, column) at row % 32 * 16 + row // 32 * 4
    + column."""
    rows, columns = scales.shape
    across = -(-columns // 4)
    flat = torch.zeros(-(-rows // 128) * across * 512, dtype=scales.dtype)
    for row in range(rows):
        for column in range(columns):
            tile, inner = row // 128 * across + column // 4, row % 128
            flat[tile * 512 + inner % 32 * 16 + inner // 32 * 4 + column % 4] = scales[row, column]
    return flat.view(-(-rows // 128) * 128, across * 4)


def fp8_rows(wide: torch.Tensor) -> Written:
    values, scale = quantize_fp8r(wide)
    return {"x.weight": values, "x.weight_scale": scale}, dequantize_fp8r(values, scale)


def nvfp4_of_modelopt(wide: torch.Tensor) -> Written:
    packed, scale, second = quantize_nvfp4(wide)
    parts = {
        "x.weight": packed,
        "x.weight_scale": scale,
        "x.weight_scale_2": second,
        "x.input_scale": torch.tensor(2.0),
    }
    return parts, dequantize_nvfp4(packed, scale, second)


def nvfp4_of_comfyui(wide: torch.Tensor) -> Written:
    packed, scale, second = quantize_nvfp4(wide)
    parts = {
        "x.weight": packed << 4 | packed >> 4,
        "x.weight_scale": in_tiles(scale.view(torch.uint8)).view(torch.float8_e4m3fn),
        "x.weight_scale_2": second,
        "x.comfy_quant": as_json({"format": "nvfp4"}),
    }
    return parts, dequantize_nvfp4(packed, scale, second)


def nvfp4_with_scaled_inputs(wide: torch.Tensor) -> Written:
    parts, values = nvfp4_of_comfyui(wide)
    factors = torch.rand(wide.shape[1]) + 0.5
    return parts | {"x.pre_quant_scale": factors}, values * factors


def mxfp8(wide: torch.Tensor) -> Written:
    blocks = wide.float().view(len(wide), -1, 32)
    exponents = (blocks.abs().amax(-1) / 448).log2().ceil()
    values = (blocks / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    parts = {
        "x.weight": values.view(wide.shape),
        "x.weight_scale": in_tiles((exponents + 127).to(torch.uint8)),
        "x.comfy_quant": as_json({"format": "mxfp8"}),
    }
    return parts, (values.float() * exponents.exp2()[..., None]).view(wide.shape)


def hadamard(size: int) -> torch.Tensor:
    """The symmetric matrix whose entry is -1 for each digit to base 4 at which row and column have the sum 3."""
    digits = torch.tensor([[place // 4**power % 4 for power in range(6)] for place in range(size)])
    signs = (digits[:, None] + digits[None] == 3)[..., : (size.bit_length() - 1) // 2].sum(-1)
    return (-1.0) ** signs / size**0.5


def int8_rotated(wide: torch.Tensor) -> Written:
    turned = (wide.view(len(wide), -1, 64) @ hadamard(64)).view(wide.shape)
    scale = turned.abs().amax(1, keepdim=True) / 127
    values = (turned / scale).round().to(torch.int8)
    said = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    parts = {"x.weight": values, "x.weight_scale": scale, "x.comfy_quant": as_json(said)}
    return parts, ((values * scale).view(len(wide), -1, 64) @ hadamard(64).T).view(wide.shape)


def int4_rotated(wide: torch.Tensor) -> Written:
    turned = (wide.view(len(wide), -1, 16) @ hadamard(16)).view(wide.shape)
    scale = turned.abs().amax(1, keepdim=True) / 7
    codes = (turned / scale).round().to(torch.int8)
    packed = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    said = {"format": "convrot_w4a4", "convrot_groupsize": 16}
    parts = {"x.weight": packed, "x.weight_scale": scale, "x.comfy_quant": as_json(said)}
    return parts, ((codes * scale).view(len(wide), -1, 16) @ hadamard(16).T).view(wide.shape)


def bitsandbytes_int8(wide: torch.Tensor) -> Written:
    scale = wide.abs().amax(1)
    values = (wide * 127 / scale[:, None]).round().to(torch.int8)
    parts = {"x.weight": values, "x.SCB": scale, "x.weight_format": torch.zeros((), dtype=torch.uint8)}
    return parts, values * scale[:, None] / 127


def bitsandbytes_nf4(wide: torch.Tensor, *, nested: bool = False) -> Written:
    table, blocks = torch.tensor(NF4), wide.reshape(-1, 64)
    scales = blocks.abs().amax(1)
    codes = (blocks[..., None] / scales[:, None, None] - table).abs().argmin(-1).view(-1).to(torch.uint8)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(wide.shape)}
    parts = {"x.weight": (codes[0::2] << 4 | codes[1::2])[:, None], "x.weight.quant_map": table}
    if nested:
        offset, second = scales.mean(), torch.linspace(-1, 1, 256)
        steps = torch.stack([part.abs().amax() for part in (scales - offset).split(256)])
        wanted = (scales - offset) / steps.repeat_interleave(256)[: len(scales)]
        absmax = (wanted[:, None] - second).abs().argmin(1).to(torch.uint8)
        parts |= {"x.weight.nested_absmax": steps, "x.weight.nested_quant_map": second}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        scales = second[absmax.long()] * steps.repeat_interleave(256)[: len(absmax)] + offset
    parts |= {"x.weight.absmax": absmax if nested else scales, "x.weight.quant_state.bitsandbytes__nf4": as_json(state)}
    return parts, (table[codes.long()].view(-1, 64) * scales[:, None]).view(wide.shape)


def bitsandbytes_nf4_nested(wide: torch.Tensor) -> Written:
    return bitsandbytes_nf4(wide, nested=True)


def test_what_torchao_quantized_has_its_values(tmp_path: Path) -> None:
    values, scale = torch.randint(-128, 128, (32, 64)).to(torch.int8), torch.rand(8, 2)
    zero = torch.randint(-5, 5, (8, 2)).to(torch.int8)
    short, one = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.rand(16, 1)
    tensors = {"a._weight_qdata": values, "a._weight_scale": scale, "a._weight_zero_point": zero}
    tensors |= {"b._weight_qdata": short, "b._weight_scale": one, "b.bias": torch.rand(16)}
    said = {
        name: json.dumps({"_type": kind}) for name, kind in (("a.weight", "Int8Tensor"), ("b.weight", "Float8Tensor"))
    }
    found = read(tensors, tmp_path / "x.safetensors", said | {"tensor_names": '["a.weight", "b.weight", "b.bias"]'})
    assert found.tensors.keys() == {"a.weight", "b.weight", "b.bias"}
    blocks = (values.view(8, 4, 2, 32) - zero[:, None, :, None].float()) * scale[:, None, :, None]
    assert np.allclose(found.quantized["a.weight"].wide(), blocks.view(32, 64).numpy(), rtol=1e-6)
    assert np.array_equal(found.quantized["a.weight"].rows(3, 9).wide(), found.quantized["a.weight"].wide()[3:9])
    assert np.allclose(found.quantized["b.weight"].wide(), (short.float() * one).numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a._weight_scale": torch.rand(5, 1)}, r"the scale of 'a.weight', I8 \[32, 64\], is F32 \[5, 1\]"),
        ({"a._weight_scale": None}, r"the scale of 'a.weight', I8 \[32, 64\], is missing"),
        ({"a._weight_zero_point": torch.zeros(3)}, r"the zero point of 'a.weight' is F32 \[3\]"),
        ({"a._weight_qdata": torch.zeros(4, 4)}, r"'a.weight' of torchao is F32 \[4, 4\], expected I8"),
    ],
)
def test_parts_of_torchao_that_do_not_fit_are_refused(
    change: Mapping[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    parts = {"a._weight_qdata": torch.zeros(32, 64, dtype=torch.int8), "a._weight_scale": torch.rand(32, 1)} | change
    given = {name: one for name, one in parts.items() if one is not None}
    for said, expected in (({"_type": "Int8Tensor"}, message), ({"_type": "Int4Tensor"}, "'Int4Tensor' of torchao")):
        with pytest.raises(FormatError, match=expected):
            read(given, tmp_path / "x.safetensors", {"a.weight": json.dumps(said)})


WRITERS: list[Callable[[torch.Tensor], Written]] = [
    *(fp8_rows, nvfp4_of_modelopt, nvfp4_of_comfyui, nvfp4_with_scaled_inputs, mxfp8),
    *(int8_rotated, int4_rotated, bitsandbytes_int8, bitsandbytes_nf4, bitsandbytes_nf4_nested),
]


def read(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> Any:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    header = read_header(path)
    return read_quantized_parts(path, header.tensors, header.metadata)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("shape", [(160, 192), (48, 64)], ids=str)
def test_a_matrix_has_the_values_of_its_formula_all_or_some_rows_at_a_time(
    write: Callable[[torch.Tensor], Written], shape: tuple[int, int], tmp_path: Path
) -> None:
    parts, expected = write(torch.randn(shape))
    found = read(parts | {"norm.weight": torch.rand(3), "x.bias": torch.rand(shape[0])}, tmp_path / "x.safetensors")
    assert found.tensors.keys() == {"x.weight", "norm.weight", "x.bias"}
    (matrix,) = found.quantized.values()
    assert matrix.shape == shape
    largest = expected.abs().max()
    assert np.allclose(matrix.wide(), expected.numpy(), rtol=1e-6, atol=float(largest) * 1e-6)
    runs = [matrix.rows(*run).wide() for run in pairwise((0, 5, 6, 40, shape[0]))]
    assert np.array_equal(np.concatenate(runs), matrix.wide())
    assert np.array_equal(matrix.rows(3, 30).rows(4, 9).wide(), matrix.wide()[7:12])


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_component_gets_one_plain_type(write: Callable[[torch.Tensor], Written], tmp_path: Path) -> None:
    parts, expected = write(torch.randn(64, 128))
    file = tmp_path / "x.safetensors"
    others = {"norm.weight": torch.rand(3).half(), "y.weight": torch.rand(4, 5).half(), "x.bias": torch.rand(64).half()}
    save_file({name: tensor.contiguous() for name, tensor in (parts | others).items()}, file)
    header = read_header(file)
    plain = read_as_plain(file, header.tensors, header.metadata)
    assert {name: tensor.dtype for name, tensor in plain.items()} == dict.fromkeys(["x.weight", *others], "F16")
    given = np.frombuffer(plain["x.weight"].read(), np.float16).reshape(64, 128)
    assert np.allclose(given, expected.half().numpy(), rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize("scale", [(8, 1), (), None])
@pytest.mark.parametrize("shape", [(8, 16), (8, 4, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_our_own_form_alone_stays_as_it_is(
    dtype: torch.dtype, shape: tuple[int, ...], scale: tuple[int, ...] | None, tmp_path: Path
) -> None:
    parts = {"x.weight": torch.randn(shape).to(dtype), "norm.weight": torch.rand(4)}
    if scale is not None:
        parts["x.weight_scale"] = torch.rand(scale)
    file = tmp_path / "x.safetensors"
    save_file(parts, file)
    header = read_header(file)
    found = read_as_plain(file, header.tensors, header.metadata)
    if (dtype, shape) == (torch.float8_e4m3fn, (8, 16)) and scale is not None:
        assert found == header.tensors
    else:
        assert {name: tensor.dtype for name, tensor in found.items()} == {"x.weight": "BF16", "norm.weight": "BF16"}


def test_metadata_says_the_format_of_a_layer_without_its_prefix(tmp_path: Path) -> None:
    parts, expected = nvfp4_of_comfyui(torch.randn(32, 64))
    del parts["x.comfy_quant"]
    named = {f"model.diffusion_model.{name}": tensor for name, tensor in parts.items()}
    said = json.dumps({"format_version": "1.0", "layers": {"x": {"format": "nvfp4"}}})
    (matrix,) = read(named, tmp_path / "x.safetensors", {"_quantization_metadata": said}).quantized.values()
    assert np.allclose(matrix.wide(), expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"layers": 3}', '{"layers": [1]}'])
def test_metadata_that_says_no_formats_is_refused(said: str, tmp_path: Path) -> None:
    parts, _ = nvfp4_of_comfyui(torch.randn(32, 64))
    with pytest.raises(FormatError, match="metadata '_quantization_metadata' cannot be read"):
        read(parts, tmp_path / "x.safetensors", {"_quantization_metadata": said})


def test_what_is_plain_or_empty_stays(tmp_path: Path) -> None:
    empty = torch.empty(0, dtype=torch.float8_e4m3fn)
    found = read({"v_pred": empty, "ids": torch.arange(3, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    assert found.tensors.keys() == {"v_pred", "ids"}


def changed(write: Callable[[torch.Tensor], Written], **change: torch.Tensor | None) -> Tensors:
    parts = write(torch.randn(64, 128))[0]
    named = {f"x.{name.replace('__', '.')}": tensor for name, tensor in change.items()}
    return {name: tensor for name, tensor in (parts | named).items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"x.qweight": torch.zeros(2, 2, dtype=torch.int8), "x.wscales": torch.zeros(1)},
            r"'x.qweight' of SVDQuant is I8",
        ),
        ({"x.qweight": torch.zeros(2, 2, dtype=torch.int32)}, r"'x.qweight' is of AWQ or GPTQ"),
        (
            {"x._weight_qdata": torch.zeros(2, 2, dtype=torch.int8)},
            r"'x.weight' is a None of torchao, which is not read",
        ),
        (
            {"x.weight": torch.zeros(2, 2, dtype=torch.uint8), "x.weight_quantizer._amax": torch.zeros(1)},
            r"'x.weight_quantizer._amax' is of ModelOpt before its export, which is not read; read are F8, int8",
        ),
        ({"x.weight": torch.zeros(2, 2, dtype=torch.int8)}, r"'x.weight' is of 8-bit integers without a scale"),
        ({"x.weight": torch.zeros(2, 2, dtype=torch.uint8)}, r"'x.weight' is of bytes, and nothing says what"),
        (changed(nvfp4_of_comfyui, weight_scale_2=None), r"'x.weight_scale_2': expected one number"),
        (changed(nvfp4_of_modelopt, weight_scale_2=torch.rand(3)), r"'x.weight_scale_2': expected one number"),
        (changed(nvfp4_of_modelopt, weight_scale=torch.rand(64, 7).to(torch.float8_e4m3fn)), r"expected a scale in F8"),
        (changed(nvfp4_of_comfyui, pre_quant_scale=torch.rand(3)), r"'x.pre_quant_scale' is F32 \[3\], expected"),
        (changed(mxfp8, weight_scale=torch.zeros(4, 4, dtype=torch.uint8)), r"expected a scale in F8_E8M0"),
        (changed(mxfp8, weight=torch.zeros(64, 100, dtype=torch.uint8)), r"F8_E4M3 \(rows, columns\), of whole blocks"),
        (changed(fp8_rows, weight_scale=torch.ones(64, dtype=torch.int32)), r"is I32 \[64\], .* expected scales in "),
        (changed(int4_rotated, weight=torch.zeros(64, dtype=torch.uint8)), r"expected two elements in a byte"),
        (changed(int8_rotated, weight=torch.zeros(64, 100, dtype=torch.int8)), r"expected columns in whole groups of"),
        (changed(mxfp8, comfy_quant=torch.zeros(4097, dtype=torch.uint8)), r"has 4097 bytes, at most 4096"),
        (changed(mxfp8, comfy_quant=torch.tensor([123], dtype=torch.uint8)), r"'x.comfy_quant' is no JSON"),
        (changed(int8_rotated, weight_scale=torch.rand(3)), r"is F32 \[3\], its weight is I8 \[64, 128\]"),
        (changed(int8_rotated, weight_scale_2=torch.rand(1)), r"a second scale, expected beside nvfp4"),
        (changed(fp8_rows, comfy_quant=as_json({"format": "int8_blockwise"})), r"'int8_blockwise', expected float8"),
        (
            changed(fp8_rows, comfy_quant=as_json({"format": "float8_e4m3fn", "convrot": True})),
            r"with convrot, expected",
        ),
        (
            changed(
                int8_rotated,
                comfy_quant=as_json({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 7}),
            ),
            r"rotated in groups of 7",
        ),
        (changed(bitsandbytes_int8, SCB=torch.rand(3)), r"'x' has scales SCB \[3\]"),
        (changed(bitsandbytes_int8, weight_format=torch.ones((), dtype=torch.uint8)), r"in the layout of a card"),
        (
            changed(bitsandbytes_nf4, weight__absmax=torch.rand(3)),
            r"absmax' is F32 \[3\], expected 128 elements of F32",
        ),
        (changed(bitsandbytes_nf4, weight__quant_map=None), r"has no weight, .absmax or .quant_map"),
        (changed(bitsandbytes_nf4_nested, weight__nested_absmax=None), r"nested_absmax' is missing"),
        ({"x.weight_scale_2": torch.rand(1), "y.weight": torch.rand(2).to(torch.float8_e5m2)}, r"belongs to no weight"),
        (
            changed(bitsandbytes_nf4)
            | {"x.weight.quant_state.bitsandbytes__nf4": as_json({"shape": [2**62, 2**62, 4]})},
            r"its quant_state is",
        ),
        (
            changed(bitsandbytes_nf4)
            | {"x.weight.quant_state.bitsandbytes__nf4": as_json({"shape": [2**40, 2**30], "blocksize": 64})},
            r"has no weight|elements of",
        ),
    ],
)
def test_what_is_not_read_or_does_not_fit_is_refused_by_its_name(
    tensors: Tensors, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message):
        read(tensors, tmp_path / "x.safetensors")
