"""Whole quantized models as others publish them: imported, written back, and computed as transformers computes them.

The reference is transformers' model with the values that the format's own formula gives.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from safetensors.torch import save_file
from unit.deployments.engines.llm.test_quantized_checkpoints import last_logits, originals, saved, with_values
from unit.weights.formats.test_published_quantization import packed

from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.nn.packed_linear import PackedLinear
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.loading.views import mapped_tensors
from weights.operations.externalize import externalize
from weights.operations.layouts import write_inline
from weights.storage.store import WeightStore

GROUP = 32
Parts = tuple[dict[str, torch.Tensor], np.ndarray]


def grouped(matrix: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """4-bit values (rows, columns), zero points and float16 scales (rows, groups) of columns that are in `groups`."""
    count = groups.max() + 1
    low = np.stack([matrix[:, groups == group].min(1) for group in range(count)], 1)
    high = np.stack([matrix[:, groups == group].max(1) for group in range(count)], 1)
    scales = (np.maximum(high - low, 1e-6) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 0, 15).astype(np.int64)
    values = np.clip(np.round(matrix / scales[:, groups]) + zeros[:, groups], 0, 15).astype(np.int64)
    return values, zeros, scales


def torch_parts(**parts: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def awq(matrix: np.ndarray) -> Parts:
    groups = np.arange(matrix.shape[1]) // GROUP
    values, zeros, scales = grouped(matrix, groups)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = torch_parts(qweight=packed(values.T, 4, order), qzeros=packed(zeros.T, 4, order), scales=scales.T)
    return parts, (values - zeros[:, groups]) * scales[:, groups].astype(np.float32)


def gptq(matrix: np.ndarray, *, is_ordered: bool = False) -> Parts:
    groups = np.arange(matrix.shape[1]) // GROUP
    if is_ordered:
        groups = seeded_rng().permutation(groups)
    values, zeros, scales = grouped(matrix, groups)
    words = packed(values, 4).T
    parts = torch_parts(
        qweight=words, qzeros=packed((zeros.T - 1) % 16, 4), scales=scales.T, g_idx=groups.astype(np.int32)
    )
    wide = (values - zeros[:, groups]) * scales[:, groups].astype(np.float32)
    return parts, wide.astype(ml_dtypes.bfloat16).astype(np.float32) if is_ordered else wide


def int8(matrix: np.ndarray) -> Parts:
    scales = (np.abs(matrix).max(1, keepdims=True) / 127).astype(np.float32)
    values = np.round(matrix / scales).astype(np.int8)
    return torch_parts(weight=values, weight_scale=scales), values * scales


def float8(matrix: np.ndarray) -> Parts:
    rows, columns = (-(-size // GROUP) for size in matrix.shape)
    scales = np.full((rows, columns), np.abs(matrix).max() / 448, np.float32) * np.linspace(1, 2, columns, dtype="f4")
    full = np.repeat(np.repeat(scales, GROUP, 0), GROUP, 1)[: matrix.shape[0], : matrix.shape[1]]
    values = torch.from_numpy(matrix / full).to(torch.float8_e4m3fn)
    wide = (values.float().numpy() * full).astype(ml_dtypes.bfloat16).astype(np.float32)
    return {"weight": values, "weight_scale_inv": torch.from_numpy(scales)}, wide


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
INT8 = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}}
FP8 = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}
FORMS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Parts], bool]] = {
    "awq": (AWQ, awq, True),
    "gptq": (GPTQ, gptq, True),
    "gptq-order": (GPTQ | {"desc_act": True}, lambda matrix: gptq(matrix, is_ordered=True), False),
    "int8": (INT8, int8, True),
    "fp8": (FP8, float8, False),
}


def published(model: Any, folder: Path, form: str) -> dict[str, np.ndarray]:
    """Write the model in a published form, and return the values that it stands for."""
    method, quantize, _ = FORMS[form]
    shutil.copytree(model.folder, folder)
    tensors: dict[str, torch.Tensor] = {}
    values = dict[str, np.ndarray]()
    for name, matrix in originals(model).items():
        if matrix.ndim != 2 or "_proj" not in name:
            tensors[name] = torch.from_numpy(matrix).bfloat16()
            values[name] = tensors[name].float().numpy()
            continue
        parts, values[name] = quantize(matrix)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = {"quantization_config": method, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | said))
    return values


@pytest.mark.drawn(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@torch.inference_mode()
def test_logits_equal_transformers_on_the_values_of_the_format(
    tiny: Callable[..., Any], tmp_path: Path, name: str, form: str
) -> None:
    model = saved(tiny, name)
    values = published(model, tmp_path / "published", form)
    assert why_unservable(read_checkpoint(tmp_path / "published")) is None
    (tmp_path / "reference").mkdir()
    reference = with_values(model.stock, originals(model) | values, tmp_path / "reference")
    store = WeightStore(tmp_path / "store")
    externalize(store, "m", tmp_path / "published")
    write_inline(store, "m", tmp_path / "again")
    folder, tensors, _ = mapped_tensors(tmp_path / "again")
    ours = create_model(load_config(folder), tensors, torch.device("cpu"), arithmetic="exact")
    kinds = {module.packed.kind for module in ours.module.modules() if isinstance(module, PackedLinear)}
    assert kinds == {"BF16", *["GROUP_INT8"] * FORMS[form][2]}
    ids = torch.randint(0, 260, (40,))
    expected = reference(ids[None]).logits[0]
    runner = ModelRunner(ours, 8)
    got = torch.cat([last_logits(runner, ids[:length].tolist()) for length in (40, 23, 1)])
    wanted = expected[[39, 22, 0]]
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-4
    assert (expected - model.stock(ids[None]).logits[0]).abs().max() > 1e-3
