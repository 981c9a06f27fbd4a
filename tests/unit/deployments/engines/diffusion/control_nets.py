"""Tiny networks that control a denoiser, of diffusers' classes, whose residuals matter: stock's begin at zero."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from diffusers import ControlNetModel, ControlNetUnionModel, ControlNetXSAdapter, FluxControlNetModel, T2IAdapter

FLUX_KEYS = (
    *("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim"),
    "axes_dims_rope",
)


def stirred(net: torch.nn.Module, seed: int) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return net.eval()


def controlnet(denoiser: Any, seed: int = 1, **more: Any) -> Any:
    torch.manual_seed(seed)
    # Stock makes the image's embedding by the pixels of a latent: here 2, which takes one halving.
    return stirred(ControlNetModel.from_unet(denoiser, **{"conditioning_embedding_out_channels": (4, 8), **more}), seed)


def union(denoiser: Any, seed: int = 1, num_modes: int = 3) -> Any:
    torch.manual_seed(seed)
    keys = set(inspect.signature(ControlNetUnionModel.__init__).parameters)
    config = {key: value for key, value in dict(denoiser.config).items() if key in keys}
    width = denoiser.config.block_out_channels[0]
    sizes = {"num_trans_channel": width, "num_trans_head": 8, "num_proj_channel": width}
    net = ControlNetUnionModel(
        **config, **sizes, num_control_type=num_modes, conditioning_embedding_out_channels=(4, 8)
    )
    return stirred(net, seed)


def control_xs(denoiser: Any, seed: int = 1, **more: Any) -> Any:
    torch.manual_seed(seed)
    options = {"size_ratio": 0.5, "conditioning_embedding_out_channels": (4, 8), **more}
    return stirred(ControlNetXSAdapter.from_unet(denoiser, **options), seed)


def flux_union(denoiser: Any, seed: int = 1, num_modes: int = 3, **more: Any) -> Any:
    torch.manual_seed(seed)
    options = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True, **more}
    own = {key: denoiser.config[key] for key in FLUX_KEYS}
    return stirred(FluxControlNetModel(**own, **options, num_mode=num_modes or None), seed)


def t2i_adapter(kind: str, channels: tuple[int, ...], seed: int = 1, **more: Any) -> Any:
    """Return an adapter for latents with a side of two pixels."""
    torch.manual_seed(seed)
    options = {"downscale_factor": 4 if kind == "full_adapter_xl" else 2, "num_res_blocks": 2, **more}
    net = T2IAdapter(channels=list(channels), adapter_type=kind, **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    return net.eval()
