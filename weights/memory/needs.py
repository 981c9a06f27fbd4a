"""The memory that a model needs at once, whatever budgets there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weights.memory.layer_plan import DecoderSizes


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes by component of what a service builds of a model for one request.

    `services` has them by section of the config, `worker` or `text_encoder`. What is `in_blocks` comes onto a device
    block by block where it is larger. A language model with a `decoder` can have layers on several devices and on the
    host; of one that is `divided`, ranks have slices of the layers.
    """

    services: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    in_blocks: tuple[str, ...] = ()
    decoder: DecoderSizes | None = None
    divided: DecoderSizes | None = None
