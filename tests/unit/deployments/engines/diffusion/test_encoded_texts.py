"""The outputs of text encoders that a family asks for."""

from __future__ import annotations

import pytest
import torch

from deployments.engines.diffusion.families.texts import output_of
from deployments.engines.records.protocol import EngineError


def test_an_output_that_is_not_there_is_told_with_those_that_are() -> None:
    pooled = torch.ones(3)
    encodings = {"text_encoder": {"pooled": pooled}}
    assert output_of("prompt", encodings, "text_encoder", "pooled") is pooled
    with pytest.raises(EngineError, match=r"^the prompt has no 'hidden' of 'text_encoder' \(given: pooled\)$"):
        output_of("prompt", encodings, "text_encoder", "hidden")
    with pytest.raises(EngineError, match=r"^the prompt has no 'hidden' of 'text_encoder_2' \(given: nothing\)$"):
        output_of("prompt", encodings, "text_encoder_2", "hidden")
