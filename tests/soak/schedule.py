"""The schedule of a soak: a pure function of its seed and its length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

NUM_SIXTHS: Final = 6
CALM_SHARE: Final = 0.2  # of each sixth: nothing is disturbed, and figures are taken
PAUSE_S: Final = 12.0  # on average, from one disturbance to the next
SPREAD: Final = 0.5  # of the pause, to both sides

KILLED: Final = ("worker", "text_encoder", "ingress", "keeper", "registry", "controller", "haproxy")
DISTURBANCES: Final = (
    *(f"kill {name}" for name in KILLED),
    "register and remove",
    "replace",
    "apply",
    "pin",
    "unload",
    "switch by hand",
    "full disk",
    "clock forward",
    "clock back",
    "collect garbage",
)
# How often each kind of request comes, of the sum of all.
REQUESTS: Final = {
    "chat": 30,
    "chat stream": 10,
    "left chat stream": 8,
    "image": 24,
    "left image stream": 6,
    "embedding": 12,
    "classifier": 4,
    "response": 4,
    "video": 2,
}


@dataclass(frozen=True, slots=True)
class Event:
    """A disturbance, so many seconds after the start of its sixth. `draw` seeds what is drawn within it."""

    at_s: float
    what: str
    draw: int


def drawn_sixths(seed: int, minutes: float) -> list[list[Event]]:
    """Return the disturbances of each sixth. Each kind comes once before any comes again."""
    random_ = random.Random(f"disturbances {seed}")
    kinds = _in_rounds(random_)
    end_s = (1 - CALM_SHARE) * sixth_s(minutes)
    sixths = []
    for _ in range(NUM_SIXTHS):
        events, at_s = list[Event](), _pause_s(random_) / 2
        while at_s < end_s:
            events.append(Event(at_s, next(kinds), random_.getrandbits(32)))
            at_s += _pause_s(random_)
        sixths.append(events)
    return sixths


def sixth_s(minutes: float) -> float:
    """Return the seconds of a sixth, its calm included."""
    return 60 * minutes / NUM_SIXTHS


def drawn_requests(seed: int, client: int) -> Iterator[tuple[str, int]]:
    """Yield the kinds of a client's requests, each with a number that chooses one of its questions."""
    random_ = random.Random(f"requests {seed} {client}")
    while True:
        yield random_.choices([*REQUESTS], [*REQUESTS.values()])[0], random_.getrandbits(32)


def _in_rounds(random_: random.Random, kinds: Sequence[str] = DISTURBANCES) -> Iterator[str]:
    while True:
        yield from random_.sample(kinds, len(kinds))


def _pause_s(random_: random.Random) -> float:
    return PAUSE_S * random_.uniform(1 - SPREAD, 1 + SPREAD)
