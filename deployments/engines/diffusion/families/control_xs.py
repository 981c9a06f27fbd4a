"""ControlNet-XS: a small network beside a UNet, which reads what its blocks say and adds to them, layer by layer.

The UNet runs as it is, and hooks of its layers run the small network's next to them. Source: diffusers 0.42,
`models/controlnets/controlnet_xs.py`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the ingress has no torch
    import torch

    from deployments.engines.diffusion.families.base import ControlRows

CONTROL_XS: Final = "ControlNetXSAdapter"
_LAYERS: Final = 2  # of each down block: the class has no other number
_CHANNELS: Final = 4  # of the latents that it reads
_TIME_POWER: Final = 0.3


def why_unlike_unet(config: Mapping[str, Any], unet_config: Mapping[str, Any]) -> str | None:
    """Return why a ControlNet-XS cannot run beside a UNet, or None."""
    wanted = {
        "block_out_channels": config.get("base_block_out_channels", [320, 640, 1280, 1280]),
        "down_block_types": config.get("down_block_types", [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"]),
        "layers_per_block": _LAYERS,
        "in_channels": _CHANNELS,
    }
    for key, value in wanted.items():
        if (own := unet_config.get(key)) is not None and _plain(own) != _plain(value):
            return f"is for a UNet with {key} {_plain(value)}, and the model has {_plain(own)}"
    return None


def read_hint(net: Any, pixels_B3HW: torch.Tensor) -> torch.Tensor:
    """Return a ControlNet-XS's reading of the first of equal images, expanded to all: the same at every step."""
    pixels = pixels_B3HW[:1]
    if net.config.conditioning_channel_order == "bgr":
        pixels = pixels.flip(1)
    hint: torch.Tensor = net.controlnet_cond_embedding(pixels.to(net.dtype))
    return hint.expand(len(pixels_B3HW), -1, -1, -1)


def changes_times(net: Any) -> bool:
    """Return whether a control changes the embedding of time that the UNet's own layers read."""
    return type(net).__name__ == CONTROL_XS and net.time_embedding is not None


@contextlib.contextmanager
def running_beside(unet: Any, controls: Sequence[ControlRows]) -> Iterator[None]:
    """Let ControlNet-XS run beside the UNet's next forward, within the block and in this thread.

    HAZARD: hooks belong to the layers: what other threads run of them meanwhile is left alone. No hook is left behind
    in any case.
    """
    handles: list[Any] = []
    try:
        for control in controls:
            _Beside(unet, control, handles).attach()
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Beside:
    """One ControlNet-XS in one forward: its own state `h`, and its states that the up blocks add."""

    def __init__(self, unet: Any, control: ControlRows, handles: list[Any]) -> None:
        self._unet, self._control, self._handles = unet, control, handles
        self._net = control.net
        self._here = threading.get_ident()
        self._h: Any = None
        self._times: Any = None
        self._skips: list[Any] = []

    def attach(self) -> None:
        """Put the hooks in."""
        unet, net = self._unet, self._net
        if net.time_embedding is not None:
            self._after(unet.time_embedding, self._mix_times)
        self._after(unet.conv_in, self._begin)
        for block, own in zip(unet.down_blocks, net.down_blocks, strict=True):
            attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
            for place, (resnet, attention) in enumerate(zip(block.resnets, attentions, strict=True)):
                self._before(resnet, lambda args, own=own, place=place: self._run_resnet(own, place, *args[:2]))
                last = resnet if attention is None else attention
                self._after(last, lambda _, x, own=own, place=place: self._end_layer(own, place, x))
            for sampler in block.downsamplers or ():
                self._before(sampler, lambda args, own=own: self._run_sampler(own, args[0]))
                self._after(sampler, lambda _, x, own=own: self._add(own.ctrl_to_base[-1], x))
        self._before(unet.mid_block, lambda args: self._run_middle(*args[:2]))
        self._after(unet.mid_block, lambda _, x: self._add(net.mid_block.ctrl_to_base, x, is_kept=False))
        for block, own in zip(unet.up_blocks, net.up_connections, strict=True):
            for resnet, layer in zip(block.resnets, own.ctrl_to_base, strict=True):
                self._before(resnet, lambda args, layer=layer: (self._add_skip(layer, args[0]), *args[1:]))

    def _before(self, module: Any, run: Any) -> None:
        def hook(_: Any, args: tuple[Any, ...]) -> Any:
            return run(args) if threading.get_ident() == self._here else None

        self._handles.append(module.register_forward_pre_hook(hook))

    def _after(self, module: Any, run: Any) -> None:
        """Let what `run` makes of a module's inputs and output take the output's place."""

        def hook(_: Any, args: tuple[Any, ...], output: Any) -> Any:
            if threading.get_ident() != self._here:
                return None
            if isinstance(output, tuple):
                return run(args, output[0]), *output[1:]
            return run(args, output)

        self._handles.append(module.register_forward_hook(hook))

    def _mix_times(self, args: tuple[Any, ...], times: torch.Tensor) -> torch.Tensor:
        share = self._net.config.time_embedding_mix**_TIME_POWER
        mixed: torch.Tensor = self._net.time_embedding(*args) * share + times * (1 - share)
        return mixed

    def _begin(self, args: tuple[Any, ...], x: torch.Tensor) -> torch.Tensor:
        self._h = self._net.conv_in(args[0]) + self._control.images
        return self._add(self._net.control_to_base_for_conv_in, x)

    def _run_resnet(self, own: Any, place: int, x: torch.Tensor, times: torch.Tensor) -> None:
        self._h = own.resnets[place](self._joined(own.base_to_ctrl[place], x), times)

    def _end_layer(self, own: Any, place: int, x: torch.Tensor) -> torch.Tensor:
        if own.attentions is not None:
            texts = self._control.prompts
            self._h = own.attentions[place](self._h, encoder_hidden_states=texts, return_dict=False)[0]
        return self._add(own.ctrl_to_base[place], x)

    def _run_sampler(self, own: Any, x: torch.Tensor) -> None:
        self._h = own.downsamplers(self._joined(own.base_to_ctrl[-1], x))

    def _run_middle(self, x: torch.Tensor, times: torch.Tensor) -> None:
        own, texts = self._net.mid_block, self._control.prompts
        self._h = own.midblock(self._joined(own.base_to_ctrl, x), times, encoder_hidden_states=texts)

    def _joined(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat([self._h, layer(x)], dim=1)

    def _add(self, layer: Any, x: torch.Tensor, *, is_kept: bool = True) -> torch.Tensor:
        if is_kept:
            self._skips.append(self._h)
        return x + self._control.scaled([layer(self._h)])[0]

    def _add_skip(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Add to what comes from below; the UNet's own state of the same place lies behind it in the channels."""
        import torch

        added = self._control.scaled([layer(self._skips.pop())])[0]
        width = added.shape[1]
        return torch.cat([x[:, :width] + added, x[:, width:]], dim=1)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
