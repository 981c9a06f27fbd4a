"""Matrices of SVDQuant have the values of the formula: packed here by the layout's own rules, element by element."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from kit.seeding import seeded_rng
from safetensors.torch import save_file

from weights.conversion.single_file import read_single_file
from weights.formats.low_precision import read_quantized_parts
from weights.formats.safetensors import read_header
from weights.operations.base_pipeline import open_base
from weights.records.errors import FormatError

DEMO = Path(__file__).parents[4] / "infra" / "demo" / "models" / "digits-flux"
Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SHIFT = 0.171875
NEW = {"smooth": "smooth_factor", "lora_down": "proj_down", "lora_up": "proj_up"}


def places_in_tiles(rows: int, columns: int) -> np.ndarray:
    """Return where each 4-bit number of a matrix lies: a thread of 32 reads 2 x 2 words of 8 numbers of a tile."""
    row, column = np.indices((rows, columns))
    tile, inner = row // 128 * (columns // 64) + column // 64, row % 128
    thread = inner % 8 * 4 + column % 32 // 8
    word = inner // 8 % 2 * 2 + column % 64 // 32
    return ((tile * 8 + inner // 16) * 32 + thread) * 32 + word * 8 + column % 8


def in_tiles(codes: np.ndarray) -> torch.Tensor:
    flat = np.zeros(codes.size, np.uint8)
    flat[places_in_tiles(*codes.shape)] = codes & 15
    packed = flat[0::2] | flat[1::2] << 4
    return torch.from_numpy(packed.view(np.int8).reshape(len(codes), -1).copy())


def laid_out(values: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """Put the elements of a matrix at these places of a flat tensor."""
    as_bits = torch.uint8 if values.itemsize == 1 else torch.int16
    flat = torch.zeros(values.numel(), dtype=as_bits)
    flat[torch.from_numpy(places.reshape(-1))] = values.contiguous().view(as_bits).view(-1)
    return flat.view(values.dtype)


def in_rows_of_four(scales: torch.Tensor) -> torch.Tensor:
    """Lay (rows, runs) out run by run: of 16 rows four threads have 2 and 2 that are 8 apart."""
    (rows, runs), (row, run) = scales.shape, np.indices(scales.shape)
    tile, inner = row // 128, row % 128
    place = inner // 16 * 16 + inner % 8 // 2 * 4 + inner // 8 % 2 * 2 + inner % 2
    return laid_out(scales, (tile * runs + run) * 128 + place).view(runs, rows)


def vector(values: torch.Tensor) -> torch.Tensor:
    return in_rows_of_four(values[:, None]).view(-1)


def in_words_of_four(scales: torch.Tensor) -> torch.Tensor:
    """Lay scales of runs of 16 out: four of a row in a word, the rows 0, 32, 64 and 96 side by side."""
    (rows, runs), (row, run) = scales.shape, np.indices(scales.shape)
    tile, inner = row // 128, row % 128
    word = inner % 8 * 4 + inner % 32 // 8
    places = ((tile * (runs // 4) + run // 4) * 32 + word) * 16 + inner // 32 * 4 + run % 4
    return laid_out(scales, places).view(runs, rows)


def in_packs(matrix: torch.Tensor, *, is_down: bool) -> torch.Tensor:
    """Lay one half of a product out in packs of 16 x 16; of the half that reads, packs of columns come first."""
    (rows, columns), (row, column) = matrix.shape, np.indices(matrix.shape)
    across, along = (column // 16, row // 16) if is_down else (row // 16, column // 16)
    pack = across * ((rows if is_down else columns) // 16) + along
    thread, word = row % 8 * 4 + column % 8 // 2, row // 8 % 2 * 2 + column // 8 % 2
    flat = laid_out(matrix, pack * 256 + thread * 8 + word * 2 + column % 2)
    return flat.view(columns, rows) if is_down else flat.view(rows, columns)


class Layer(NamedTuple):
    parts: Tensors
    weight: torch.Tensor  # what stands for it
    bias: torch.Tensor


def svd(rows: int, columns: int, *, is_float: bool = False, is_shifted: bool = False, rank: int = 16) -> Layer:
    """A layer in nunchaku's older names."""
    codes = seeded_rng().integers(0, 16, (rows, columns), dtype=np.uint8)
    down, up = torch.randn(rank, columns).mul(0.1).bfloat16(), torch.randn(rows, rank).mul(0.1).bfloat16()
    smooth, bias = (torch.rand(columns) + 0.5).bfloat16(), torch.randn(rows).bfloat16()
    run = 16 if is_float else 64
    scales = torch.rand(rows, columns // run) * 0.1 + 0.01
    scales = scales.to(torch.float8_e4m3fn if is_float else torch.bfloat16)
    parts = {
        "qweight": in_tiles(codes),
        "wscales": in_words_of_four(scales) if is_float else in_rows_of_four(scales),
        "smooth": vector(smooth),
        "smooth_orig": vector(smooth) * 3,
        "lora_down": in_packs(down, is_down=True),
        "lora_up": in_packs(up, is_down=False),
        "bias": vector(bias),
    }
    values = E2M1[codes.astype(int)] if is_float else torch.from_numpy((codes ^ 8).astype(np.float32) - 8)
    values = (values.view(rows, -1, run) * scales.float()[..., None]).view(rows, columns)
    if is_float:
        one, each = torch.tensor([0.5]), (torch.rand(rows) + 0.5).bfloat16()
        parts |= {"wtscale": one, "wcscales": vector(each)}
        values = values * one * each.float()[:, None]
    values = values / smooth.float()
    added = values.sum(1) * SHIFT if is_shifted else torch.zeros(rows)
    return Layer(parts, values + up.float() @ down.float(), bias.float() + added)


def awq(rows: int, columns: int, parts: int = 1) -> Layer:
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    runs = columns // 64
    scales, zeros = (torch.rand(rows, runs) * 0.1).bfloat16(), (torch.randn(rows, runs) * 0.1).bfloat16()
    row, column = np.indices((rows, columns))
    run, inner = column // 64, column % 64
    word = run * 64 + row % 4 * 16 + inner // 32 * 8 + inner % 8
    words = np.zeros((rows // 4, columns), np.uint16)
    np.bitwise_or.at(words, (row // 4, word), (codes.numpy() << (4 * (inner % 32 // 8))).astype(np.uint16))
    packed = words.view(np.int32)
    weight = (codes.view(rows, runs, 64) * scales.float()[..., None] + zeros.float()[..., None]).view(rows, columns)
    bias = torch.randn(rows).bfloat16()
    found = {"qweight": torch.from_numpy(packed.copy()), "wscales": scales.T, "wzeros": zeros.T, "bias": bias}
    plain = bias.float()
    if parts > 1:
        order = torch.arange(rows).view(-1, parts).T.reshape(-1)
        weight, plain = weight[order], plain[order].view(parts, -1)
        plain[[1, parts - 2] if parts > 3 else [1]] -= 1
        plain = plain.reshape(-1)
    return Layer(found, weight, plain)


def read(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> Any:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    header = read_header(path)
    return read_quantized_parts(path, header.tensors, header.metadata)


def check(found: Any, name: str, layer: Layer) -> None:
    weight, bias = found.quantized[f"{name}.weight"], found.quantized[f"{name}.bias"]
    assert weight.shape == tuple(layer.weight.shape)
    assert np.allclose(weight.wide(), layer.weight.numpy(), rtol=1e-5, atol=1e-5)
    assert np.allclose(bias.wide(), layer.bias.numpy(), rtol=1e-5, atol=1e-5)
    runs = [weight.rows(*run).wide() for run in pairwise((0, 5, 130, len(layer.weight)))]
    assert np.allclose(np.concatenate(runs), weight.wide(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_float", [False, True], ids=["int4", "E2M1"])
@pytest.mark.parametrize("names", [{}, NEW], ids=["older names", "newer names"])
def test_a_matrix_has_the_values_of_the_formula(tmp_path: Path, is_float: bool, names: Mapping[str, str]) -> None:
    layer = svd(256, 384, is_float=is_float, rank=32)
    parts = {f"to_q.{names.get(end, end)}": one for end, one in layer.parts.items() if end != "smooth_orig"}
    found = read(parts | {"norm.weight": torch.rand(3)}, tmp_path / "x.safetensors")
    assert found.tensors.keys() == {"to_q.weight", "to_q.bias", "norm.weight"}
    check(found, "to_q", layer)


def test_a_matrix_of_awq_has_the_values_of_the_formula(tmp_path: Path) -> None:
    layer = awq(136, 192)
    found = read({f"x.{end}": one for end, one in layer.parts.items()}, tmp_path / "x.safetensors")
    check(found, "x", layer)


def flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip


def qwen() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=1, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=16, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip


# Layers of nunchaku's files, with those of diffusers' classes that they are, rows after rows.
DOUBLE = {
    "qkv_proj": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "qkv_proj_context": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "out_proj": ["attn.to_out.0"],
    "out_proj_context": ["attn.to_add_out"],
    "mlp_fc1": ["ff.net.0.proj"],
    "mlp_fc2": ["ff.net.2"],
    "mlp_context_fc1": ["ff_context.net.0.proj"],
    "mlp_context_fc2": ["ff_context.net.2"],
}
QWEN = {
    "attn.to_qkv": DOUBLE["qkv_proj"],
    "attn.add_qkv_proj": DOUBLE["qkv_proj_context"],
    **{name: [name] for name in ("attn.to_out.0", "attn.to_add_out")},
    **{f"{kind}_mlp.net.{end}": [f"{kind}_mlp.net.{end}"] for kind in ("img", "txt") for end in ("0.proj", "2")},
}


def written(state: Tensors, prefix: str, name: str, layers: list[str], tensors: Tensors, *, is_float: bool) -> None:
    """Write layers of a model as one, and what stands for them into the model."""
    rows = [len(state[f"{prefix}{layer}.weight"]) for layer in layers]
    columns = state[f"{prefix}{layers[0]}.weight"].shape[1]
    is_shifted = name.endswith(("mlp_fc2", "context_fc2", "mlp.net.2")) and not is_float
    made = svd(sum(rows), columns, is_float=is_float, is_shifted=is_shifted)
    for layer, weight, bias in zip(layers, made.weight.split(rows), made.bias.split(rows), strict=True):
        state |= {f"{prefix}{layer}.weight": weight, f"{prefix}{layer}.bias": bias}
    tensors |= {f"{prefix}{name}.{end}": one for end, one in made.parts.items()}


def modulated(state: Tensors, name: str, parts: int, tensors: Tensors) -> None:
    made = awq(*state[f"{name}.weight"].shape, parts=parts)
    state |= {f"{name}.weight": made.weight, f"{name}.bias": made.bias}
    tensors |= {f"{name}.{end}": one for end, one in made.parts.items()}


def nunchaku_flux(state: Tensors, *, is_float: bool) -> Tensors:
    tensors: Tensors = {}
    double, single = "transformer_blocks.0.", "single_transformer_blocks.0."
    for name, layers in DOUBLE.items():
        written(state, double, name, layers, tensors, is_float=is_float)
    for name in ("norm1", "norm1_context"):
        modulated(state, f"{double}{name}.linear", 6, tensors)
    modulated(state, f"{single}norm.linear", 3, tensors)
    written(state, single, "qkv_proj", DOUBLE["qkv_proj"], tensors, is_float=is_float)
    written(state, single, "mlp_fc1", ["proj_mlp"], tensors, is_float=is_float)
    halves = [svd(128, 128, is_float=is_float), svd(128, 512, is_float=is_float, is_shifted=not is_float)]
    for name, made in zip(("out_proj", "mlp_fc2"), halves, strict=True):
        tensors |= {f"{single}{name}.{end}": one for end, one in made.parts.items()}
    state[f"{single}proj_out.weight"] = torch.cat([one.weight for one in halves], dim=1)
    state[f"{single}proj_out.bias"] = halves[0].bias + halves[1].bias
    for name in [name for name in state if ".attn.norm_" in name]:
        tensors[name.replace(".attn.norm_", ".norm_")] = state[name]
    return tensors


def nunchaku_qwen(state: Tensors, *, is_float: bool) -> Tensors:
    tensors: Tensors = {}
    for name, layers in QWEN.items():
        written(state, "transformer_blocks.0.", name, layers, tensors, is_float=is_float)
    for kind in ("img", "txt"):
        modulated(state, f"transformer_blocks.0.{kind}_mod.1", 6, tensors)
    return tensors


@pytest.mark.parametrize("is_float", [False, True], ids=["int4", "E2M1"])
@pytest.mark.parametrize(
    ("make", "write", "said"),
    [(flux, nunchaku_flux, "NunchakuFluxTransformer2dModel"), (qwen, nunchaku_qwen, "")],
    ids=["flux", "qwen"],
)
def test_nunchakus_files_are_the_models_of_diffusers(
    tmp_path: Path, make: Any, write: Any, said: str, is_float: bool
) -> None:
    state = {name: one.detach() for name, one in make().state_dict().items()}
    before = dict(state)
    tensors = write(state, is_float=is_float)
    replaced = {name for name, one in state.items() if one is not before[name]}
    norms = {name for name in state if ".attn.norm_" in name} if make is flux else set()
    tensors |= {name: one for name, one in state.items() if name not in replaced | norms}
    found = read(tensors, tmp_path / "x.safetensors", {"model_class": said} if said else None)
    assert found.tensors.keys() == state.keys()
    assert found.quantized.keys() == replaced | norms
    for name, matrix in found.quantized.items():
        assert matrix.shape == tuple(state[name].shape), name
        assert np.allclose(matrix.wide(), state[name].numpy(), rtol=1e-4, atol=1e-4), name


def test_a_file_takes_the_place_of_a_pipelines_transformer(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "base")
    flux().save_pretrained(tmp_path / "base" / "transformer")
    state = {name: one.detach() for name, one in flux().state_dict().items()}
    before = dict(state)
    tensors = nunchaku_flux(state, is_float=False)
    plain = {name for name, one in state.items() if one is before[name] and ".attn.norm_" not in name}
    file = tmp_path / "svdq-int4.safetensors"
    given = tensors | {name: state[name] for name in plain}
    save_file(
        {name: one.contiguous() for name, one in given.items()}, file, {"model_class": "NunchakuFluxTransformer2dModel"}
    )
    checkpoint = read_single_file(file, open_base(tmp_path / "base", None))
    (part,) = (one for one in checkpoint.components if one.name == "transformer")
    assert part.tensors.keys() == state.keys()
    for name, one in part.tensors.items():
        assert one.dtype == "BF16"
        found = torch.frombuffer(bytearray(one.read()), dtype=torch.bfloat16).view(one.shape)
        torch.testing.assert_close(found.float(), state[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("make", "write"), [(flux, nunchaku_flux), (qwen, nunchaku_qwen)], ids=["flux", "qwen"])
def test_a_base_without_its_class_is_refused_in_one_sentence(tmp_path: Path, make: Any, write: Any) -> None:
    state = {name: one.detach() for name, one in make().state_dict().items()}
    file = tmp_path / "x.safetensors"
    save_file({name: one.contiguous() for name, one in write(state, is_float=False).items()}, file)
    expected = (
        f"{file}: SVDQuant of a {make().__class__.__name__}, which '.*digits-sdxl', given as its `like`, does not"
    )
    with pytest.raises(FormatError, match=expected):
        read_single_file(file, open_base(DEMO.parent / "digits-sdxl", None))


def test_a_folder_of_diffusers_nunchaku_lite_is_a_plain_one(tmp_path: Path) -> None:
    model = flux()
    model.save_pretrained(tmp_path)
    state = {name: one.detach() for name, one in model.state_dict().items()}
    targets = ["transformer_blocks.0.ff.net.2", "single_transformer_blocks.0.proj_out"]
    for target in targets:
        made = svd(*state.pop(f"{target}.weight").shape)
        state |= {f"{target}.{NEW.get(end, end)}": one for end, one in made.parts.items() if end != "smooth_orig"}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"precision": "int4", "group_size": 64, "rank": 16, "targets": targets}
    config["quantization_config"] = {"quant_method": "nunchaku_lite", "svdq_w4a4": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_quantized_parts(tmp_path, read_header(tmp_path / "diffusion_pytorch_model.safetensors").tensors, {})
    assert found.tensors.keys() == model.state_dict().keys()
    # Not moved up, as in nunchaku's own files: the class's GELU is its own.
    assert np.allclose(found.quantized[f"{targets[1]}.bias"].wide(), made.bias.numpy())


def changed(**change: torch.Tensor | None) -> Tensors:
    parts = {f"x.{end}": one for end, one in svd(128, 128).parts.items()}
    named = {f"x.{name}": one for name, one in change.items()}
    return {name: one for name, one in (parts | named).items() if one is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (changed(qweight=torch.zeros(64, 64, dtype=torch.int8)), r"'x.qweight' of SVDQuant is I8 \[64, 64\], expected"),
        (changed(wscales=torch.zeros(3, 128).bfloat16()), r"'x.wscales' of SVDQuant is BF16 \[3, 128\], expected a sc"),
        (changed(smooth=None), r"'x.smooth_factor' is missing"),
        (changed(smooth=torch.zeros(64).bfloat16()), r"'x.smooth' of SVDQuant is BF16 \[64\], expected 128 numbers"),
        (changed(lora_up=None), "the two halves of a product of low rank do not go together"),
        (changed(lora_down=torch.zeros(128, 32).bfloat16()), "the two halves of a product of low rank do not go tog"),
        (changed(lora_down=torch.zeros(128, 8).bfloat16()), r"'x.lora_down' of SVDQuant is BF16 \[128, 8\], exp"),
        (changed(bias=torch.zeros(4)), r"'x.bias' of SVDQuant is F32 \[4\], expected 128 numbers"),
        (changed(wzeros=torch.zeros(2, 128).bfloat16()), r"'x.qweight' of SVDQuant is I8 .* four rows together"),
        ({"x.wscales": torch.zeros(1)}, r"'x.wscales' is of SVDQuant \(nunchaku\) without its qweight"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(tensors: Tensors, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        read(tensors, tmp_path / "x.safetensors")


def test_other_classes_of_nunchaku_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match=r"SVDQuant of a 'NunchakuZImage.*', which is not read; read are NunchakuFlux"
    ):
        read(changed(), tmp_path / "x.safetensors", {"model_class": "NunchakuZImageTransformer2DModel"})
