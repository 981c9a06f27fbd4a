"""Names of files, as ComfyUI's loaders say them, to registered models."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.registry.directory import ModelRecord
from configs.model import AdapterConfig, ModelConfig
from deployments.ingress.comfy.model_files import FOLDERS, ModelFiles
from weights.formats.learned_words import WORDS_CLASS


def model(id_: str, path: str = "/models/x", kind: Any = "diffusion", **more: Any) -> ModelRecord:
    entry = ModelConfig.model_validate({"id": id_, "path": path, **more})
    return ModelRecord(id_, "ready", kind, 10, f"version of {id_}", entry=entry)


def adapter(id_: str, kind: Any, path: str = "/adapters/x", class_name: str = "", **more: Any) -> ModelRecord:
    entry = AdapterConfig.model_validate({"id": id_, "path": path, "base": ["flux"], **more})
    return ModelRecord(id_, "ready", kind, 10, "v", entry=entry, class_name=class_name)


FLUX = model("flux", file_names=["flux1-dev.safetensors", "ae.safetensors", "t5xxl_fp16.safetensors"])
SCHNELL = model("schnell", "/m/flux1-schnell.safetensors", like="/models/flux", file_names=["ae.safetensors"])
XL = model("xl", "hf://some/sdxl", vae="/models/vae/fixed.safetensors")


@pytest.mark.parametrize(
    ("folder", "name", "expected"),
    [
        ("checkpoints", "flux", ["flux"]),
        ("checkpoints", "flux.safetensors", ["flux"]),
        ("diffusion_models", "flux1-dev.safetensors", ["flux"]),
        ("diffusion_models", "flux1-schnell.safetensors", ["schnell"]),
        ("vae", "ae.safetensors", ["flux", "schnell"]),
        ("text_encoders", "t5xxl_fp16.safetensors", ["flux"]),
        ("text_encoders", "flux1-schnell.safetensors", []),
        ("vae", "fixed.safetensors", ["xl"]),
        ("vae", "flux1-schnell.safetensors", []),
        ("checkpoints", "sdxl", []),
        ("checkpoints", "xl.safetensors", ["xl"]),
        ("loras", "flux", []),
        ("checkpoints", "no", []),
    ],
)
def test_a_model_goes_by_its_id_its_file_and_its_names(folder: Any, name: str, expected: list[str]) -> None:
    files = ModelFiles([FLUX, SCHNELL, XL])
    assert list(files.models(folder, name)) == expected
    assert (name in files.names(folder)) == bool(expected)


def test_each_kind_has_its_folders() -> None:
    records = [
        FLUX,
        adapter("ink", "adapter", "/l/Ink-v2.safetensors"),
        adapter("edges", "controlnet"),
        adapter("word", "adapter", class_name=WORDS_CLASS),
        model("x4", "/u/RealESRGAN_x4.pth", "upscaler"),
        model("writer", "/q/qwen.gguf", "llm"),
        model("sentences", kind="embedding"),
    ]
    files = ModelFiles(records)
    found = {folder: set(files.names(folder)) for folder in FOLDERS}
    own = {"flux", "flux.safetensors", *FLUX.entry.file_names}  # type: ignore[union-attr]
    assert found == {
        "checkpoints": own,
        "diffusion_models": own,
        "vae": own,
        "text_encoders": own | {"writer", "writer.safetensors"},
        "loras": {"ink", "ink.safetensors", "Ink-v2.safetensors"},
        "controlnet": {"edges", "edges.safetensors"},
        "embeddings": {"word", "word.safetensors"},
        "upscale_models": {"x4", "x4.safetensors", "RealESRGAN_x4.pth"},
        "clip_vision": own,
        "model_patches": {"edges", "edges.safetensors"},
    }


def test_what_cannot_be_asked_has_no_name() -> None:
    entry = ModelConfig.model_validate({"id": "torn", "path": "/m/torn.safetensors", "like": "/models/flux"})
    torn = ModelRecord("torn", "unavailable", error="a tensor is torn", entry=entry)
    large = ModelRecord("large", "does_not_fit", "diffusion", 10, "v", entry=entry)
    assert [*ModelFiles([torn, large]).names("checkpoints")] == []
