"""The replicas that build the components of a pipeline."""

from __future__ import annotations

import pytest

from deployments.modules.encoders import is_text_encoder
from deployments.modules.loading import is_denoise_component
from weights.records.manifest import Component


def component(name: str, library: str) -> Component:
    return Component.model_construct(name=name, library=library)


@pytest.mark.parametrize(
    ("name", "library", "denoises", "encodes"),
    [
        ("unet", "diffusers", True, False),
        ("vae", "diffusers", True, False),
        ("text_encoder", "transformers", False, True),
        ("model", "transformers", True, True),  # an LLM, or a text encoder that is served on its own
        ("safety_checker", "stable_diffusion", False, False),
    ],
)
def test_components_are_told_apart_by_their_library(name: str, library: str, denoises: bool, encodes: bool) -> None:
    assert is_denoise_component(component(name, library)) is denoises
    assert is_text_encoder(component(name, library)) is encodes
