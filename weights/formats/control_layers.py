"""The tensors of a ControlNet as diffusers' class asks for them, told by the denoiser that it was made of.

A ControlNet begins as a copy of a denoiser's first layers, and adds some of its own: where their configs agree, the
denoiser's tensors and a few sizes say all of its names and shapes, without diffusers and torch. Where that does not
say enough, the class itself has to be asked. Sources: diffusers 0.42, `models/controlnets/controlnet.py` and
`controlnet_flux.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from weights.formats.untrusted import is_size

Shapes = Mapping[str, Sequence[int]]
_Named = Iterator[tuple[str, tuple[int, ...]]]
# Keys of a UNet and of its ControlNet that say what their layers are, with their defaults in both classes.
UNET_KEYS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "only_cross_attention": False,
        "block_out_channels": [320, 640, 1280, 1280],
        "layers_per_block": 2,
        "norm_num_groups": 32,
        "cross_attention_dim": 1280,
        "transformer_layers_per_block": 1,
        "encoder_hid_dim": None,
        "encoder_hid_dim_type": None,
        "attention_head_dim": 8,
        "num_attention_heads": None,
        "use_linear_projection": False,
        "class_embed_type": None,
        "addition_embed_type": None,
        "addition_time_embed_dim": None,
        "num_class_embeds": None,
        "resnet_time_scale_shift": "default",
        "projection_class_embeddings_input_dim": None,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "downsample_padding": 1,
        "mid_block_scale_factor": 1,
        "act_fn": "silu",
        "norm_eps": 1e-5,
        "upcast_attention": False,
        "addition_embed_type_num_heads": 64,
    }
)
# Keys of a UNet alone, with the values beside which its first layers are those of a ControlNet.
UNET_ALONE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "dual_cross_attention": False,
        "resnet_skip_time_act": False,
        "time_embedding_type": "positional",
        "time_embedding_dim": None,
        "time_embedding_act_fn": None,
        "timestep_post_act": None,
        "time_cond_proj_dim": None,
        "conv_in_kernel": 3,
        "attention_type": "default",
        "class_embeddings_concat": False,
        "mid_block_only_cross_attention": None,
        "cross_attention_norm": None,
    }
)
FLUX_KEYS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "in_channels": 64,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
    }
)
_WITHOUT: Final = ("encoder_hid_dim", "encoder_hid_dim_type", "class_embed_type", "num_class_embeds")
_EMBEDDED: Final = (None, "text_time")
_OF_UNET: Final = ("time_embedding.", "add_embedding.", "down_blocks.", "mid_block.")
_OF_FLUX: Final = (
    *("x_embedder.", "context_embedder.", "time_text_embed.timestep_embedder.", "time_text_embed.text_embedder."),
)
_ENDS: Final = {
    "transformer_blocks": "controlnet_blocks",
    "single_transformer_blocks": "controlnet_single_blocks",
}
_HINTS: Final = (16, 32, 96, 256)  # channels of the layers that read the image, unless a config has them
_FLUX_HINTS: Final = (16, 16, 16, 16)
_TIME_WIDTH: Final = 256


def is_as_made(
    class_name: str, config: Mapping[str, Any], shapes: Shapes, base_config: Mapping[str, Any], base_shapes: Shapes
) -> bool:
    """Return whether a ControlNet's tensors are all that its class asks for by that config, and no others.

    False may also mean that its base, a denoiser of that config and those tensors, does not say it.
    """
    if (tell := _TOLD.get(class_name)) is None:
        return False
    expected = dict[str, tuple[int, ...]]()
    for name, shape in tell(config, base_config, base_shapes):
        if tuple(shapes.get(name, ())) != shape:  # ends at the first difference: sizes may be any numbers
            return False
        expected[name] = shape
    return bool(expected) and expected.keys() == shapes.keys()


def _of_unet(config: Mapping[str, Any], base_config: Mapping[str, Any], base_shapes: Shapes) -> _Named:
    """Yield the tensors of a ControlNetModel; none where the base does not say them."""
    own = {key: _plain(config.get(key, default)) for key, default in UNET_KEYS.items()}
    if own != {key: _plain(base_config.get(key, default)) for key, default in UNET_KEYS.items()}:
        return
    if any(_plain(base_config.get(key, value)) != value for key, value in UNET_ALONE.items()):
        return
    widths, layers = own["block_out_channels"], own["layers_per_block"]
    hints = _plain(config.get("conditioning_embedding_out_channels", _HINTS))
    inputs, read = config.get("in_channels", 4), config.get("conditioning_channels", 3)
    if not (_are_sizes(widths) and _are_sizes(hints) and _are_sizes([layers, inputs, read])):
        return
    is_usual = own["mid_block_type"] == UNET_KEYS["mid_block_type"] and own["addition_embed_type"] in _EMBEDDED
    if not is_usual or any(own[key] is not None for key in _WITHOUT):
        return
    yield from _layer("conv_in", widths[0], inputs, 3, 3)
    yield from _reader("controlnet_cond_embedding", hints, read, widths[0])
    yield from ((name, tuple(shape)) for name, shape in base_shapes.items() if name.startswith(_OF_UNET))
    yield from _layer("controlnet_down_blocks.0", widths[0], widths[0], 1, 1)
    number = 1
    for place, width in enumerate(widths):
        for _ in range(layers + (place < len(widths) - 1)):
            yield from _layer(f"controlnet_down_blocks.{number}", width, width, 1, 1)
            number += 1
    yield from _layer("controlnet_mid_block", widths[-1], widths[-1], 1, 1)


def _of_flux(config: Mapping[str, Any], base_config: Mapping[str, Any], base_shapes: Shapes) -> _Named:
    """Yield the tensors of a FluxControlNetModel; none where the base does not say them."""
    own = {key: config.get(key, default) for key, default in FLUX_KEYS.items()}
    if own != {key: base_config.get(key, default) for key, default in FLUX_KEYS.items()}:
        return
    counts = {
        "transformer_blocks": config.get("num_layers", 19),
        "single_transformer_blocks": config.get("num_single_layers", 38),
    }
    modes, hint = config.get("num_mode"), config.get("conditioning_embedding_channels")
    sizes = [own[key] for key in ("in_channels", "attention_head_dim", "num_attention_heads")]
    if not all(map(is_size, counts.values())) or not _are_sizes(
        [*sizes, *(one for one in (modes, hint) if one is not None)]
    ):
        return
    blocks = {kind: _under(f"{kind}.0.", base_shapes) for kind in counts}
    if any(count and not blocks[kind] for kind, count in counts.items()):
        return
    width = own["attention_head_dim"] * own["num_attention_heads"]
    yield from ((name, tuple(shape)) for name, shape in base_shapes.items() if name.startswith(_OF_FLUX))
    if config.get("guidance_embeds"):
        yield from _layer("time_text_embed.guidance_embedder.linear_1", width, _TIME_WIDTH)
        yield from _layer("time_text_embed.guidance_embedder.linear_2", width, width)
    for kind, count in counts.items():
        for number in range(count):
            yield from _layer(f"{_ENDS[kind]}.{number}", width, width)
            yield from ((f"{kind}.{number}.{name}", tuple(shape)) for name, shape in blocks[kind].items())
    if modes is not None:
        yield "controlnet_mode_embedder.weight", (modes, width)
    if hint is not None:
        yield from _reader("input_hint_block", _FLUX_HINTS, 3, hint)
    yield from _layer("controlnet_x_embedder", width, own["in_channels"])


def _under(prefix: str, shapes: Shapes) -> dict[str, Sequence[int]]:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _reader(name: str, hints: Sequence[int], inputs: int, outputs: int) -> _Named:
    """Yield the convolutions that read a ControlNet's image."""
    yield from _layer(f"{name}.conv_in", hints[0], inputs, 3, 3)
    for place, (width, wider) in enumerate(pairwise(hints)):
        yield from _layer(f"{name}.blocks.{2 * place}", width, width, 3, 3)
        yield from _layer(f"{name}.blocks.{2 * place + 1}", wider, width, 3, 3)
    yield from _layer(f"{name}.conv_out", outputs, hints[-1], 3, 3)


def _layer(name: str, *shape: int) -> _Named:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(is_size(one) and one > 0 for one in values)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_TOLD: Final = {"ControlNetModel": _of_unet, "FluxControlNetModel": _of_flux}
