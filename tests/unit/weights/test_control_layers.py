"""A base says of its ControlNet's tensors just what diffusers' class asks for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, FluxControlNetModel, FluxTransformer2DModel, UNet2DConditionModel
from kit.seeding import seeded_random

from deployments.engines.building.build import check_module
from deployments.engines.records.protocol import EngineError
from weights.formats.control_layers import FLUX_KEYS, UNET_ALONE, UNET_KEYS, is_as_made

pytestmark = pytest.mark.slow  # imports diffusers

SDXL: Mapping[str, Any] = {
    "cross_attention_dim": 64,
    "attention_head_dim": (1, 2, 4),
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 2, 3),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
    "use_linear_projection": True,
}
UNETS: Mapping[str, Mapping[str, Any]] = {
    "sd": {"cross_attention_dim": 48},
    "inpainting": {"cross_attention_dim": 48, "in_channels": 9},
    "sdxl": {**SDXL, "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")},
}
# What other UNets have, whose ControlNets diffusers cannot make, or whose layers only the class can tell.
ODD: Mapping[str, Mapping[str, Any]] = {
    "wide times": {"time_embedding_dim": 64},
    "other times": {"time_embedding_type": "fourier"},
    "guided": {"time_cond_proj_dim": 16},
    "wide kernel": {"conv_in_kernel": 5},
    "gated": {"attention_type": "gated"},
    "plain middle": {"mid_block_type": "UNetMidBlock2D"},
    "classes": {"num_class_embeds": 5},
    "projected text": {"encoder_hid_dim": 24, "encoder_hid_dim_type": "text_proj"},
}
FLUX: Mapping[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 1,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 28,
    "axes_dims_rope": (4, 4, 4),
}
# What may differ between a UNet and its ControlNet, or changes none of the layers that they share.
HARMLESS = {
    *("sample_size", "in_channels", "out_channels", "center_input_sample", "up_block_types", "dropout"),
    *("reverse_transformer_layers_per_block", "resnet_out_scale_factor", "conv_out_kernel"),
}


def on_meta(make: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return make(**options)


def shapes_of(module: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in module.state_dict().items()}


NAMES = (
    *(f"{name}{kind}" for name in UNETS for kind in ("", ", small reader")),
    *("flux", "flux, deeper than its base", "flux union", "flux of pixels"),
)


@functools.cache
def pairs() -> dict[str, tuple[Any, Any]]:
    """Return nets of several kinds with the denoisers that they were made of."""
    found = {}
    for name, config in UNETS.items():
        unet = on_meta(UNet2DConditionModel, **config)
        keys = inspect.signature(ControlNetModel.__init__).parameters
        own = {key: value for key, value in config.items() if key in keys and key != "in_channels"}
        found[name] = on_meta(ControlNetModel, **own, conditioning_channels=1), unet
        found[f"{name}, small reader"] = (
            on_meta(ControlNetModel, **own, conditioning_embedding_out_channels=(4, 8)),
            unet,
        )
    flux = on_meta(FluxTransformer2DModel, **FLUX, guidance_embeds=True)
    more: dict[str, dict[str, Any]] = {
        "flux": {},
        "flux, deeper than its base": {"num_layers": 3, "num_single_layers": 0},
        "flux union": {"num_mode": 4, "guidance_embeds": True},
        "flux of pixels": {"conditioning_embedding_channels": 16},
    }
    for name, options in more.items():
        found[name] = on_meta(FluxControlNetModel, **{**FLUX, **options}), flux
    return found


def told(net: Any, base: Any, config: Mapping[str, Any] | None = None, shapes: Any = None) -> bool:
    return is_as_made(
        type(net).__name__, dict(net.config) if config is None else config, shapes or shapes_of(net), base.config,
        shapes_of(base),
    )  # fmt: skip


def is_accepted(net: Any, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: Any) -> bool:
    try:
        check_module("diffusers", type(net).__name__, config, shapes, where)
    except EngineError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_class_asks_for_is_told_by_the_base(name: str) -> None:
    net, base = pairs()[name]
    assert told(net, base)


@pytest.mark.parametrize("name", NAMES)
def test_other_tensors_are_not_what_a_class_asks_for(name: str) -> None:
    net, base = pairs()[name]
    shapes, draw = shapes_of(net), seeded_random()
    for key in draw.sample(sorted(shapes), 5):
        assert not told(net, base, shapes={other: one for other, one in shapes.items() if other != key})
        assert not told(net, base, shapes=shapes | {key: (*shapes[key], 1)})
        assert not told(net, base, shapes=shapes | {f"{key}.more": (1,)})


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_told_by_another_config_is_accepted_by_the_class(name: str, tmp_path: Any) -> None:
    """A config may lack a key, or say something else, also what is no config at all."""
    net, base = pairs()[name]
    shapes, config = shapes_of(net), {key: one for key, one in net.config.items() if not key.startswith("_")}
    values: tuple[Any, ...] = (None, 0, -1, 3, 2**70, "text", [], [32, 64], {}, True, 1.5)
    draw = seeded_random()
    for key in config:
        lacking = {other: one for other, one in config.items() if other != key}
        for changed in (lacking, *(config | {key: value} for value in draw.sample(values, 2))):
            if told(net, base, changed) and changed != config:
                assert is_accepted(net, changed, shapes, tmp_path), (key, changed.get(key))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", list(ODD))
def test_of_other_unets_nothing_is_told(name: str) -> None:
    config = {**UNETS["sd"], **ODD[name]}
    unet, net = on_meta(UNet2DConditionModel, **config), on_meta(ControlNetModel, **UNETS["sd"])
    keys = inspect.signature(ControlNetModel.__init__).parameters
    own = dict(net.config) | {key: value for key, value in config.items() if key in keys}
    assert not told(net, unet)
    assert not told(net, unet, own)


def test_all_keys_of_the_classes_are_known() -> None:
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (ControlNetModel, UNet2DConditionModel))
    assert theirs.keys() - {"self"} == UNET_KEYS.keys() | UNET_ALONE.keys() | HARMLESS
    assert UNET_KEYS.keys() <= ours.keys()

    def plain(parameters: Mapping[str, inspect.Parameter], keys: Any) -> dict[str, Any]:
        values = {key: parameters[key].default for key in keys}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    assert plain(ours, UNET_KEYS) == plain(theirs, UNET_KEYS) == dict(UNET_KEYS)
    assert plain(theirs, UNET_ALONE) == dict(UNET_ALONE)
    for cls in (FluxControlNetModel, FluxTransformer2DModel):
        assert plain(inspect.signature(cls.__init__).parameters, FLUX_KEYS) == dict(FLUX_KEYS)
