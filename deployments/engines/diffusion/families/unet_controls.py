"""Controls of a UNet other than plain ControlNets: unions of them, and T2I-Adapters.

A union reads images of several kinds, of which a request says one (its mode). A T2I-Adapter is no copy of the UNet: a
few convolutions make features of an image, which are added within the UNet's blocks. Sources: diffusers 0.42,
`models/controlnets/controlnet_union.py`, `models/adapter.py` and `models/unets/unet_2d_condition.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from deployments.engines.records.protocol import EngineError

if TYPE_CHECKING:  # the ingress has no torch
    import torch

    from deployments.engines.diffusion.families.base import ControlRows

CONTROL_UNION: Final = "ControlNetUnionModel"
T2I_ADAPTER: Final = "T2IAdapter"
_FULL_XL: Final = "full_adapter_xl"
_LUMA: Final = (19595, 38470, 7471)  # of red, green and blue, of 2^16: PIL's


def run_controlnet(control: ControlRows, *inputs: Any, **texts: Any) -> Any:
    """Return the residuals of a ControlNet, or of a union: for the down blocks, and for the middle."""
    import torch

    from deployments.engines.nn.forwards import replaced_forwards

    net, modes_B = control.net, control.modes
    if modes_B is None:
        return net(*inputs, controlnet_cond=control.images, **texts)
    known = torch.arange(net.config.num_control_type, device=modes_B.device)
    kinds = (modes_B[:, None] == known).to(control.images.dtype)  # one_hot would read the numbers
    layers = {layer: partial(_by_row, layer) for layer in net.transformer_layes}
    with replaced_forwards(layers):
        return net(*inputs, controlnet_cond=[control.images], control_type=kinds, control_type_idx=[modes_B], **texts)


def _by_row(layer: Any, x_BTC: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a union's layer, each row alone. Its attention goes over the batch, which here has rows of
    other requests. In a batch of stock's all rows have one image, and then both are the same.
    """
    import torch

    rows = (x_BTC[place : place + 1] for place in range(len(x_BTC)))
    return torch.cat([type(layer).forward(layer, row) for row in rows])


def adapter_features(adapter: Any, pixels_B3HW: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a T2I-Adapter's features of the first of equal images, expanded to all. Raises EngineError."""
    height, width = pixels_B3HW.shape[-2:]
    multiple = adapter.config.downscale_factor
    if height % multiple or width % multiple:
        raise EngineError(f"control: a T2I-Adapter reads sides of a multiple of {multiple}, got {width}x{height}")
    pixels = pixels_B3HW[:1]
    if adapter.config.in_channels == 1:
        pixels = _gray(pixels)
    return tuple(one.expand(len(pixels_B3HW), -1, -1, -1) for one in adapter(pixels.to(adapter.dtype)))


def _gray(pixels_13HW: torch.Tensor) -> torch.Tensor:
    """Return the brightness of pixels from 0 to 1, rounded as PIL does it."""
    numbers = (pixels_13HW * 255).round().int()
    red, green, blue = (factor * numbers[:, place : place + 1] for place, factor in enumerate(_LUMA))
    return ((red + green + blue + 2**15) >> 16).float() / 255


def why_unlike_adapter(config: Mapping[str, Any], unet_config: Mapping[str, Any], pixels_per_latent: int) -> str | None:
    """Return why a T2I-Adapter's features cannot be added within a UNet's blocks, or None."""
    if config.get("in_channels", 3) not in (1, 3):
        return f"reads images of {config['in_channels']} channels; expected 1 or 3"
    made, taken = _features_of_adapter(config), _features_of_unet(unet_config, pixels_per_latent)
    if len(made) in (len(taken), len(taken) - 1) and made == taken[: len(made)]:
        return None
    return f"makes features of {_listed_features(made)}, and the model takes {_listed_features(taken)}"


def _features_of_adapter(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return channels of an adapter's features, and the pixels on a side of one of their elements."""
    channels, pixels = list(config.get("channels", (320, 640, 1280, 1280))), config.get("downscale_factor", 8)
    if config.get("adapter_type") == _FULL_XL:
        return [(count, pixels * (2 if place > 1 else 1)) for place, count in enumerate(channels)]
    if config.get("adapter_type") == "light_adapter":
        channels.append(channels[-1])
    return [(count, pixels << place) for place, count in enumerate(channels)]


def _features_of_unet(unet_config: Mapping[str, Any], pixels_per_latent: int) -> list[tuple[int, int]]:
    """Return the same for the places where a UNet adds features: each down block, and the middle."""
    widths, kinds = unet_config.get("block_out_channels", ()), unet_config.get("down_block_types", ())
    found, pixels = list[tuple[int, int]](), pixels_per_latent
    for place, (count, kind) in enumerate(zip(widths, kinds, strict=False)):
        halved = pixels * (2 if place < len(widths) - 1 else 1)
        found.append((count, pixels if "CrossAttn" in str(kind) else halved))  # others add the features after their end
        pixels = halved
    return [*found, *((count, pixels) for count in widths[-1:])]


def _listed_features(features: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{count} channels per {pixels} pixels" for count, pixels in features)
