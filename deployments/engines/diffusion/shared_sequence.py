"""A transformer's forward whose tokens several ranks share: each has a part of the image's and, mostly, of the text's.

A plan says of a class which tensors are cut, and which output is whole again: diffusers' own, but for LTX-2. All layers
but attention see a token alone. Attention gets all tokens of a part of the heads (Ulysses): ranks exchange heads for
tokens before it, and back behind it. Each of their weights is whole. A text that a class leaves whole is attended to
without an exchange.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deployments.engines.diffusion.families.base import Rows
from deployments.engines.libraries.library_seam import SequencePart, TokenCut, sequence_plan
from deployments.engines.nn.batch_invariant import attention
from deployments.engines.ranks.following import RankChannel
from deployments.engines.ranks.group import RankGroup, RankLost

_AXIS: Final = "sequence"
_TEXT: Final = "encoder_hidden_states"
# Classes of diffusers whose plan gives what one rank does (test_shared_sequence). Others have none, or one untried.
SHARED_CLASSES: Final = frozenset(
    {
        *("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel"),
        *("WanTransformer3DModel", "ChronoEditTransformer3DModel", "LTXVideoTransformer3DModel"),
        *("HeliosTransformer3DModel", "LTX2VideoTransformer3DModel"),
    }
)
Whole = Literal["keys", "queries"]
_ANGLES: Final = ("rope", "cross_attn_rope")
# The video of LTX-2 is shared; its text and its sound, a few tokens a second, are not. diffusers' plan cuts the text,
# and leaves the video's angles whole where it meets the sound.
_LTX2: Final = (
    SequencePart("", {"hidden_states": TokenCut(1, 3), "timestep": TokenCut(1, 2)}, {}, None),
    SequencePart("", {"video_keyframes_mask": TokenCut(1, 3)}, {}, None),
    *(SequencePart(path, {}, dict.fromkeys((0, 1), TokenCut(1, 3)), None) for path in _ANGLES),  # (B, S, D)
    *(SequencePart(path, {}, dict.fromkeys((0, 1), TokenCut(2, 4)), None) for path in _ANGLES),  # or (B, H, S, D)
    SequencePart("proj_out", {}, {}, 1),
)
_PLANS: Final = {"LTX2VideoTransformer3DModel": _LTX2}
# Options of a class with which an attention counts tokens as if it had all of them.
_COUNTING: Final[Mapping[str, str]] = {"HeliosTransformer3DModel": "is_amplify_history"}
# Attentions by the last name of their path, and what of them each rank has whole.
_WHOLE: Final[Mapping[str, Whole]] = {"audio_attn1": "keys", "video_to_audio_attn": "queries"}


class CannotShare(ValueError):
    """Tokens or heads that are no multiple of the ranks, a mask of more than keys, or an attention that counts tokens.

    All ranks find it at the same place, and none waits.
    """


def can_share(denoiser: Any, rows: Rows, count: int) -> bool:
    """Return whether so many ranks can share the tokens of rows: all of them, and the heads, are a multiple."""
    if type(denoiser).__name__ not in SHARED_CLASSES or rows.latents.ndim != 3 or len(set(rows.sizes)) > 1:
        return False
    sizes = rows.latents.shape[1], rows.prompts.shape[1], int(denoiser.config.num_attention_heads)
    return all(size % count == 0 for size in sizes)


@contextlib.contextmanager
def shared_sequence(denoiser: Any, group: RankGroup, whole_keys: tuple[int, int] | None = None) -> Iterator[None]:
    """Let this rank's forward within the block have its part of the tokens; its result is whole on each rank.

    All ranks run the same forward. Masks of all keys at once are of so many tokens of text, and of the image behind
    them: `whole_keys`. HAZARD: one thread at a time may run the module. Raises CannotShare within the block.
    """
    handles: list[Any] = []
    kind, plan = type(denoiser).__name__, _plan_of(type(denoiser))
    if (option := _COUNTING.get(kind)) and denoiser.config.get(option):
        raise CannotShare(f"a {kind} with {option} counts its tokens")
    is_text_shared = any(_TEXT in part.inputs for part in plan)
    shared = _SharedAttention(group, None if whole_keys is None else _order(*whole_keys, group.size(_AXIS)))
    try:
        for path, module in denoiser.named_modules():
            for part in plan:
                if not _is_at(path, part.path):
                    continue
                if part.inputs:
                    handles.append(module.register_forward_pre_hook(_cutting(part.inputs, group), with_kwargs=True))
                if part.outputs or part.gathered is not None:
                    handles.append(module.register_forward_hook(_changing(part, group)))
            if not is_text_shared and hasattr(module, "processor"):
                begin = partial(shared.begin_module, _WHOLE.get(path.rpartition(".")[2]))
                handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
                handles.append(module.register_forward_hook(shared.end_module))
        with shared:
            yield
    finally:
        for handle in handles:
            handle.remove()


def run_shared(
    denoiser: Any, ranks: RankChannel, forward: Callable[[], torch.Tensor], whole_keys: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return `forward()`, of which this rank has its part of the tokens.

    Raises CannotShare; RankLost, also for any other error: the others wait within the same forward.
    """
    try:
        with shared_sequence(denoiser, ranks.group, whole_keys):
            return forward()
    except (CannotShare, RankLost):
        raise
    except Exception as error:
        raise ranks.broken(error) from error


def _plan_of(kind: Any) -> tuple[SequencePart, ...]:
    return _PLANS.get(kind.__name__) or sequence_plan(kind)


def _is_at(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) == len(wanted) and all(one in ("*", name) for name, one in zip(names, wanted, strict=True))


def _given(module: torch.nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name."""
    return {**dict(zip(_parameters(module), inputs, strict=False)), **options}


def _parameters(module: torch.nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _cutting(cuts: Mapping[str, TokenCut], group: RankGroup) -> Callable[..., Any]:
    def cut_inputs(module: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = _given(module, inputs, options)
        changed = {name: _own_part(given.get(name), cut, group) for name, cut in cuts.items() if name in given}
        names = _parameters(module)
        positional = tuple(changed.get(name, value) for name, value in zip(names, inputs, strict=False))
        return positional, {**options, **{name: one for name, one in changed.items() if name in options}}

    return cut_inputs


def _changing(part: SequencePart, group: RankGroup) -> Callable[..., Any]:
    def change_output(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if part.gathered is not None:
            return torch.cat(list(group.gather(output, _AXIS)), dim=part.gathered)
        if isinstance(output, torch.Tensor):
            return _own_part(output, part.outputs[0], group)
        cuts = part.outputs
        return tuple(_own_part(one, cuts[at], group) if at in cuts else one for at, one in enumerate(output))

    return change_output


def _own_part(value: Any, cut: TokenCut, group: RankGroup) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() != cut.num_dimensions:
        return value
    if value.shape[cut.dimension] % group.size(_AXIS):
        raise CannotShare(f"{value.shape[cut.dimension]} tokens are no multiple of {group.size(_AXIS)} ranks")
    return value.chunk(group.size(_AXIS), dim=cut.dimension)[group.place.sequence]


def _order(text: int, image: int, count: int) -> torch.Tensor:
    """Return the places, among text and image, of all tokens in the order of the ranks: each has some of both."""
    parts = zip(torch.arange(text).chunk(count), torch.arange(text, text + image).chunk(count), strict=True)
    return torch.cat([place for part in parts for place in part])


class _SharedAttention(TorchFunctionMode):
    """Attention over the tokens of all ranks, in place of torch's over those of this one. Masks are those of keys."""

    def __init__(self, group: RankGroup, order: torch.Tensor | None) -> None:
        super().__init__()
        self._group, self._order = group, order
        self._whole: Whole | None = None

    def begin_module(
        self, whole: Whole | None, module: torch.nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]
    ) -> None:
        """Note what each rank has whole of an attention: by default the keys of a text."""
        has_text = _given(module, inputs, options).get(_TEXT) is not None
        self._whole = whole or ("keys" if has_text else None)

    def end_module(self, *_: Any) -> None:
        """Note the end of that attention."""
        self._whole = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (F.scaled_dot_product_attention, attention) and self._whole != "keys":
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        count = self._group.size(_AXIS)
        if query.shape[1] % count:
            raise CannotShare(f"{query.shape[1]} heads are no multiple of {count} ranks")
        mask = None if attn_mask is None else self._whole_mask(attn_mask, query.shape[1], key.shape[2])
        if self._whole == "queries":
            own = query.chunk(count, dim=1)[self._group.place.sequence]
            key, value = self._heads(torch.stack([key, value]))
            attended = attention(own, key, value, attn_mask=mask, **options)
            return torch.cat(list(self._group.gather(attended, _AXIS)), dim=1)
        if query.shape[2] == key.shape[2]:
            query, key, value = self._heads(torch.stack([query, key, value])).unbind()
        else:
            (query,), (key, value) = self._heads(query[None]), self._heads(torch.stack([key, value]))
        attended = attention(query, key, value, attn_mask=mask, **options)
        tokens = torch.unflatten(attended, 2, (count, -1)).movedim(2, 0)
        return self._group.exchange(tokens, _AXIS).movedim(0, 1).flatten(1, 2)

    def _heads(self, parts: torch.Tensor) -> torch.Tensor:
        """Return all tokens of this rank's heads, behind each other, of this rank's tokens (n, B, H, S, D)."""
        whole = torch.unflatten(parts, 2, (self._group.size(_AXIS), -1)).movedim(2, 0)
        return self._group.exchange(whole, _AXIS).movedim(0, 3).flatten(3, 4)

    def _whole_mask(self, mask: torch.Tensor, num_heads: int, num_keys: int) -> torch.Tensor:
        """Return the mask of all keys in the order of the ranks, for this rank's heads."""
        count = self._group.size(_AXIS)
        if mask.dim() == 4 and mask.shape[1] == num_heads > 1:
            mask = mask.chunk(count, dim=1)[self._group.place.sequence]
        if mask.shape[-2] != 1:
            raise CannotShare(f"a mask {list(mask.shape)} came, expected one of keys alone")
        if mask.shape[-1] == num_keys:  # of this rank's keys: all ranks have masks of one shape
            return torch.cat(list(self._group.gather(mask.contiguous(), _AXIS)), dim=-1)
        if self._order is None or mask.shape[-1] != len(self._order):
            raise CannotShare(f"a mask {list(mask.shape)} came, expected one of {num_keys} keys")
        return mask[..., self._order.to(mask.device)]
