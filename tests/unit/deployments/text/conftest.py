"""The text encoders of the demo's image models, ours and stock's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployments.engines.text.encoder import load_text_encoder
from deployments.modules.encoders import KeyedEncoder
from deployments.text.encode import CachedEncoders
from deployments.text.requests import ConditioningRequest, unpack

MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"


class Demo:
    """A demo model's text encoders, ours and stock, in float32."""

    def __init__(self, name: str) -> None:
        import diffusers  # seconds, which most tests here need not wait for

        self.folder = MODELS / name
        index = json.loads((self.folder / "model_index.json").read_text())
        self.class_name = index["_class_name"]
        self.stock = getattr(diffusers, self.class_name).from_pretrained(self.folder, dtype=torch.float32)
        self.stock.set_progress_bar_config(disable=True)
        self.encoders = {}
        for part in ("text_encoder", "text_encoder_2"):
            encoder = load_text_encoder(
                self.folder / part,
                "transformers",
                index[part][1],
                self.folder / part.replace("text_encoder", "tokenizer"),
                self._tensors(part),
            )
            self.encoders[part] = KeyedEncoder(f"{name}/{part}", encoder)

    def _tensors(self, part: str) -> dict[str, torch.Tensor]:
        [file] = (self.folder / part).glob("*.safetensors")
        return {name: tensor.float() for name, tensor in load_file(file).items()}

    def pipeline(self, denoiser: str) -> Any:
        from deployments.engines.building.build import build_module
        from deployments.engines.diffusion.pipeline import create_pipeline

        modules = {
            part: build_module("diffusers", None, self.folder / part, self._tensors(part)) for part in (denoiser, "vae")
        }
        return create_pipeline(self.class_name, self.folder, modules)

    def request(self, prompt: str, negative: str | None = None, **changes: Any) -> ConditioningRequest:
        options = {"use_negative": negative is not None, "max_sequence_length": None} | changes
        return ConditioningRequest("demo", prompt, negative, **options)

    async def condition(self, service: CachedEncoders, *arguments: Any, loras: Any = ({}, {}), **changes: Any) -> Any:
        """Return the tensors of a prompt and the whole answer; `loras` are the adapters and their keys."""
        conditioning = await service.condition(Built(self, *loras), self.request(*arguments, **changes), lambda _: True)
        return unpack(conditioning.tensors), conditioning


class Built:
    """A module cache in which one demo model is built, and adapters."""

    def __init__(self, demo: Demo, adapters: Any, keys: Any) -> None:
        manifest = SimpleNamespace(class_name=demo.class_name)
        self._lease = SimpleNamespace(
            manifest=manifest, skeleton=demo.folder, modules=demo.encoders, adapters=adapters, adapter_keys=keys
        )

    @asynccontextmanager
    async def lease(self, model: str, wanted: Any, adapters: Any, **versions: Any) -> AsyncIterator[Any]:
        assert set(adapters) == self._lease.adapters.keys()
        yield self._lease


@pytest.fixture(scope="session")
def flux() -> Demo:
    return Demo("digits-flux")


@pytest.fixture(scope="session")
def sdxl() -> Demo:
    return Demo("digits-sdxl")
