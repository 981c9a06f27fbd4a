"""A transformer's forward whose tokens several ranks share: each has a part of the text's and of the image's.

diffusers' plan of a class says which inputs are cut, and which output is whole again. All layers but attention see a
token alone. Attention gets all tokens of a part of the heads (Ulysses): ranks exchange heads for tokens before it, and
back behind it. Each of their weights is whole.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deployments.engines.diffusion.families.base import Rows
from deployments.engines.libraries.library_seam import SequencePart, sequence_plan
from deployments.engines.ranks.group import RankGroup

_AXIS: Final = "sequence"


def can_share(denoiser: Any, rows: Rows, count: int) -> bool:
    """Return whether so many ranks can share the tokens of rows: all of them, and the heads, are a multiple."""
    kind: Any = type(denoiser)
    if not sequence_plan(kind) or rows.latents.ndim != 3 or len(set(rows.sizes)) > 1:
        return False
    sizes = rows.latents.shape[1], rows.prompts.shape[1], int(denoiser.config.num_attention_heads)
    return all(size % count == 0 for size in sizes)


@contextlib.contextmanager
def shared_sequence(denoiser: Any, rows: Rows, group: RankGroup) -> Iterator[None]:
    """Let this rank's forward of `rows` within the block have its part of the tokens; its result is whole on each rank.

    All ranks run the same forward. HAZARD: one thread at a time may run the module.
    """
    handles: list[Any] = []
    kind: Any = type(denoiser)
    plan = sequence_plan(kind)
    try:
        for path, module in denoiser.named_modules():
            for part in plan:
                if fnmatchcase(path, part.path):
                    handles.append(module.register_forward_pre_hook(_cutting(part, group), with_kwargs=True))
                    handles.append(module.register_forward_hook(_joining(part, group)))
        with _SharedAttention(group, _order(rows, group.size(_AXIS))):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _cutting(part: SequencePart, group: RankGroup) -> Callable[..., Any]:
    def cut_inputs(module: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = {**dict(zip(names, inputs, strict=False)), **options}
        changed = {
            name: _own_part(given[name], dimension, group)
            for name, dimension in part.inputs.items()
            if isinstance(given.get(name), torch.Tensor)
        }
        positional = tuple(changed.get(name, value) for name, value in zip(names, inputs, strict=False))
        return positional, {**options, **{name: one for name, one in changed.items() if name in options}}

    return cut_inputs


def _joining(part: SequencePart, group: RankGroup) -> Callable[..., Any]:
    def join_output(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if part.gathered is not None:
            return torch.cat(list(group.gather(output, _AXIS)), dim=part.gathered)
        return output

    return join_output


def _own_part(tensor: torch.Tensor, dimension: int, group: RankGroup) -> torch.Tensor:
    return tensor.chunk(group.size(_AXIS), dim=dimension)[group.place.sequence]


def _order(rows: Rows, count: int) -> torch.Tensor:
    """Return the places, among text and image, of all tokens in the order of the ranks: each has some of both."""
    text, image = rows.prompts.shape[1], rows.latents.shape[1]
    parts = zip(torch.arange(text).chunk(count), torch.arange(text, text + image).chunk(count), strict=True)
    return torch.cat([place for part in parts for place in part]).to(rows.latents.device)


class _SharedAttention(TorchFunctionMode):
    """Attention over the tokens of all ranks, in place of torch's over those of this one. Masks are those of keys."""

    def __init__(self, group: RankGroup, order: torch.Tensor) -> None:
        super().__init__()
        self._group, self._order = group, order

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
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
        if attn_mask is not None:
            if attn_mask.shape[1:-1].numel() != 1:
                raise ValueError(f"a mask {list(attn_mask.shape)} came, expected one of keys alone")
            attn_mask = attn_mask[..., self._order]
        count = self._group.size(_AXIS)
        # (3, B, H, S, D) to (ranks, 3, B, H / ranks, S, D), and all tokens behind each other.
        whole = torch.unflatten(torch.stack([query, key, value]), 2, (count, -1)).movedim(2, 0)
        heads = self._group.exchange(whole, _AXIS).movedim(0, 3).flatten(3, 4)
        query, key, value = heads.unbind()
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
        tokens = torch.unflatten(attended, 2, (count, -1)).movedim(2, 0)
        return self._group.exchange(tokens, _AXIS).movedim(0, 1).flatten(1, 2)
