"""The diffusion engine: choose a batch, denoise it, decode what has ended. Single-threaded; the caller decides when.

The scheduler of denoise steps (`_choose_batch`) is pure. When not all requests fit into a batch, those with the least
work left go first: of equal requests some run to their end while the others wait, which answers them sooner on average
than if all advanced at the same pace and ended last together. Now and then the first place goes to the request that has
waited the longest since its last step, so that a long one moves on under many short ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from deployments.engines.diffusion.checkpoints import restore_checkpoint, save_checkpoint
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.previews import preview_steps
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.memory_limits import forget_frames, is_out_of_memory
from deployments.engines.protocol import ConditionedRequest, DenoiseTimes, DiffusionOutput, EngineError

ROTATION: Final = 4  # every so many batches the first place goes to the request that has waited the longest
WHOLE: Final = 1 + 1e-9  # ten tenths are a little more or less than one

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Running:
    """A request under way. Times are the clock's: it was added, had its first step, and its last."""

    request: ConditionedRequest
    state: DenoiseState
    last_batch: int
    added: float
    started: float | None = None
    denoised: float = 0.0


class DiffusionEngine:
    """An `Engine` that makes images for many requests of one pipeline, as many in one batch as bounds and memory allow.

    A step denoises a batch once or, when requests have had their last step, decodes those. Images differ by at most
    1 of 255 from those of a request alone (see rows.py). When a batch fails, its requests run again one by one, so that
    an error stays with the request that caused it.
    """

    def __init__(self, pipeline: DenoisePipeline) -> None:
        self.pipeline = pipeline
        self.failures: dict[str, Exception] = {}
        self._requests: dict[str, _Running] = {}
        self._batch_number = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: ConditionedRequest) -> None:
        """Take a request in, its noise drawn.

        Raises:
            EngineError: as `DenoisePipeline.start` does, or a request of this id has not finished.
        """
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is in use by a request that has not finished")
        state = self.pipeline.start(request.request, request.conditioning, request.adapters)
        if request.resume_from is not None:
            restore_checkpoint(state, request.resume_from)
        state.preview_at = preview_steps(state.num_steps, request.num_previews)
        self._requests[request.request_id] = _Running(request, state, self._batch_number, time.perf_counter())

    def abort(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._requests.pop(request_id, None)

    def step(self) -> list[DiffusionOutput]:
        """Denoise a batch, or decode the requests that have no steps left."""
        self.failures = {}
        if ended := [running for running in self._requests.values() if running.state.done]:
            return self._decode(ended)
        return self._denoise(self._choose())

    def _choose(self) -> list[_Running]:
        self._batch_number += 1
        waiting = list(self._requests.values())
        candidates = [
            _Candidate(self.pipeline.share_of_batch(one.state), one.state.num_steps_left, one.last_batch)
            for one in waiting
        ]
        chosen = [waiting[place] for place in _choose_batch(candidates, self._batch_number)]
        for running in chosen:
            running.last_batch = self._batch_number
        return chosen

    def _denoise(self, batch: Sequence[_Running]) -> list[DiffusionOutput]:
        now = time.perf_counter()
        for running in batch:
            running.started = running.started or now
        failures = _run_or_retry(self._step_states, [running.state for running in batch])
        now = time.perf_counter()
        moved = []
        for running, failure in zip(batch, failures, strict=True):
            if failure is not None:
                self._give_up(running, failure)
                continue
            running.denoised = now
            moved.append(running)
        previews = self._previews([running for running in moved if running.state.expected is not None])
        return [output for running in moved if (output := self._progress(running, previews)) is not None]

    def _previews(self, asked: Sequence[_Running]) -> dict[str, npt.NDArray[np.uint8]]:
        """Return previews by request. One that cannot be made is left out: the request goes on without it."""
        found = _run_or_retry(self.pipeline.decode_previews, [running.state for running in asked]) if asked else []
        return {
            running.request.request_id: preview
            for running, preview in zip(asked, found, strict=True)
            if isinstance(preview, np.ndarray)
        }

    def _progress(self, running: _Running, previews: Mapping[str, npt.NDArray[np.uint8]]) -> DiffusionOutput | None:
        """Return what the request is to hear of its step, or None for nothing."""
        request, state = running.request, running.state
        preview = previews.get(request.request_id)
        is_due = request.checkpoint_steps and state.step_index % request.checkpoint_steps == 0 and not state.done
        checkpoint = save_checkpoint(state, request.conditioning) if is_due else None
        if preview is None and checkpoint is None and not request.reports_steps:
            return None
        index = None if preview is None else state.preview_at.index(state.step_index)
        return DiffusionOutput(
            request.request_id,
            state.step_index,
            state.num_steps,
            preview=preview,
            preview_index=index,
            checkpoint=checkpoint,
        )

    def _step_states(self, states: Sequence[DenoiseState]) -> list[Exception | None]:
        self.pipeline.step(states)
        return [state.failure for state in states]

    def _decode(self, ended: Sequence[_Running]) -> list[DiffusionOutput]:
        outcomes = _run_or_retry(self.pipeline.decode, [running.state for running in ended])
        now = time.perf_counter()
        outputs = []
        for running, outcome in zip(ended, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._give_up(running, outcome)
                continue
            request_id, state = running.request.request_id, running.state
            del self._requests[request_id]
            started = running.started or running.added
            times = DenoiseTimes(started - running.added, running.denoised - started, now - running.denoised)
            outputs.append(DiffusionOutput(request_id, state.step_index, state.num_steps, outcome, times))
        return outputs

    def _give_up(self, running: _Running, error: Exception) -> None:
        request_id = running.request.request_id
        self.failures[request_id] = error
        del self._requests[request_id]


def _run_or_retry(
    work: Callable[[Sequence[DenoiseState]], Sequence[T]], states: Sequence[DenoiseState]
) -> list[T | Exception]:
    """Return the outcome of `work` for each state, from one call for all; if that fails, from one call for each."""
    try:
        return list(work(states))
    except Exception as error:
        if len(states) > 1 or is_out_of_memory(error):
            forget_frames(error)  # they know the tensors of the call that failed, whose memory the next ones need
        if len(states) == 1:
            return [error]
    return [outcome for state in states for outcome in _run_or_retry(work, [state])]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A request that could step. `share`: the part of a batch that a step of it takes; more than 1 is one by itself.

    `last_batch` is the number of the batch of its last step, or that of its arrival.
    """

    share: float
    num_steps_left: int
    last_batch: int

    @property
    def work_left(self) -> float:
        return self.num_steps_left * self.share


def _choose_batch(candidates: Sequence[_Candidate], number: int) -> list[int]:
    """Return the ascending places in `candidates`, which are in the order of arrival, that form batch `number`."""
    if sum(candidate.share for candidate in candidates) <= WHOLE:
        return list(range(len(candidates)))
    order = sorted(range(len(candidates)), key=lambda place: candidates[place].work_left)
    if number % ROTATION == 0:
        longest = min(order, key=lambda place: (candidates[place].last_batch, place))
        order.remove(longest)
        order.insert(0, longest)
    chosen: list[int] = []
    taken = 0.0
    for place in order:
        if not chosen or taken + candidates[place].share <= WHOLE:
            chosen.append(place)
            taken += candidates[place].share
    return sorted(chosen)
