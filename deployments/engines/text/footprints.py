"""Footprints of text encoders: the memory of forwards by texts and tokens, recorded on modules without weights."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.building.skeletons import blank_module
from deployments.engines.graph.footprint import ROUNDING_BYTES, Footprint, fit_footprint
from deployments.engines.graph.recording import Recorder, Recording, fake_weights, record
from deployments.engines.records.protocol import PENULTIMATE
from deployments.engines.text.encoder import OPTIONAL_PARTS, position_limit
from deployments.engines.text.forwards import encoder_family_of, run_layers
from deployments.engines.text.known import PROMPT_READERS
from weights.platform.torch_seam import fake_mode
from weights.records.manifest import Component

_TEXTS: Final = (1, 2, 16)  # of the recordings of a length: from two on, a forward's peak is linear in its texts
_LEAST_TOKENS: Final = 16
_MOST_USUAL: Final = 512  # tokens: T5's prompts in pipelines

logger = logging.getLogger("atelier.replica")


class EncoderTwin:
    """A text encoder of fake tensors, whose forwards are recorded as they would run on `device`.

    Its module is a blank one that nobody else uses. LoRAs and learned words are left out.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._mode = fake_mode()
        fake_weights(module, self._mode, device)
        self.max_tokens = position_limit(module)
        self.usual_tokens = min(self.max_tokens or _MOST_USUAL, _MOST_USUAL)

    def record(self, texts: int, tokens: int) -> Recording:
        """Return the recording of a forward over texts of so many tokens."""
        return record(
            partial(self._run, texts, tokens), Recorder(self._device, is_fake=True), {"": self._module}, self._mode
        )

    def _run(self, texts: int, tokens: int) -> Any:
        ids_BL, mask_BL = (torch.ones(texts, tokens, dtype=torch.long, device=self._device) for _ in range(2))
        if type(self._module).__name__ in PROMPT_READERS:
            return run_layers(self._module, ids_BL, mask_BL, [-1])
        family = encoder_family_of(type(self._module).__name__)
        more = {"layers": {PENULTIMATE}} if family.is_clip else {}
        return family.run(module=self._module, ids_BL=ids_BL, mask_BL=mask_BL, pooling=None, **more)


class TextFootprints:
    """The footprints of an encoder's forwards by `text_kind`, recorded when they are asked for. Thread-safe."""

    def __init__(self, make_twin: Callable[[], EncoderTwin]) -> None:
        self._make_twin = make_twin
        self._lock = threading.Lock()
        self._twin: EncoderTwin | None = None
        self._is_hopeless = False
        self._known: dict[int, Footprint] = {}  # by tokens
        self.least_bytes = 0

    def learn_default(self) -> None:
        """Learn what a text as long as the encoder reads takes: `least_bytes`. Takes up to seconds."""
        if not self.least_bytes and (found := self._footprint_by(lambda twin: self._recorded(twin, twin.usual_tokens))):
            self.least_bytes = found.bytes_of(1)

    def get(self, kind: Any) -> Footprint | None:
        """Return the footprint of a kind; None where nothing can be recorded, as the log said."""
        _, tokens, is_padded = kind
        return self._footprint_by(partial(self._recorded if is_padded else self._between, tokens=tokens))

    def _footprint_by(self, find: Callable[[EncoderTwin], Footprint]) -> Footprint | None:
        with self._lock:
            try:
                if self._is_hopeless:
                    return None
                self._twin = self._twin or self._make_twin()
                return find(self._twin)
            except Exception as error:  # of any operation of a model that fake tensors have no rule for
                self._is_hopeless = True
                logger.info("the memory of a text encoder is not planned: %s", error)
                return None

    def _recorded(self, twin: EncoderTwin, tokens: int) -> Footprint:
        if tokens not in self._known:
            self._known[tokens] = fit_footprint(lambda texts: twin.record(texts, tokens).eager_peak(), _TEXTS)
        return self._known[tokens]

    def _between(self, twin: EncoderTwin, tokens: int) -> Footprint:
        """Return the footprint on the line between two lengths, powers of two: it never lies below.

        A peak is the largest of sums whose terms are constant, linear or quadratic in the tokens.
        """
        many = max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        few, many = many // 2, min(many, twin.max_tokens or many)
        if tokens == many or few < _LEAST_TOKENS:
            return self._recorded(twin, many)
        low, high, share = self._recorded(twin, few), self._recorded(twin, many), (tokens - few) / (many - few)
        ends = zip(low.points, high.points, strict=True)
        line = ((n, least + math.ceil((most - least) * share)) for (n, least), (_, most) in ends)
        return Footprint(tuple((n, nbytes + ROUNDING_BYTES) for n, nbytes in line))


def make_text_twin(component: Component, folder: Path, device: torch.device) -> EncoderTwin:
    """Return the twin of an encoder of the store, whose skeleton is in `folder`. Raises EngineError."""
    return EncoderTwin(blank_module(component, folder, OPTIONAL_PARTS), device)
