"""The diffusion engine: choose a batch, denoise it, decode ended requests. Single-threaded; the caller decides when.

A turn is one forward for a batch, or one decode; `batch_selection.py` chooses the batch by the costs of
earlier turns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from deployments.engines.costs.memory_limits import forget_frames, is_out_of_memory
from deployments.engines.costs.step_costs import StepCosts
from deployments.engines.diffusion.batch_selection import ArrivingLoad, Candidate, FairOrder, select_batch
from deployments.engines.diffusion.checkpoints import restore_checkpoint, save_checkpoint
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.diffusion.previews import preview_steps
from deployments.engines.diffusion.rows import Work
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.ranks.group import RankLost
from deployments.engines.records.protocol import (
    ConditionedRequest,
    DenoiseTimes,
    DiffusionOutput,
    EngineError,
    SharedDevice,
    StepAborted,
)

T = TypeVar("T")
_MAX_AHEAD: Final = 2  # turns begun by the host and not ended by the device: later choices have more information


@dataclass(slots=True, eq=False)
class _Running:
    """A running request. Times are on the clock: of its arrival, its deadline, its first step, its last checkpoint
    (or its first step), and its last step.

    `fair_end` is that of `FairOrder`.
    """

    request: ConditionedRequest
    state: DenoiseState
    added: float
    fair_end: float
    deadline_s: float | None
    started: float | None = None
    saved: float = 0.0
    denoised: float = 0.0


class DiffusionEngine:
    """An `Engine` that makes images for many requests of one pipeline, as many in one batch as bounds and memory allow.

    A step denoises a batch once or, when requests have had their last step, decodes some of those. On the CPU images
    are those of a request alone, bit for bit (see rows.py). When a batch fails, its requests run again one by one, so
    that an error stays with the request that caused it. `costs` are those of an earlier run, or none.
    """

    def __init__(
        self,
        pipeline: DenoisePipeline,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pipeline = pipeline
        self.failures: dict[str, Exception] = {}
        self._requests: dict[str, _Running] = {}
        self._cancelled: set[str] = set()
        self.costs = costs or StepCosts()
        self._clock = clock
        self._order, self._load = FairOrder(), ArrivingLoad()
        self._stopwatch = _Stopwatch(pipeline.device, clock)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: ConditionedRequest) -> None:
        """Take in a request, and draw its noise.

        Raises:
            EngineError: as `DenoisePipeline.start` does, or for the id of an unfinished request.
        """
        if request.request_id in self._requests:
            raise EngineError(f"request id {request.request_id!r} is in use by a request that has not finished")
        extra = {"posteriors": request.posteriors} if request.posteriors else {}
        state = self.pipeline.start_request(request.request, request.conditioning, request.adapters, **extra)
        if request.resume_from is not None:
            restore_checkpoint(state, request.resume_from)
        state.preview_at = preview_steps(state.num_steps, request.num_previews)
        if not self._requests:
            self._order = FairOrder()
        now = self._clock()
        steps, decode = self.pipeline.step_work(state), self.pipeline.decode_work(state)
        work_s = self.costs.seconds_per_row(steps.kind) * steps.rows * state.num_forwards_left
        work_s += self.costs.seconds_per_row(decode.kind) * decode.rows
        self._load.arrive(now, work_s)
        deadline_s = None if request.timeout_s is None else now + request.timeout_s
        self._requests[request.request_id] = _Running(request, state, now, self._order.arrive(work_s), deadline_s)

    def request_cancel(self, request_id: str) -> None:
        """End a running denoise step before its next block, if none of its requests is wanted any more.

        Callable from any thread, at any time; `abort` follows.
        """
        self._cancelled.add(request_id)

    def abort(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        self._cancelled.discard(request_id)
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._order.leave(running.fair_end)

    def migrate_out(self, request_id: str) -> DiffusionOutput | None:
        """Drop a request that another process will continue, and return its last output.

        None for a request that stays: it is unknown, has had its last step, or has no checkpoint.
        """
        running = self._requests.get(request_id)
        if running is None or running.state.done:
            return None
        request, state = running.request, running.state
        has_moved = running.started is not None
        checkpoint = save_checkpoint(state, request.conditioning) if has_moved else request.resume_from
        if has_moved and checkpoint is None:
            return None
        self.abort(request_id)
        return DiffusionOutput(request_id, state.step_index, state.num_steps, checkpoint=checkpoint, is_moved=True)

    def yield_device(self, device: SharedDevice) -> None:
        """Do nothing: a step is a denoise step, and not cut any further."""

    def step(self) -> list[DiffusionOutput]:
        """Denoise a batch, or decode requests without steps left."""
        self.failures = {}
        outputs = self._extrapolate()
        if ended := [running for running in self._requests.values() if running.state.done]:
            return outputs + self._decode(ended)
        try:
            return outputs + (self._denoise(list(self._requests.values())) if self._requests else [])
        except StepAborted:
            for request_id in self._cancelled & self._requests.keys():
                self.abort(request_id)
            return outputs

    def _extrapolate(self) -> list[DiffusionOutput]:
        """Move all requests on through steps without a forward."""
        outputs = []
        while moving := [running for running in self._requests.values() if running.state.is_extrapolated]:
            outputs += self._moved(moving, _run_or_retry(self._step_states, [running.state for running in moving]))
        return outputs

    def _step_states(self, states: Sequence[DenoiseState]) -> list[Exception | None]:
        ids = {id(running.state): running.request.request_id for running in self._requests.values()}
        self.pipeline.step(states, partial(self._check_wanted, [ids[id(state)] for state in states]))
        return [state.failure for state in states]

    def _check_wanted(self, request_ids: Sequence[str]) -> None:
        """Raise StepAborted if none of these requests is wanted any more."""
        if self._cancelled and self._cancelled.issuperset(request_ids):
            raise StepAborted

    def _run_turn(
        self,
        waiting: Sequence[_Running],
        work_of: Callable[[DenoiseState], Work],
        run: Callable[[Sequence[DenoiseState]], Sequence[T]],
    ) -> tuple[list[_Running], list[T | Exception]]:
        """Run the requests of this turn; return them and the outcome of each, and learn the cost of the turn."""
        now = self._clock()
        candidates = []
        for running in waiting:
            work, end, deadline_s = work_of(running.state), running.fair_end, running.deadline_s
            left_s = self.costs.seconds(work.kind, work.rows) * max(1, running.state.num_forwards_left)
            candidates.append(Candidate(work.keys, work.kind, work.rows, work.max_rows, end, left_s, deadline_s))
        chosen = select_batch(candidates, self.costs, now, self._load.share(now))
        kind, rows = candidates[chosen[0]].kind, sum(candidates[place].rows for place in chosen)
        batch = [waiting[place] for place in chosen]
        begun = self._stopwatch.begin()
        for running in batch:
            if running.started is None and not running.state.done:
                running.started = running.saved = now
        outcomes = _run_or_retry(run, [running.state for running in batch])
        # A turn with a failure, and perhaps with runs of single requests, says nothing about costs.
        is_sound = not any(isinstance(outcome, Exception) for outcome in outcomes)
        self._order.work(self.costs.seconds_per_row(kind) * rows)
        self._stopwatch.end(begun, lambda seconds: self.costs.note_call(kind, rows, seconds) if is_sound else None)
        return batch, outcomes

    def _denoise(self, waiting: Sequence[_Running]) -> list[DiffusionOutput]:
        failures: Sequence[Exception | None]
        batch, failures = self._run_turn(waiting, self.pipeline.step_work, self._step_states)
        return self._moved(batch, failures)

    def _moved(self, batch: Sequence[_Running], failures: Sequence[Exception | None]) -> list[DiffusionOutput]:
        """Return the outputs due after a step of these requests. End those whose step failed."""
        now = self._clock()
        moved = []
        for running, failure in zip(batch, failures, strict=True):
            if failure is not None:
                self._fail(running, failure)
                continue
            running.denoised = now
            moved.append(running)
        previews = self._previews([running for running in moved if running.state.expected is not None])
        return [output for running in moved if (output := self._progress(running, previews)) is not None]

    def _previews(self, asked: Sequence[_Running]) -> dict[str, npt.NDArray[np.uint8]]:
        """Return previews by request. A preview that cannot be made is left out: the request goes on without it."""
        found = _run_or_retry(self.pipeline.decode_previews, [running.state for running in asked]) if asked else []
        return {
            running.request.request_id: preview
            for running, preview in zip(asked, found, strict=True)
            if isinstance(preview, np.ndarray)
        }

    def _progress(self, running: _Running, previews: Mapping[str, npt.NDArray[np.uint8]]) -> DiffusionOutput | None:
        """Return the output due after the request's step, or None."""
        request, state = running.request, running.state
        preview = previews.get(request.request_id)
        checkpoint = self._checkpoint(running)
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

    def _checkpoint(self, running: _Running) -> bytes | None:
        """Return a checkpoint when one is due and possible."""
        request, state = running.request, running.state
        now, every_steps, every_s = self._clock(), request.checkpoint_steps, request.checkpoint_interval_s
        is_due = every_steps > 0 and state.step_index % every_steps == 0
        if state.done or not (is_due or 0 < every_s <= now - running.saved):
            return None
        running.saved = now  # also without success, so that it is not tried at every step
        return save_checkpoint(state, request.conditioning)

    def _decode(self, ended: Sequence[_Running]) -> list[DiffusionOutput]:
        batch, outcomes = self._run_turn(ended, self.pipeline.decode_work, self.pipeline.decode)
        now = self._clock()
        outputs = []
        for running, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._fail(running, outcome)
                continue
            request_id, state = running.request.request_id, running.state
            del self._requests[request_id]
            started = running.started or running.added
            times = DenoiseTimes(started - running.added, running.denoised - started, now - running.denoised)
            images, latents = (None, outcome) if isinstance(outcome, torch.Tensor) else (outcome, None)
            outputs.append(DiffusionOutput(request_id, state.step_index, state.num_steps, images, latents, times))
        return outputs

    def _fail(self, running: _Running, error: Exception) -> None:
        request_id = running.request.request_id
        self.failures[request_id] = error
        self.abort(request_id)


def _run_or_retry(
    work: Callable[[Sequence[DenoiseState]], Sequence[T]], states: Sequence[DenoiseState]
) -> list[T | Exception]:
    """Return the outcome of `work` for each state, from one call for all; if that fails, from one call for each."""
    try:
        return list(work(states))
    except (StepAborted, RankLost):
        raise
    except Exception as error:
        if len(states) > 1 or is_out_of_memory(error):
            forget_frames(error)  # they refer to the tensors of the failed call, whose memory the next ones need
        if len(states) == 1:
            return [error]
    return [outcome for state in states for outcome in _run_or_retry(work, [state])]


class _Stopwatch:
    """Times one turn after the other without waiting for the device.

    A turn on the host ends with its call; on a GPU the device's own clock tells.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_ahead = device.type == "cuda"
        self._pending: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def begin(self) -> Any:
        """Begin a turn and return its mark, once few enough turns are under way."""
        while self._pending and (len(self._pending) >= _MAX_AHEAD or self._pending[0][1].query()):
            begun, ended, note = self._pending.popleft()
            ended.synchronize()
            note(begun.elapsed_time(ended) / 1e3)
        return _event() if self._is_ahead else self._clock()

    def end(self, begun: Any, note: Callable[[float], None]) -> None:
        """End the turn of that mark; `note` gets its seconds, now or after a later turn."""
        if self._is_ahead:
            self._pending.append((begun, _event(), note))
        else:
            note(self._clock() - begun)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
