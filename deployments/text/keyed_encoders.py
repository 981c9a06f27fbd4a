"""Text encoders as a replica's model host builds them: a module, its tokenizer, and the identity of both."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from deployments.engines.protocol import EngineError
from deployments.engines.skeletons import SkeletonPool
from deployments.engines.text.dense import DenseHead, load_dense_head
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.loading import OPTIONAL_PARTS, load_text_encoder, load_tokenizer
from weights.formats import dense_head, encoder_files
from weights.manifest import Component

MAX_TOKENIZERS: Final = 32

T = TypeVar("T")


@dataclass(slots=True)
class Running:
    """Computations under way: those go on that nobody waits for any more.

    `retired`: the module may have other weights by now. A lookup that outlived its request, waiting for another tier
    of the cache, may come that late. HAZARD: the module is let go from another thread when the node needs its weights.
    """

    count: int = 0
    retired: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def during(self, compute: Callable[[], Awaitable[T]]) -> T:
        """What `compute` gives, counted while it is under way. Raises EngineError when it is too late for it."""
        with self._lock:
            if self.retired:
                raise EngineError("the encoder was let go before this text was encoded")
            self.count += 1
        try:
            return await compute()
        finally:
            self.count -= 1

    def retire(self) -> bool:
        """Let nobody begin any more. False while something is under way: then nothing changes."""
        with self._lock:
            self.retired = self.retired or not self.count
            return self.retired


@dataclass(frozen=True, slots=True)
class KeyedEncoder:
    """A built encoder and its identity, which cached encodings are filed under.

    Its tokenizer is kept for the next encoder of the same folder.
    """

    module_key: str
    encoder: TextEncoder
    running: Running
    tokenizer_folder: Path | None = None
    tokenizer: Any = None


def is_text_encoder(component: Component) -> bool:
    """What the embedding service builds: text encoders, and the heads above them. The worker builds the rest."""
    return component.library in ("transformers", dense_head.LIBRARY)


class TextEncoderBuilder:
    """Makes text encoders; modules come from `skeletons`, tokenizers from here, where one that fits was kept."""

    def __init__(self) -> None:
        self.skeletons = SkeletonPool()
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[Path, Any] = OrderedDict()

    def __call__(
        self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]
    ) -> KeyedEncoder | DenseHead:
        folder = skeleton / component.folder
        if component.library == dense_head.LIBRARY:
            return load_dense_head(folder, tensors)
        tokenizer_folder = skeleton / encoder_files.tokenizer_folder(component.folder)
        with self._lock:
            tokenizer = self._tokenizers.pop(tokenizer_folder, None)
        tokenizer = tokenizer or load_tokenizer(tokenizer_folder)
        encoder = load_text_encoder(
            folder,
            component.library,
            component.class_name,
            tokenizer_folder,
            tensors,
            build=partial(self.skeletons.build_module, component.structure_key),
            tokenizer=tokenizer,
        )
        return KeyedEncoder(component.module_key, encoder, Running(), tokenizer_folder, tokenizer)

    def prepare(self, component: Component, skeleton: Path) -> None:
        """Make its structure, and load its tokenizer, before they are needed. Raises EngineError."""
        if component.library == dense_head.LIBRARY:
            return
        self.skeletons.prepare(component, skeleton / component.folder, OPTIONAL_PARTS)
        folder = skeleton / encoder_files.tokenizer_folder(component.folder)
        self._keep(folder, load_tokenizer(folder))

    def retire(self, thing: KeyedEncoder | DenseHead) -> None:
        """Nobody leases it any more. If it still computes for somebody who left, its module ends with that."""
        if isinstance(thing, KeyedEncoder) and thing.running.retire():
            self.skeletons.retire(thing.encoder.module)
            if thing.tokenizer_folder is not None:
                self._keep(thing.tokenizer_folder, thing.tokenizer)

    def _keep(self, folder: Path, tokenizer: Any) -> None:
        """For one encoder at a time: a tokenizer is reconfigured by each call."""
        with self._lock:
            self._tokenizers[folder] = tokenizer
            while len(self._tokenizers) > MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
