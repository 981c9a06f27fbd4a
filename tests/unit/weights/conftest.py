"""Checkpoint folders of fresh random tensors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from unit.weights.small_disk import NUM_PAGES, PAGE_BYTES

from weights.storage.store import WeightStore

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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; elsewhere the test is skipped, and those with a fake remain."""
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size={NUM_PAGES * PAGE_BYTES}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
