"""Rotary frequencies from a transformers config."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deployments.engines.nn.rotary import Rotary
from deployments.engines.protocol import EngineError

# The kinds whose frequencies do not depend on the length of the sequence.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def create_rotary(config: PretrainedConfig, head_dim: int, device: torch.device) -> Rotary:
    """The rotary of `config`, with its frequencies on `device`.

    Raises:
        EngineError: the kind of scaling is not one of `SUPPORTED_ROPE_TYPES`, or it turns only a part of the
        head.
    """
    parameters = config.rope_parameters
    rope_type = parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        known = ", ".join(SUPPORTED_ROPE_TYPES)
        raise EngineError(f"rope type {rope_type!r} is not supported; supported are {known}")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        frequencies, magnitude = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope_type](config)
    if 2 * len(frequencies) != head_dim or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError(f"rope must turn the whole head ({head_dim} dimensions), got {parameters}")
    return Rotary(frequencies.to(device), magnitude)
