"""Denoisers as GGUF files, written by gguf-py under the names of the models' original code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from kit.seeding import seeded_rng

from infra.bench import original_names
from weights.records.dtypes import BLOCK_SIZES

Tensors = dict[str, torch.Tensor]
BLOCKS_OF_32 = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
ORIGINALS: Mapping[str, Callable[[Mapping[str, torch.Tensor]], Tensors]] = {
    "flux": lambda state: original_names.flux(state, _count(state, "transformer_blocks"), _count(state, "single_tr")),
    "sd3": lambda state: {
        key.removeprefix("model.diffusion_model."): tensor
        for key, tensor in original_names.sd3(state, _count(state, "transformer_blocks")).items()
    },
    "qwen_image": dict,
    "lumina2": original_names.z_image,
}


def write_denoiser(
    path: Path, architecture: str, state: Mapping[str, torch.Tensor], kinds: tuple[str, ...] = BLOCKS_OF_32
) -> Tensors:
    """Write a model with its matrices packed, each in one of `kinds` if it has whole blocks, and return what they stand
    for, by original names. Biases and norms are float32, other matrices float16 or bfloat16.
    """
    draw, writer, values = seeded_rng(), gguf.GGUFWriter(path, architecture), Tensors()
    for name, tensor in ORIGINALS[architecture](state).items():
        array = np.ascontiguousarray(tensor.detach().float().numpy())
        if array.ndim == 2 and array.shape[1] % 32 == 0 and array.shape[0] > 1:
            kind = gguf.GGMLQuantizationType[str(draw.choice(kinds))]
        elif array.ndim > 1:  # of what is no linear layer's, diffusers reads no bfloat16
            is_matrix = array.ndim == 2 and array.shape[0] > 1
            kind = gguf.GGMLQuantizationType[str(draw.choice(["F16", "BF16"])) if is_matrix else "F16"]
        else:
            kind = gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(array, kind)
        values[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind)).reshape(array.shape)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def packed_bytes(path: Path) -> int:
    """Return the bytes of the packed tensors of a file."""
    tensors = gguf.GGUFReader(path).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors if tensor.tensor_type.name in BLOCK_SIZES)


def _count(state: Mapping[str, torch.Tensor], prefix: str) -> int:
    return 1 + max(int(key.split(".")[1]) for key in state if key.startswith(prefix))


def under_diffusers_names(architecture: str, state: Mapping[str, torch.Tensor], values: Tensors) -> Tensors:
    """Return values by original names where they belong in a state of diffusers, told by numbers in their places."""
    numbers, first = Tensors(), 0
    for name, tensor in state.items():
        numbers[name] = torch.arange(first, first := first + tensor.numel()).view(tensor.shape)
    flat = torch.full([first], torch.nan)
    for name, places in ORIGINALS[architecture](numbers).items():
        flat[places.flatten()] = values[name].flatten().float()
    assert not flat.isnan().any()
    return {name: flat[places] for name, places in numbers.items()}
