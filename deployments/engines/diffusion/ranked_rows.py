"""The rows of a forward of a denoiser on several ranks: each of `cfg` computes some, as the branches of guidance.

Requests and their steps are rank 0's; a follower gets the rows of each forward, and has nothing of the last one. What
a rank computes of a row are the bits that rank 0 would (`rows.py`). Ranks of `sequence` share the tokens of each row
(`shared_sequence.py`), whose sums round otherwise. Rows with ControlNets, images as prompts or a merged LoRA, and those
that cannot be divided, are computed by rank 0 alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Protocol

import torch

from deployments.engines.costs.memory_limits import is_out_of_memory
from deployments.engines.diffusion.families.base import ImageSize, Rows
from deployments.engines.diffusion.ranked_adapters import AdapterReader, AdapterWriter
from deployments.engines.diffusion.shared_sequence import can_share, run_shared
from deployments.engines.nn.lora import AdaptedSpan
from deployments.engines.ranks.following import TO, RankChannel
from deployments.engines.ranks.group import Plan, RankGroup, RankLost, forms_of
from deployments.engines.ranks.outcomes import gather_results

Forward = Callable[[Rows, int, int], torch.Tensor]
_AXIS: Final = "cfg"

logger = logging.getLogger(__name__)


class RunsRows(Protocol):
    """A pipeline on `device`, as a rank has it."""

    device: torch.device
    denoiser: Any

    def run_rows(self, rows: Rows, height: int, width: int) -> torch.Tensor:
        """Return the denoiser's prediction."""


class LeadingRows:
    """The forwards of rank 0."""

    def __init__(self, ranks: RankChannel, pipeline: RunsRows) -> None:
        self._ranks, self._pipeline = ranks, pipeline
        self._adapters = AdapterWriter(ranks, pipeline.denoiser)

    @property
    def are_whole(self) -> bool:
        """Return whether a forward cannot end between two blocks: other ranks are within the same one."""
        return self._ranks.group.size("sequence") > 1

    def run(self, forward: Forward, rows: Rows, height: int, width: int) -> torch.Tensor:
        """Return `forward(rows, height, width)`, of which the ranks compute a part each.

        Raises:
            Exception: the forward's, or another rank's: the group goes on.
            RankLost: it has ended, or one of those who share a row's tokens failed.
        """
        group = self._ranks.group
        shares = _shares_tokens(group, self._pipeline.denoiser, rows)
        if rows.controls or rows.image_prompts or not (shares or (group.size(_AXIS) > 1 and len(rows) > 1)):
            return forward(rows, height, width)
        plain = _without_modulation(rows)
        tensors = plain.tensors()
        adapters, uses = self._adapters.plan([span.uses for span in rows.adapters], tensors)
        spans = [[span.start, span.stop, said] for span, said in zip(rows.adapters, uses, strict=True)]
        optional = [rows.pooled is not None, rows.mask is not None]
        plan = {"forms": forms_of(tensors), "optional": optional, "sizes": rows.sizes, "lengths": rows.lengths}
        plan |= {"adapters": adapters, "spans": spans}
        self._ranks.say({**plan, "shares": shares, "size": [height, width], "threads": torch.get_num_threads()})
        group.spread(tensors)
        whole = replace(plain, sizes=rows.sizes, lengths=rows.lengths, adapters=rows.adapters)
        own = whole if self.are_whole else rows
        return _run_part(self._ranks, self._pipeline.denoiser, lambda part: forward(part, height, width), own, shares)


class RowsFollower:
    """The forwards of another rank than 0. Call it with each plan of its channel."""

    def __init__(self, group: RankGroup, pipeline: RunsRows) -> None:
        self._group, self._pipeline = group, pipeline
        self.adapters = AdapterReader(pipeline.denoiser)

    def __call__(self, plan: Plan) -> None:
        """Compute this rank's part of a forward. An error of its own is rank 0's to know. Raises RankLost."""
        pipeline = self._pipeline
        tensors = [one.to(pipeline.device) for one in self._group.receive(plan["forms"])]
        self.adapters.read(plan["adapters"], tensors)
        if self._group.place.sequence and not plan["shares"]:
            return  # the first of those who share tokens does without the others
        if torch.get_num_threads() != plan["threads"]:
            torch.set_num_threads(plan["threads"])
        size = plan["size"]
        ranks = RankChannel(self._group, plan[TO])
        try:
            with torch.no_grad():
                spans = tuple(AdaptedSpan(self.adapters.uses(said), *ends) for *ends, said in plan["spans"])
                rows = replace(_rows_of(plan, tensors), adapters=spans)
                _run_part(ranks, pipeline.denoiser, lambda part: pipeline.run_rows(part, *size), rows, plan["shares"])
        except RankLost:
            raise
        except Exception as error:
            logger.warning("rows of another rank failed: %s", error)


def _shares_tokens(group: RankGroup, denoiser: Any, rows: Rows) -> bool:
    count = group.size("sequence")
    return count > 1 and len(rows) >= group.size(_AXIS) and can_share(denoiser, rows, count)


def _run_part(
    ranks: RankChannel, denoiser: Any, forward: Callable[[Rows], torch.Tensor], rows: Rows, shares: bool
) -> torch.Tensor:
    group = ranks.group
    count, place = group.size(_AXIS), group.place.cfg
    start, stop = (len(rows) * rank // count for rank in (place, place + 1))
    part = rows.part(start, stop)

    def compute() -> torch.Tensor:
        if not shares:
            return forward(part)
        lengths = part.prompts.shape[1], part.latents.shape[1]
        return run_shared(denoiser, ranks, lambda: forward(part), lengths)

    return torch.cat(gather_results(group, _AXIS, compute, is_out_of_memory))


def _without_modulation(rows: Rows) -> Rows:
    """Return the rows without what rank 0 has computed ahead, which is larger than they are: the bits are the same."""
    return Rows(rows.latents, rows.timesteps, rows.prompts, rows.guidance, rows.pooled, mask=rows.mask)


def _rows_of(plan: Plan, tensors: list[torch.Tensor]) -> Rows:
    latents, timesteps, prompts, guidance, *rest = tensors
    has_pooled, has_mask = plan["optional"]
    pooled = rest.pop(0) if has_pooled else None
    mask = rest.pop(0) if has_mask else None
    sizes = tuple(map(_image_size, plan["sizes"]))
    return Rows(latents, timesteps, prompts, guidance, pooled, mask=mask, sizes=sizes, lengths=tuple(plan["lengths"]))


def _image_size(said: list[Any]) -> ImageSize:
    height, width, latent_height, latent_width, references = said
    return ImageSize(height, width, latent_height, latent_width, tuple(map(_image_size, references)))
