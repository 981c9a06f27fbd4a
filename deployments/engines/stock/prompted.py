"""IP-Adapters on pipelines that diffusers runs: images as prompts to the UNet of one request's call.

What `load_ip_adapter` does, without a change of any module. The class itself arranges what it knows of images as it
arranges its texts, for guidance say: here that is a mark for each row, 0 for no image and 1 for the request's.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.diffusion.families.prompted import PromptedSpan
from deployments.engines.diffusion.image_prompts import prompted_by_images, read_images
from deployments.engines.records.protocol import ImagePromptUse
from deployments.engines.stock.known import IMAGE_EMBEDS, PROMPTED

_ADDED: Final = "added_cond_kwargs"
_MARKS: Final = "image_embeds"


@contextlib.contextmanager
def reading_images(
    pipeline: Any, uses: Sequence[ImagePromptUse], known: Mapping[str, object]
) -> Iterator[dict[str, Any]]:
    """Let the UNet of a pipeline read images within the block, in this thread, and yield what the call is to be given.

    Raises EngineError for an IP-Adapter that is not `known` or does not fit.
    """
    if not uses:
        yield {}
        return
    unet = getattr(pipeline, PROMPTED)
    prompts = read_images(uses, known, unet, with_negative=True)
    here, forward = threading.get_ident(), contextlib.ExitStack()

    def begin(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        added = dict(options.get(_ADDED) or {})
        if threading.get_ident() != here or _MARKS not in added:
            return args, options
        sample = args[0] if args else options["sample"]
        marks = added.pop(_MARKS)[0].flatten().round().int().tolist()
        if len(marks) > len(sample):  # without guidance the class leaves both together
            marks = [1] * len(sample)
        forward.enter_context(prompted_by_images(list(_spans(marks, prompts))))
        return args, options | {_ADDED: added}

    def end(*_: Any) -> None:
        if threading.get_ident() == here:
            forward.close()

    hooks = unet.register_forward_pre_hook(begin, with_kwargs=True), unet.register_forward_hook(end)
    try:
        yield {IMAGE_EMBEDS: [torch.tensor([0.0, 1.0]).reshape(2, 1, 1)]}
    finally:
        forward.close()
        for hook in hooks:
            hook.remove()


def _spans(marks: Sequence[int], prompts: Sequence[Any]) -> Iterator[PromptedSpan]:
    """Yield a span for each run of rows with one mark."""
    start = 0
    for mark, rows in itertools.groupby(marks):
        stop = start + len(list(rows))
        yield PromptedSpan([(prompt.branches[mark], prompt.scale) for prompt in prompts], start, stop)
        start = stop
