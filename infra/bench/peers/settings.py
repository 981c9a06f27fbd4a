"""The common things of the parts of `infra.bench peers`: sizes, clocks, and rows of a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

OURS: Final = "Atelier"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PeersSettings:
    """Rounds of each figure, and sizes: of the encoder, and those of the decoder and the denoiser, by default
    TinyLlama's and Stable Diffusion 1.5's.

    `judges` is the folder of the peers that are installed.
    """

    rounds: int = 9
    judges: Path = Path(".judges")
    encoder_width: int = 384
    encoder_layers: int = 6
    lengths: Sequence[tuple[int, int]] = ((1, 5), (1, 16), (1, 64), (8, 32))  # texts, and tokens of each
    half_lengths: Sequence[tuple[int, int]] = ((1, 16), (8, 32), (64, 32))
    decoder: Mapping[str, int] = field(default_factory=dict)  # entries of the config that are not TinyLlama's
    num_prompt: int = 256
    num_new: int = 24
    num_shared: int = 512
    num_own: int = 32
    num_requests: int = 8
    streams: tuple[int, int, int] = (32, 32, 17)  # at once, tokens of each prompt, and new ones
    served: Sequence[int] = (8, 32)  # streams at once over HTTP
    served_tokens: tuple[int, int] = (64, 16)  # of a prompt, and new ones
    num_answer: int = 80  # tokens of an answer with proposals
    # Entries of configs that are not Stable Diffusion 1.5's:
    denoiser: Mapping[str, Any] = field(default_factory=dict)
    text_encoder: Mapping[str, Any] = field(default_factory=dict)
    vae: Mapping[str, Any] = field(default_factory=dict)
    sides_px: Sequence[int] = (256, 512)

    @property
    def slow_rounds(self) -> int:
        """Return the rounds of what takes seconds."""
        return max(1, self.rounds // 3)

    @property
    def slowest_rounds(self) -> int:
        """Return the rounds of what takes half a minute on some side."""
        return max(1, self.rounds // 4)


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of all threads of a process, and of the clock."""

    cpu_s: float
    wall_s: float


def clocked(run: Callable[[], _Result]) -> tuple[_Result, Took]:
    """Return the result of a call, and the time that it took here."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    result = run()
    return result, Took(time.process_time() - begin_cpu_s, time.perf_counter() - begin_s)


def rows_of(
    case: str, times: Mapping[str, Sequence[Took]], beside: Mapping[str, str] | None = None, parts: int = 1
) -> list[dict[str, Any]]:
    """Return a row for each side, of the medians of its rounds; each round had so many `parts`.

    `ratio` is a side's CPU time by ours.
    """
    medians = {side: statistics.median(one.cpu_s for one in took) * 1e3 / parts for side, took in times.items()}
    return [
        {
            "case": case,
            "side": side,
            "cpu_ms": ms,
            "wall_ms": statistics.median(one.wall_s for one in times[side]) * 1e3 / parts,
            "ratio": ms / medians[OURS],
            "beside": (beside or {}).get(side, ""),
        }
        for side, ms in medians.items()
    ]
