"""Text encoders as a replica's model host builds them: a module, its tokenizer, and the identity of its weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from deployments.engines.protocol import EngineError
from deployments.engines.skeletons import SkeletonPool
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.loading import OPTIONAL_PARTS, load_text_encoder
from weights.manifest import Component

T = TypeVar("T")


@dataclass(slots=True)
class Running:
    """Computations under way: those go on that nobody waits for any more.

    `retired`: the module may have other weights by now. A lookup that outlived its request, waiting for another tier
    of the cache, may come that late.
    """

    count: int = 0
    retired: bool = False

    async def during(self, compute: Callable[[], Awaitable[T]]) -> T:
        """What `compute` gives, counted while it is under way. Raises EngineError when it is too late for it."""
        if self.retired:
            raise EngineError("the encoder was let go before this text was encoded")
        self.count += 1
        try:
            return await compute()
        finally:
            self.count -= 1


@dataclass(frozen=True, slots=True)
class KeyedEncoder:
    """A built encoder and the identity of its weights, which cached encodings are filed under."""

    module_key: str
    encoder: TextEncoder
    running: Running


def is_text_encoder(component: Component) -> bool:
    """What the embedding service builds of a pipeline; the worker builds the rest."""
    return component.library == "transformers"


class TextEncoderBuilder:
    """Makes text encoders; their modules come from `skeletons` where one of their structure is kept."""

    def __init__(self) -> None:
        self.skeletons = SkeletonPool()

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> KeyedEncoder:
        """The tokenizer of `text_encoder_2` is in `tokenizer_2`; a single model has its own in the same folder."""
        encoder = load_text_encoder(
            skeleton / component.folder,
            component.library,
            component.class_name,
            skeleton / component.folder.replace("text_encoder", "tokenizer"),
            tensors,
            build=partial(self.skeletons.build_module, component.structure_key),
        )
        return KeyedEncoder(component.module_key, encoder, Running())

    def prepare(self, component: Component, skeleton: Path) -> None:
        """Make its structure before it is needed. Raises EngineError."""
        self.skeletons.prepare(component, skeleton / component.folder, OPTIONAL_PARTS)

    def retire(self, thing: KeyedEncoder) -> None:
        """Nobody leases it any more. If it still computes for somebody who left, its module ends with that."""
        if not thing.running.count:
            thing.running.retired = True
            self.skeletons.retire(thing.encoder.module)
