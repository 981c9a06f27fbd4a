"""IP-Adapters: images as prompts, which every cross-attention of a UNet reads beside its text, a block of Flux, or an
attention of Stable Diffusion 3.

Such a layer adds an attention of its own queries over the image's tokens, before its last product; in Flux it goes to
the image's part of a block's output, with the queries from before their rotation by position. Keys and values do not
change from step to step, so they are made when a request begins; a layer's queries are captured where it makes them,
by hooks. An adapter of Stable Diffusion 3 reads the time as well, and makes keys and values at each step; its attention
goes over the image's own keys and values, too. Rows of a batch without an image do not change. Sources: "IP-Adapter"
(arXiv 2308.06721), and diffusers 0.42, `models/attention_processor.py:IPAdapterAttnProcessor2_0` and
`SD3IPAdapterJointAttnProcessor2_0`, `models/embeddings.py`, `loaders/transformer_sd3.py` and
`models/transformers/transformer_flux.py:FluxIPAdapterAttnProcessor`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.families.prompted import ImagePrompt, PromptedLayer, PromptedSpan
from deployments.engines.libraries.config_files import read_config
from deployments.engines.records.protocol import DiffusionRequest, EngineError, ImagePromptUse
from weights.formats.ip_adapter import (
    ENCODER,
    HEAD_WIDTH,
    Denoiser,
    IpAdapterForm,
    check_encoder,
    count_tokens,
    image_encoder_class,
    read_ip_adapter,
    why_unlike,
)
from weights.records.errors import AdapterError

_LEAVES: Final = ("weight", "bias")
_JOINT: Final = "JointAttnProcessor2_0"  # of the attentions of Stable Diffusion 3
_EPSILON: Final = 1e-6  # of the norms of Stable Diffusion 3's


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ImagePrompter:
    """An IP-Adapter: the encoder of its images, and its own tensors by name. `processor` is that of transformers."""

    form: IpAdapterForm
    encoder: Any
    processor: Any
    tensors: Mapping[str, torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that it makes of an image."""
        return count_tokens(
            {name: one.shape for name, one in (*self.tensors.items(), *self.encoder.named_parameters())}
        )

    def tokens_of(self, image: npt.NDArray[np.uint8], *, with_negative: bool) -> list[torch.Tensor]:
        """Return the tokens of an image, (1, T, D), after those of no image if they are wanted.

        No image is a vector of zeros for a plain adapter, the encoding of a black image for that of Flux, and for
        others the encoding of pixels that are 0 after normalization. For Stable Diffusion 3 they are the encoder's,
        which `timed_tokens` reads, and zeros.
        """
        from PIL import Image  # needed only for images as prompts

        like = next(self.encoder.parameters())

        def read(one: npt.NDArray[np.uint8]) -> torch.Tensor:
            pixels = self.processor(images=Image.fromarray(one), return_tensors="pt").pixel_values
            read_13HW: torch.Tensor = pixels.to(like.device, like.dtype)
            return read_13HW

        pixels_13HW = read(image)
        with torch.no_grad():
            if self.form.kind == "flux":
                both = ([read(np.zeros_like(image))] if with_negative else []) + [pixels_13HW]
                return [self._project(self.encoder(one).image_embeds) for one in both]
            if self.form.kind == "sd3":
                hidden = self.encoder(pixels_13HW, output_hidden_states=True).hidden_states[-2]
                return ([torch.zeros_like(hidden)] if with_negative else []) + [hidden]
            if self.form.kind == "plain":
                vector = self.encoder(pixels_13HW).image_embeds
                return [self._project(one) for one in ([torch.zeros_like(vector)] if with_negative else []) + [vector]]
            inputs = [torch.zeros_like(pixels_13HW)] if with_negative else []
            project = self._project_each if self.form.kind == "full" else self._resample
            return [
                project(self.encoder(one, output_hidden_states=True).hidden_states[-2])
                for one in (*inputs, pixels_13HW)
            ]

    def _project(self, vector_1E: torch.Tensor) -> torch.Tensor:
        tokens = self._linear("proj", vector_1E).reshape(1, -1, self.form.text_width)
        return self._norm("norm", tokens)

    def _project_each(self, hidden_1LE: torch.Tensor) -> torch.Tensor:
        return self._norm("proj.3", self._linear("proj.2", F.gelu(self._linear("proj.0", hidden_1LE))))

    def _resample(self, hidden_1LE: torch.Tensor) -> torch.Tensor:
        """Return the learned latents after they attend to the image's tokens in a few layers."""
        read = self._linear("proj_in", hidden_1LE)
        latents = self.tensors["image_proj.latents"]
        for number in range(self.form.num_resampled):
            own = self._norm(f"layers.{number}.0.norm2", latents)
            latents = latents + self._attended(f"layers.{number}", self._norm(f"layers.{number}.0.norm1", read), own)
            wide = F.gelu(self._linear(f"layers.{number}.1.1", self._norm(f"layers.{number}.1.0", latents)))
            latents = latents + self._linear(f"layers.{number}.1.3", wide)
        return self._norm("norm_out", self._linear("proj_out", latents))

    def timed_tokens(self, hidden_1LE: torch.Tensor, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of an encoded image at a time, (1, T, D), and the time's embedding (1, C)."""
        from diffusers.models.embeddings import get_timestep_embedding

        width = self.tensors["image_proj.time_embedding.linear_1.weight"].shape[1]
        times = get_timestep_embedding(timestep.reshape(1), width, flip_sin_to_cos=True, downscale_freq_shift=0)
        time_1C = self._linear("time_embedding.linear_1", times.to(hidden_1LE.dtype))
        time_1C = self._linear("time_embedding.linear_2", F.silu(time_1C))
        read = self._linear("proj_in", hidden_1LE) + time_1C[:, None]
        latents = self.tensors["image_proj.latents"]
        for number in range(self.form.num_resampled):
            layer = f"layers.{number}"
            shift, scale, wide_shift, wide_scale = (
                one[:, None] for one in self._linear(f"{layer}.2.1", F.silu(time_1C)).chunk(4, dim=1)
            )
            own = self._norm(f"{layer}.0.norm2", latents) * (1 + scale) + shift
            latents = latents + self._attended(layer, self._norm(f"{layer}.0.norm1", read), own)
            wide = self._norm(f"{layer}.1.0", latents) * (1 + wide_scale) + wide_shift
            latents = latents + self._linear(f"{layer}.1.3", F.gelu(self._linear(f"{layer}.1.1", wide)))
        return self._norm("norm_out", self._linear("proj_out", latents)), time_1C

    def _attended(self, layer: str, read: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the attention of a resampler's latents over an image's tokens and each other."""
        query = _heads(self._linear(f"{layer}.0.to_q", own), HEAD_WIDTH)
        key, value = self._linear(f"{layer}.0.to_kv", torch.cat([read, own], dim=-2)).chunk(2, dim=-1)
        found = F.scaled_dot_product_attention(query, _heads(key, HEAD_WIDTH), _heads(value, HEAD_WIDTH))
        return self._linear(f"{layer}.0.to_out", found.transpose(1, 2).flatten(2))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors[f"image_proj.{name}.weight"], self.tensors.get(f"image_proj.{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.tensors[f"image_proj.{name}.{half}"] for half in ("weight", "bias"))
        return F.layer_norm(x, weight.shape, weight, bias)


def build_image_prompter(folder: Path, tensors: Mapping[str, torch.Tensor]) -> ImagePrompter:
    """Build an IP-Adapter around its tensors; `folder` has the config.json of its encoder. Raises EngineError."""
    from transformers import CLIPImageProcessor, SiglipImageProcessor

    prefix = f"{ENCODER}."
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    encoded = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    try:
        form = read_ip_adapter(folder, {name: tuple(tensor.shape) for name, tensor in own.items()})
        check_encoder(folder, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    except AdapterError as error:
        raise EngineError(str(error)) from None
    encoder = build_module("transformers", image_encoder_class(form.kind), folder, encoded)
    side = read_config(folder / "config.json").get("image_size", 224)
    if form.kind == "sd3":
        return ImagePrompter(form, encoder, SiglipImageProcessor(size={"height": side, "width": side}), own)
    return ImagePrompter(form, encoder, CLIPImageProcessor(size=side, crop_size=side), own)


def make_image_prompts(
    request: DiffusionRequest, known: Mapping[str, object], family: Family, denoiser: Any, num_branches: int
) -> tuple[ImagePrompt, ...]:
    """Return the IP-Adapters of a request, in its order. `known` has them by name.

    Raises EngineError for an unknown one or one that does not fit the denoiser.
    """
    if request.image_prompts and not family.adapters.takes_image_prompts:
        raise EngineError(f"ip_adapter: no IP-Adapters are served with {family.class_name}")
    return read_images(request.image_prompts, known, denoiser, with_negative=num_branches > 1)


def read_images(
    uses: Sequence[ImagePromptUse], known: Mapping[str, object], denoiser: Any, *, with_negative: bool
) -> tuple[ImagePrompt, ...]:
    """Return IP-Adapters at work, with the branch of no image in front where it is wanted. `known` has them by name.

    Raises EngineError for one that is not there or does not fit the denoiser.
    """
    prompts: list[ImagePrompt] = []
    for use in uses:
        prompter = known.get(use.name)
        if not isinstance(prompter, ImagePrompter):
            names = ", ".join(sorted(name for name, thing in known.items() if isinstance(thing, ImagePrompter)))
            raise EngineError(f"ip_adapter: {use.name!r} is no known IP-Adapter (known: {names or 'none'})")
        layers = _prompted_layers(denoiser)
        _check_fit(use.name, prompter, layers, denoiser)
        tokens = prompter.tokens_of(use.image, with_negative=with_negative)
        if prompter.form.kind == "sd3":
            prompts.append(_TimedPrompt(use.name, (), use.scale, prompter, layers, tokens, denoiser.dtype))
            continue
        branches = tuple(tuple(_layers(prompter, layers, one, denoiser.dtype)) for one in tokens)
        prompts.append(ImagePrompt(use.name, branches, use.scale))
    return tuple(prompts)


def blank_image_prompt(name: str, num_tokens: int, denoiser: Any, device: torch.device) -> ImagePrompt:
    """Return an IP-Adapter at work in a request of one branch, with keys and values of no meaning."""
    layers = []
    for layer in _prompted_layers(denoiser):
        attention = _attention_of(layer)
        made = torch.empty(1, num_tokens, attention.inner_dim, dtype=denoiser.dtype, device=device)
        half = _heads(made, attention.inner_dim // attention.heads)
        norms = (made.new_empty(half.shape[-1]),) * 2 if _is_joint(layer) else ()
        layers.append(PromptedLayer(layer, half, half, norms))
    return ImagePrompt(name, (tuple(layers),), 1.0)


@contextmanager
def prompted_by_images(spans: Sequence[PromptedSpan]) -> Iterator[None]:
    """Within the block, add to the outputs of cross-attentions, for each span of the batch its own images.

    HAZARD: hooks belong to the layers: what other threads run of them meanwhile is left alone. No hook is left behind
    in any case.
    """
    by_layer: dict[nn.Module, list[_Added]] = {}
    for span in spans:
        for layers, scale in span.uses:
            for layer in layers if scale else ():
                added = _Added(span.start, span.stop, layer.key, layer.value, scale, layer.norms)
                by_layer.setdefault(layer.module, []).append(added)
    handles: list[Any] = []
    try:
        for module, added_here in by_layer.items():
            hook = _hooked_block if _is_block(module) else _hooked_joint if _is_joint(module) else _hooked
            handles += hook(module, added_here)
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Added(NamedTuple):
    """Keys and values for some rows, and the strength of their addition."""

    start: int
    stop: int
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    norms: tuple[torch.Tensor, ...]


def _hooked(attention: Any, added: Sequence[_Added]) -> list[Any]:
    """Let an attention keep its queries, and add to what goes into its last product."""
    kept, here = list[torch.Tensor](), threading.get_ident()

    def keep(_: nn.Module, __: Any, query: torch.Tensor) -> None:
        if threading.get_ident() == here:
            kept[:] = [query]

    def add(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if threading.get_ident() != here:
            return
        (query,), x = kept, args[0]
        for one in added:
            rows = _heads(query[one.start : one.stop], one.key.shape[-1])
            key, value = (half.expand(len(rows), -1, -1, -1) for half in (one.key, one.value))
            found = F.scaled_dot_product_attention(rows, key, value)
            x[one.start : one.stop] += one.scale * found.transpose(1, 2).flatten(2)
        kept.clear()

    return [attention.to_q.register_forward_hook(keep), attention.to_out[0].register_forward_pre_hook(add)]


def _hooked_block(block: Any, added: Sequence[_Added]) -> list[Any]:
    """Hook a block of Flux to keep the queries of its image, and to add to its image's part."""
    kept: list[torch.Tensor] = []

    def keep(_: nn.Module, __: Any, query_BLHD: torch.Tensor) -> None:
        kept[:] = [query_BLHD]

    def add(_: nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        (query_BLHD,), x = kept, output[1]
        for one in added:
            rows = query_BLHD[one.start : one.stop].transpose(1, 2)
            key, value = (half.expand(len(rows), -1, -1, -1) for half in (one.key, one.value))
            found = F.scaled_dot_product_attention(rows, key, value)
            x[one.start : one.stop] += one.scale * found.transpose(1, 2).flatten(2)
        kept.clear()

    return [block.attn.norm_q.register_forward_hook(keep), block.register_forward_hook(add)]


def _hooked_joint(attention: Any, added: Sequence[_Added]) -> list[Any]:
    """Hook an attention of Stable Diffusion 3 to keep what it makes of the image, and to add to its image's part."""
    parts = (attention.to_q, attention.to_k, attention.to_v)
    kept, here = dict[Any, torch.Tensor](), threading.get_ident()

    def keep(layer: nn.Module, _: Any, output_BLD: torch.Tensor) -> None:
        if threading.get_ident() == here:
            kept[layer] = output_BLD

    def add(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if threading.get_ident() != here:
            return
        x = args[0]
        for one in added:
            query, key, value = (_heads(kept[part][one.start : one.stop], one.key.shape[-1]) for part in parts)
            query, key = (_rms(half, norm) for half, norm in zip((query, key), one.norms, strict=True))
            halves = zip((key, value), (one.key, one.value), strict=True)
            keys, values = (torch.cat([half, own.expand(len(query), -1, -1, -1)], dim=2) for half, own in halves)
            found = F.scaled_dot_product_attention(query, keys, values)
            x[one.start : one.stop] += one.scale * found.transpose(1, 2).flatten(2)
        kept.clear()

    handles = [part.register_forward_hook(keep) for part in parts]
    return [*handles, attention.to_out[0].register_forward_pre_hook(add)]


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, _EPSILON)


def _heads(x_BLD: torch.Tensor, width: int) -> torch.Tensor:
    """Return (B, L, D) as (B, heads, L, width)."""
    return x_BLD.view(*x_BLD.shape[:-1], -1, width).transpose(1, 2)


def _is_block(layer: Any) -> bool:
    """Return whether a layer is a block of Flux, and no attention."""
    return not hasattr(layer, "to_q")


def _is_joint(layer: Any) -> bool:
    """Return whether a layer is an attention of Stable Diffusion 3, over image and text or over the image alone."""
    return type(getattr(layer, "processor", None)).__name__ == _JOINT


def _attention_of(layer: Any) -> Any:
    return layer.attn if _is_block(layer) else layer


def _prompted_layers(denoiser: Any) -> list[Any]:
    """Return a Flux's blocks of text and image, or the attentions of a Stable Diffusion 3, or a UNet's to text, in the
    order of its processors, as adapters number them.
    """
    if hasattr(denoiser, "single_transformer_blocks"):
        return list(denoiser.transformer_blocks)
    names = [name.removesuffix(".processor") for name in denoiser.attn_processors]
    if hasattr(denoiser, "transformer_blocks"):
        return [denoiser.get_submodule(name) for name in names]
    return [denoiser.get_submodule(name) for name in names if not name.endswith("attn1")]


def _check_fit(name: str, prompter: ImagePrompter, layers: Sequence[Any], denoiser: Any) -> None:
    form, shapes = prompter.form, {key: tuple(tensor.shape) for key, tensor in prompter.tensors.items()}
    kind: Denoiser = "a UNet"
    if any(map(_is_block, layers)):
        kind = "one of Flux"
    elif any(map(_is_joint, layers)):
        kind = "one of Stable Diffusion 3"
    sizes = [(_attention_of(layer).inner_dim, _text_width(kind, layer, denoiser, form)) for layer in layers]
    if reason := why_unlike(form, shapes, sizes, "the model", kind):
        raise EngineError(f"ip_adapter: {name!r} {reason}")
    for number, layer in zip(form.layers, layers, strict=True) if form.kind == "sd3" else ():
        given, width = shapes[f"ip_adapter.{number}.norm_q.weight"], layer.inner_dim // layer.heads
        if given != (width,):
            raise EngineError(f"ip_adapter: {name!r} has norms of {list(given)}, and the model's heads have {width}")


def _text_width(kind: Denoiser, layer: Any, denoiser: Any, form: IpAdapterForm) -> int:
    """Return the width of what a layer reads beside its image: of an adapter's own tokens where that may be any."""
    if kind == "a UNet":
        return int(layer.cross_attention_dim)
    return int(denoiser.config.joint_attention_dim) if kind == "one of Flux" else form.text_width


@dataclass(frozen=True, slots=True, eq=False)
class _TimedPrompt(ImagePrompt):
    """An adapter of Stable Diffusion 3 at work, whose layers are made anew at each time of the encoded `images`."""

    prompter: ImagePrompter
    layers: Sequence[Any]
    images: Sequence[torch.Tensor]
    dtype: torch.dtype

    def layers_at(self, branch: int, timestep: torch.Tensor) -> tuple[PromptedLayer, ...]:
        """Return the layers of a branch: the tokens go through each attention's norm, which reads the time."""
        own, made = self.prompter.tensors, list[PromptedLayer]()
        with torch.no_grad():
            tokens_1TD, time_1C = self.prompter.timed_tokens(self.images[branch], timestep)
            plain = F.layer_norm(tokens_1TD, tokens_1TD.shape[-1:], eps=_EPSILON)
            for number, layer in zip(self.prompter.form.layers, self.layers, strict=True):
                name, width = f"ip_adapter.{number}.", layer.inner_dim // layer.heads
                norm = F.linear(F.silu(time_1C), own[f"{name}norm_ip.linear.weight"], own[f"{name}norm_ip.linear.bias"])
                shift, scale = (one[:, None] for one in norm.chunk(2, dim=1))
                read = plain * (1 + scale) + shift
                key, value = (_heads(F.linear(read, own[f"{name}to_{half}_ip.weight"]), width) for half in "kv")
                norms = (own[f"{name}norm_q.weight"].to(self.dtype), own[f"{name}norm_k.weight"].to(self.dtype))
                key = _rms(key, own[f"{name}norm_ip_k.weight"])
                made.append(PromptedLayer(layer, key.to(self.dtype), value.to(self.dtype), norms))
        return tuple(made)


def _layers(
    prompter: ImagePrompter, layers: Sequence[Any], tokens_1TD: torch.Tensor, dtype: torch.dtype
) -> Iterator[PromptedLayer]:
    for number, layer in zip(prompter.form.layers, layers, strict=True):
        attention = _attention_of(layer)
        width = attention.inner_dim // attention.heads

        def project(half: str, number: int = number, width: int = width) -> torch.Tensor:
            weight, bias = (prompter.tensors.get(f"ip_adapter.{number}.to_{half}_ip.{leaf}") for leaf in _LEAVES)
            assert weight is not None  # read_ip_adapter has checked it
            return _heads(F.linear(tokens_1TD, weight, bias), width).to(dtype)

        yield PromptedLayer(layer, project("k"), project("v"))
