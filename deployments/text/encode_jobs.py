"""What merged calls of text encoders are made of. `encode_jobs` is one such call; Ray-free and blocking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.forward_plan import DEFAULT_LIMITS, ForwardLimits
from deployments.engines.text.padding_counts import EncodeCounter
from deployments.engines.text.tokens import TokenizedText
from deployments.text.cache import Encoding


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """One text for one encoder."""

    encoder: TextEncoder
    text: TokenizedText

    @property
    def num_tokens(self) -> int:
        """What it costs: tokens that a forward works on, with the stock padding."""
        return self.text.run_length


def encoded_or_raised(jobs: Sequence[EncodeJob]) -> list[Encoding]:
    """As `encode_jobs`, for a caller who has nobody to share a forward with. Raises the first job's error."""
    outcomes = encode_jobs(jobs)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


def encode_jobs(
    jobs: Sequence[EncodeJob], *, limits: ForwardLimits = DEFAULT_LIMITS, counter: EncodeCounter | None = None
) -> list[Encoding | Exception]:
    """Results in the order of `jobs`: per encoder as few forwards as `plan_forwards` finds, each counted.

    When a forward of several fails, its jobs run one by one, so that an error stays with the job that caused it.
    """
    results: dict[int, Encoding | Exception] = {}
    for encoder in {id(job.encoder): job.encoder for job in jobs}.values():
        places = [index for index, job in enumerate(jobs) if job.encoder is encoder]
        outcomes = encoder.encode_each([jobs[index].text for index in places], limits=limits, counter=counter)
        results |= zip(places, outcomes, strict=True)
    return [results[index] for index in range(len(jobs))]
