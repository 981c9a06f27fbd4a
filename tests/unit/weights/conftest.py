"""Checkpoint folders of fresh random tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weights.store import WeightStore

torch.set_num_threads(1)

Tensors = Mapping[str, torch.Tensor]
WriteModel = Callable[..., Path]
WritePipeline = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """An LLM folder: config.json beside model.safetensors."""

    def write(name: str, tensors: Tensors, **config: Any) -> Path:
        folder = tmp_path / "sources" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"], **config}))
        save_file(dict(tensors), folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def write_pipeline(tmp_path: Path) -> WritePipeline:
    """A diffusers folder with the given components, a solver and a tokenizer."""

    def write(name: str, components: Mapping[str, Tensors]) -> Path:
        folder = tmp_path / "sources" / name
        index: dict[str, Any] = {
            "_class_name": "TinyPipeline",
            "_diffusers_version": "0",
            "image_encoder": [None, None],
        }
        index |= {"scheduler": ["diffusers", "TinyScheduler"], "tokenizer": ["transformers", "TinyTokenizer"]}
        for part, tensors in components.items():
            index[part] = ["diffusers", f"Tiny{part.title()}"]
            (folder / part).mkdir(parents=True)
            (folder / part / "config.json").write_text(json.dumps({"part": part}))
            save_file(dict(tensors), folder / part / "diffusion_pytorch_model.safetensors")
        for part in ("scheduler", "tokenizer"):
            (folder / part).mkdir()
            (folder / part / f"{part}_config.json").write_text("{}")
        (folder / "tokenizer" / "merges.txt").write_text("a b\n")
        (folder / "model_index.json").write_text(json.dumps(index))
        return folder

    return write


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")
