"""Adapters are charged for their files, and for what applying them takes beside these."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from configs.cluster import WorkerConfig
from deployments.modules.loading import ComponentBuilder
from weights.records.manifest import Component, TensorRef

LAYER = "lora_unet_double_blocks_0_img_attn_proj"


def component(**shapes: tuple[int, ...]) -> Component:
    tensors = {
        f"{LAYER}.{name.replace('__', '.')}": TensorRef(
            extent="0" * 64, offset=0, nbytes=4 * math.prod(shape), dtype="F32", shape=shape, sha256=f"{place:064}"
        )
        for place, (name, shape) in enumerate(shapes.items())
    }
    return Component(name="model", library="peft", class_name=None, folder="model", tensors=tensors)


@pytest.mark.parametrize(
    ("shapes", "elements"),
    [
        ({"lora_down__weight": (4, 96), "lora_up__weight": (64, 4), "alpha": ()}, 0),
        # Of rank 2 * 2: both matrices are made.
        ({"hada_w1_a": (64, 2), "hada_w1_b": (2, 96), "hada_w2_a": (64, 2), "hada_w2_b": (2, 96)}, 4 * (64 + 96)),
        # 8 * 12 times 8 * 8, of rank 8 * 8.
        ({"lokr_w1": (8, 12), "lokr_w2": (8, 8)}, 64 * (64 + 96)),
        # The difference itself, and a matrix of ones beside it.
        ({"diff": (64, 96)}, 64 * 64),
        # The turns that the blocks mean.
        ({"oft_blocks": (8, 8, 8)}, 8 * 8 * 8),
        ({"oft_R__weight": (8, 28)}, 8 * 8 * 8),
        ({"a1__weight": (96, 4), "a2__weight": (4, 96), "b1__weight": (64, 4), "b2__weight": (4, 96)}, 0),
    ],
)
def test_what_an_adapter_makes_is_counted(shapes: dict[str, tuple[int, ...]], elements: int) -> None:
    assert ComponentBuilder(WorkerConfig()).working_memory(component(**shapes), Path()) == 4 * elements
