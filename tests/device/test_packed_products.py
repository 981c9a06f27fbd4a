"""Products with packed weights on a device, against the same product on the host in float32."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from deployments.engines.nn.packed_linear import PackedLinear, product_path
from deployments.engines.nn.packed_weights import Arithmetic, packed_weight
from weights.formats.ggml_values import unpack_blocks
from weights.records.dtypes import BLOCK_SIZES

LARGEST_ERROR = {"exact": 1e-5, "fast": 0.012, "deterministic": 0.012}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("arithmetic", get_args(Arithmetic))
def test_products_on_a_device_equal_the_hosts(device: torch.device, kind: str, arithmetic: Arithmetic) -> None:
    elements, block_bytes = BLOCK_SIZES[kind]
    blocks = seeded_rng().integers(0, 256, (96, 512 // elements, block_bytes), dtype=np.uint8)
    for at in {"Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,)):
        blocks[..., at : at + 2] = (
            seeded_rng().uniform(0.001, 0.01, (*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
        )
    packed = torch.from_numpy(blocks.reshape(96, -1))
    x = torch.randn(20, 512)
    expected = x.double() @ unpack_blocks(kind, packed).double().T
    weight = packed_weight("w", kind, packed.to(device))
    linear = PackedLinear(weight, None, arithmetic)
    got = linear(x.to(device)).cpu()
    assert float((got - expected).norm() / expected.norm()) < LARGEST_ERROR[arithmetic]
    if arithmetic == "deterministic" and product_path(weight, arithmetic) == "triton":
        alone = torch.cat([linear(row[None].to(device)).cpu() for row in x])
        assert torch.equal(alone, got)
