"""Text encoders as a replica's module cache builds them, the LoRAs that change them, and the identity of both.

Beside them, the processors of the images that an encoder sees with a prompt.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from deployments.engines.building.skeletons import SkeletonPool
from deployments.engines.diffusion.families.base import Family
from deployments.engines.diffusion.fitted_loras import FittedLoras
from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from deployments.engines.llm.image_reader import ImageReader
from deployments.engines.nn.lora import FittedPairs
from deployments.engines.programs.bound import BoundPrograms, ServedProgram
from deployments.engines.records.prompt_images import PromptImage
from deployments.engines.records.protocol import EngineError
from deployments.engines.text.encoder import OPTIONAL_PARTS, TextEncoder, load_text_encoder, load_tokenizer
from deployments.engines.text.sentence_layers import DenseHead, load_dense_head
from deployments.engines.text.tokens import LearnedWords
from deployments.modules.builder import Builder
from deployments.modules.footprints import FootprintBook
from deployments.modules.stock_parts import is_stock_part, is_stock_text
from weights.formats import dense_head, encoder_files
from weights.formats.lora import changes_text_encoders
from weights.operations.adapters import LoraAdapter, parse_adapter
from weights.programs.signature import is_program
from weights.records.manifest import Component
from weights.residency.recent import Recent

MAX_TOKENIZERS: Final = 32
PROCESSOR_FOLDER: Final = "processor"
MAX_READERS: Final = 8


@dataclass(eq=False, slots=True)
class KeyedEncoder:
    """A built encoder and its identity, `module_key`, which cached encodings are filed under.

    Its tokenizer is kept for the next encoder of the same folder. Computations outlive the requests that began them,
    so a module may be let go while some run (`num_computing`), and one that `is_retired` may hold other weights by now.
    HAZARD: it is retired from another thread when the node needs its weights.
    """

    module_key: str
    encoder: TextEncoder
    tokenizer_folder: Path | None = None
    tokenizer: Any = None
    workspace: Workspace = UNBOUNDED
    num_computing: int = 0
    is_retired: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextlib.contextmanager
    def computing(self) -> Iterator[TextEncoder]:
        """Count a computation while it runs. Raises EngineError when the encoder was let go before."""
        with self._lock:
            if self.is_retired:
                raise EngineError("the encoder was let go before this text was encoded")
            self.num_computing += 1
        try:
            yield self.encoder
        finally:
            with self._lock:
                self.num_computing -= 1

    def retire_encoder(self) -> bool:
        """Let no computation begin any more. Return False, and change nothing, while some run."""
        with self._lock:
            self.is_retired = self.is_retired or not self.num_computing
            return self.is_retired


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLora:
    """A LoRA's pairs for one encoder, its strength, and `key`, which tells it from all others."""

    key: str
    pairs: FittedPairs
    scale: float

    @property
    def identity(self) -> str:
        """The weights and their strength, by which encodings differ."""
        return f"{self.key} * {self.scale!r}"


def words_of(
    component: str, encoder: TextEncoder, adapters: Mapping[str, LoraAdapter], keys: Mapping[str, str]
) -> LearnedWords | None:
    """Return the words that an encoder learns from adapters, by name; None where it learns none. Raises EngineError."""
    names = sorted(name for name, adapter in adapters.items() if component in adapter.words)
    vectors = {name: adapters[name].words[component] for name in names}
    return encoder.learn_words(vectors, " + ".join(f"{name} of {keys[name]}" for name in names))


class EncoderLoras:
    """The LoRAs of a replica, each fitted once to each encoder that it changes."""

    def __init__(self) -> None:
        self._fitted: weakref.WeakKeyDictionary[TextEncoder, dict[tuple[str, str], FittedLoras]]
        self._fitted = weakref.WeakKeyDictionary()

    def loras_of(
        self,
        family: Family,
        component: str,
        encoder: TextEncoder,
        adapters: Mapping[str, LoraAdapter],
        keys: Mapping[str, str],
        scales: Mapping[str, float],
    ) -> tuple[EncoderLora, ...]:
        """Return the LoRAs that change this encoder, in one order for the same ones; `keys` and `scales` are by name.

        Raises EngineError for one that does not fit.
        """
        by_use = self._fitted.setdefault(encoder, {})
        fitted = by_use.setdefault((family.class_name, component), FittedLoras(family, component, encoder.module))
        found = [(name, fitted.pairs_of(adapter)) for name, adapter in adapters.items()]
        if component not in family.adapters.lora_encoders:
            return ()
        acting = [EncoderLora(keys[name], pairs, scales[name]) for name, pairs in found if pairs and scales[name]]
        return tuple(sorted(acting, key=lambda lora: lora.identity))


def text_modules(modules: Mapping[str, Any]) -> tuple[KeyedEncoder, Mapping[str, DenseHead]]:
    """Return the encoder of an embedding model, and the Dense layers behind its pooling by their folders."""
    (keyed,) = (module for module in modules.values() if isinstance(module, KeyedEncoder))
    return keyed, {name: module for name, module in modules.items() if isinstance(module, DenseHead)}


def is_text_encoder(component: Component) -> bool:
    """Return whether the text-encoder service builds it: encoders, heads above them, programs; else the worker does."""
    is_known = component.library in ("transformers", dense_head.LIBRARY) or is_program(component)
    return is_stock_text(component) or (is_known and not is_stock_part(component))


def is_part_of_text(component: Component) -> bool:
    """Return whether a prompt is encoded with it: the encoders of its model, and LoRAs that change one."""
    return is_text_encoder(component) or (component.library == "peft" and changes_text_encoders(component.tensors))


class TextEncoderBuilder(Builder):
    """A builder of text encoders, and of the LoRAs that change them.

    Modules come from `skeletons`; tokenizers are kept and used again. What forwards take is in `footprints`. Programs
    are prepared for `device`.
    """

    def __init__(self, footprints: FootprintBook | None = None, device: str = "cpu") -> None:
        self.skeletons = SkeletonPool()
        self.programs = BoundPrograms(device=device)
        self.footprints = footprints
        self._lock = threading.Lock()
        self._tokenizers: Recent[Path, Any] = Recent(MAX_TOKENIZERS)

    def __call__(
        self, component: Component, skeleton: Path, tensors: Mapping[str, torch.Tensor]
    ) -> KeyedEncoder | DenseHead | ServedProgram | LoraAdapter | nn.Module:
        """Build the component over its tensors; of a stock pipeline the plain module.

        Raises EngineError, AdapterError for a LoRA, and FormatError for a program.
        """
        folder = skeleton / component.folder
        if is_program(component):
            return self.programs.bind(component, folder, tensors)
        if is_stock_text(component):
            key = component.structure_key
            return self.skeletons.build_module(key, component.library, component.class_name, folder, tensors)
        if component.library == "peft":
            return parse_adapter(folder, tensors, component.metadata)
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
        workspace = self.footprints.of_text(component, folder) if self.footprints else UNBOUNDED
        return KeyedEncoder(component.module_key, encoder, tokenizer_folder, tokenizer, workspace)

    def prepare(self, component: Component, skeleton: Path) -> None:
        """Make its structure, and load its tokenizer, before they are needed. Raises EngineError and FormatError."""
        if not is_text_encoder(component) or component.library == dense_head.LIBRARY:
            return
        if is_program(component):
            self.programs.prepare(component, skeleton / component.folder)
            return
        is_plain = is_stock_text(component)
        self.skeletons.prepare_skeleton(component, skeleton / component.folder, () if is_plain else OPTIONAL_PARTS)
        if is_plain:
            return
        folder = skeleton / encoder_files.tokenizer_folder(component.folder)
        self._keep(folder, load_tokenizer(folder))

    def retire(self, thing: KeyedEncoder | DenseHead | ServedProgram | LoraAdapter | nn.Module) -> None:
        """Take back what nobody leases any more, unless it still computes for a request that was cancelled."""
        if isinstance(thing, nn.Module):
            self.skeletons.retire_module(thing)
        if isinstance(thing, KeyedEncoder) and thing.retire_encoder():
            self.skeletons.retire_module(thing.encoder.module)
            if thing.tokenizer_folder is not None:
                self._keep(thing.tokenizer_folder, thing.tokenizer)

    def _keep(self, folder: Path, tokenizer: Any) -> None:
        """Keep a tokenizer for one encoder at a time: each call reconfigures it."""
        with self._lock:
            self._tokenizers.note(folder, tokenizer)


class PipelineProcessors:
    """The processors of pipelines by their folders, each with a tokenizer of its own. Thread-safe.

    An encoder of the same weights may be another pipeline's as well, which has another processor or none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: Recent[Path, ImageReader] = Recent(MAX_READERS)

    def read(self, skeleton: Path, config: Any, images: Sequence[npt.NDArray[np.uint8]]) -> tuple[PromptImage, ...]:
        """Return images, uint8 (height, width, 3), as the encoder of that config sees them. Blocks.

        Raises EngineError where the pipeline has no processor, or one that does not take them.
        """
        folder = skeleton / PROCESSOR_FOLDER
        with self._lock:
            reader = self._readers.used(folder, lambda: ImageReader.load(folder, load_tokenizer(folder), config))
            found = tuple(map(reader.read, images))
            for image in found:
                reader.count(image)
        return found
