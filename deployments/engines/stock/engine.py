"""The stock engine: the `__call__` of a pipeline of diffusers, cut into turns where it calls its next module.

A turn is a denoise step, or a text's forward: the work between two calls of the pipeline's modules. While others
wait, a turn longer than one of their steps is cut: it ends before the next block of the module.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from deployments.engines.costs.memory_limits import forget_frames, is_out_of_memory
from deployments.engines.diffusion.previews import preview_steps
from deployments.engines.diffusion.ranked_tiles import VIDEO_CLASSES, LeadingTiles
from deployments.engines.graph.workspace import LendingMemory
from deployments.engines.nn.forwards import make_half_quick
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters
from deployments.engines.ranks.following import RankChannel
from deployments.engines.ranks.group import RankLost
from deployments.engines.records.protocol import (
    ComputationFailed,
    DenoiseTimes,
    DiffusionOutput,
    EngineError,
    SharedDevice,
    StockRequest,
)
from deployments.engines.stock.adapted import AdaptedModules
from deployments.engines.stock.beside import put_beside
from deployments.engines.stock.borrowed_modules import BorrowedModules, blocks_of
from deployments.engines.stock.footprints import METHODS
from deployments.engines.stock.inputs import CallInputs
from deployments.engines.stock.known import OUTPUTS, read_class
from deployments.engines.stock.latent_previews import decoding_arguments, only_decodes, shows_previews
from deployments.engines.stock.learned_words import reading_words
from deployments.engines.stock.loading import StockModel
from deployments.engines.stock.outputs import as_frames, as_pixels, as_samples, audio_channels, sample_rate
from deployments.engines.stock.own_draws import OwnDraws
from deployments.engines.stock.paused_call import Cancelled, PausedCall
from deployments.engines.stock.prompted import reading_images
from deployments.engines.stock.ranked_calls import DENOISERS, LeadingCalls
from deployments.engines.stock.sampled import check_sampled, noting_prompts, set_boundary
from deployments.engines.stock.texts import tell_texts
from weights.memory.devices import host_generator


class _Turn:
    """The turn of an engine on a device that others may share."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self.device: SharedDevice | None = None
        self._begun_s = 0.0

    def begin(self) -> None:
        """Begin another turn."""
        self._begun_s = self.now_s()

    def ends(self, is_block: bool) -> bool:
        """Return whether it ends before the call of a module that is next, or of a block within one.

        A turn that others wait for is no longer than their steps, but for a block.
        """
        if self.device is None:
            return True
        if not self.device.is_wanted:
            return False
        return not is_block or self.now_s() - self._begun_s >= (self.device.others_step_s or 0.0)


class StockEngine:
    """An `Engine` that makes images, video or audio by a model's stock pipeline, for one request after the other.

    Requests of a model do not take turns with each other: they have nothing to gain, and would each need memory. They
    do with the steps of other engines. `memory` lends what calls of modules take (`StockRequest.forward_bytes`).
    Other `ranks` compute parts of the calls of these denoisers, but for requests with images as prompts, and tiles of
    this VAE.
    """

    def __init__(
        self,
        model: StockModel,
        clock: Callable[[], float] = time.perf_counter,
        memory: LendingMemory | None = None,
        ranks: Mapping[str, RankChannel] = MappingProxyType({}),
    ) -> None:
        self.model = model
        for module in model.modules.values():
            if isinstance(module, nn.Module):
                make_half_quick(module)
        self._ranks = ranks
        self.inputs = CallInputs(model.cls)
        self._adapted = AdaptedModules(model.cls.__name__, model.modules)
        self.failures: dict[str, Exception] = {}
        self._runs: dict[str, _Run] = {}  # in the order in which they came
        self._turn = _Turn(clock)
        self._memory = memory

    @property
    def has_work(self) -> bool:
        return bool(self._runs)

    def add_request(self, request: StockRequest) -> None:
        """Take in a request. Raises EngineError for options that the class does not take."""
        if request.request_id in self._runs:
            raise EngineError(f"request id {request.request_id!r} is in use by a request that has not finished")
        unshared = DENOISERS if request.image_prompts else ()
        ranks = {name: channel for name, channel in self._ranks.items() if name not in unshared}
        run = _Run(self.model, request, self.inputs, self._adapted, self._turn, self._memory, ranks)
        self._runs[request.request_id] = run

    def yield_device(self, device: SharedDevice) -> None:
        """End turns where others want the device."""
        self._turn.device = device

    def request_cancel(self, request_id: str) -> None:
        """End the request at its pipeline's next call of a module."""
        run = self._runs.get(request_id)
        if run is not None:
            run.call.cancel()

    def abort(self, request_id: str) -> None:
        """Drop a request. Unknown ids are ignored."""
        run = self._runs.pop(request_id, None)
        if run is not None:
            run.call.close()

    def step(self) -> list[DiffusionOutput]:
        """Run the oldest request to its next call of a module."""
        self.failures = {}
        self._turn.begin()
        request_id, run = next(iter(self._runs.items()))
        if not run.resume():
            return run.take_news()
        del self._runs[request_id]
        try:
            made = run.made()
        except RankLost:
            raise
        except Exception as error:
            forget_frames(error)
            self.failures[request_id] = error
            return []
        return [replace(made, step_index=run.num_done, num_steps=run.num_steps, times=run.times())]


class _Run:
    """The call of one request, the steps counted by its progress bars, and their times."""

    def __init__(
        self,
        model: StockModel,
        request: StockRequest,
        inputs: CallInputs,
        adapted: AdaptedModules,
        turn: _Turn,
        memory: LendingMemory | None,
        ranks: Mapping[str, RankChannel],
    ) -> None:
        """Raise EngineError for what the class cannot be called with."""
        check_sampled(request, has_strength=inputs.takes("strength"))
        self.request = request
        self._inputs, self._arguments = inputs, inputs.arguments_of(request)
        self.call = PausedCall(self._make, f"pipeline {request.request_id}")
        self.num_done = self.num_steps = 0
        self._model, self._adapted, self._turn = model, adapted, turn
        self._memory = memory
        self._is_lent = False  # the memory of the running module call
        self._ranks = ranks
        self._is_among_ranks = False  # the running module call: others wait within it
        self._num_told = 0
        self._preview: np.ndarray | None = None
        self._num_previews = 0
        self._added = turn.now_s()
        self._started = self._stepped = self._ended = self._added

    def resume(self) -> bool:
        """Run to the next call of a module; return whether the call has ended."""
        if self._started == self._added:
            self._started = self._turn.now_s()
        has_ended = self.call.resume()
        self._ended = self._turn.now_s()
        return has_ended

    def made(self) -> DiffusionOutput:
        """Return the result of the ended call, without its steps and times.

        Raises EngineError for a refusal before the first step, ComputationFailed, RankLost, and errors of memory.
        """
        name = self._model.cls.__name__
        try:
            return self.call.outcome()
        except (EngineError, MemoryError, RankLost):
            raise
        except Cancelled:
            raise ComputationFailed(f"{name} was ended") from None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if self.num_done == 0 and isinstance(error, ValueError | TypeError):  # of its check_inputs
                raise EngineError(f"{name}: {error}") from error
            raise ComputationFailed(f"{name}: {error}") from error

    def times(self) -> DenoiseTimes:
        """Return the seconds before its first turn, to its last step, and after that."""
        stepped = max(self._stepped, self._started)
        return DenoiseTimes(self._started - self._added, stepped - self._started, self._ended - stepped)

    @property
    def has_news(self) -> bool:
        """Return whether there is unreported progress."""
        return self._preview is not None or (self.request.reports_steps and self.num_done > self._num_told)

    def take_news(self) -> list[DiffusionOutput]:
        """Return the progress not reported yet."""
        if not self.has_news:
            return []
        self._num_told = self.num_done
        preview, self._preview = self._preview, None
        index = None if preview is None else self._num_previews - 1
        output = DiffusionOutput(self.request.request_id, self.num_done, self.num_steps, preview=preview)
        return [replace(output, preview_index=index)]

    def note_steps(self, count: int) -> None:
        """Count done steps."""
        self.num_done += count
        self.num_steps = max(self.num_steps, self.num_done)
        self._stepped = self._turn.now_s()

    def _make(self) -> DiffusionOutput:
        """Call the pipeline, in a thread of its own."""
        pipeline = self._open_pipeline()
        for one in (pipeline, *(part for part in vars(pipeline).values() if hasattr(part, "progress_bar"))):
            one.progress_bar = self._progress_bar
        modules = [one for one in self._model.modules.values() if isinstance(one, nn.Module)]
        given = {**self._arguments, **self._audio_for(pipeline), **put_beside(pipeline, self.request)}
        shown = {}
        if self.request.num_previews and self.request.texts is not None and shows_previews(self._model.cls):
            shown = {"callback_on_step_end": self._show_step}
        spans = self._adapted.spans_of(pipeline, self.request.adapters, self.request.loras)
        words = reading_words(pipeline, self.request.adapters, self.request.loras)
        images = reading_images(pipeline, self.request.image_prompts, self.request.prompters)
        norms = noting_prompts(pipeline, self.request.sampler)
        with _on_device(modules), self._turns(modules, spans), words, images as seen, norms:
            output = pipeline(**given, **shown, **seen)
        makes = read_class(self._model.cls.__name__).makes or "images"
        made = next((output[name] for name in OUTPUTS[makes] if name in output), None)
        if makes == "audio":
            rate = sample_rate(pipeline)
            return DiffusionOutput(self.request.request_id, 0, 0, samples=as_samples(made), sample_rate=rate)
        pixels = as_frames(made) if makes == "video" else as_pixels(made)
        return DiffusionOutput(self.request.request_id, 0, 0, pixels)

    def _audio_for(self, pipeline: Any) -> dict[str, Any]:
        """Return the request's audio in the form for the pipeline's encoder. Raises EngineError for too little."""
        if not self.request.audio:
            return {}
        rate, least = sample_rate(pipeline), getattr(pipeline.vae, "hop_length", 1)
        for name, sound in self.request.audio.items():
            if sound.seconds * rate < least:
                raise EngineError(
                    f"{name}: {sound.seconds:g} seconds of audio, the model hears {least / rate:g} at least"
                )
        found = self._inputs.audio_of(self.request, rate, audio_channels(pipeline))
        weights = next(pipeline.vae.parameters())
        return {name: one.to(weights) if isinstance(one, torch.Tensor) else one for name, one in found.items()}

    def _open_pipeline(self) -> Any:
        """Return a pipeline with the request's scheduler and texts."""
        options = self.request.scheduler, self.request.scheduler_options, self.request.sampler
        pipeline = self._model.create_pipeline(*options)
        set_boundary(pipeline, self.request)
        if self.request.texts is not None:
            modules = [one for one in self._model.modules.values() if isinstance(one, nn.Module)]
            tell_texts(pipeline, self.request.texts, _device_of(modules) or torch.device("cpu"))
        return pipeline

    def _show_step(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """Decode the latents after a step with a preview. A preview that cannot be made is left out."""
        if step + 1 in preview_steps(self.num_steps, self.request.num_previews):
            decoder = self._open_pipeline()
            only_decodes(decoder)
            generator = host_generator(self.request.seed)
            try:
                output = decoder(**decoding_arguments(self._arguments, tensors["latents"], generator))
                made = next(output[name] for name in OUTPUTS["images"] if name in output)
                self._preview = as_pixels(made)[..., :3]  # a preview is a JPEG to some
                self._num_previews += 1
            except Exception as error:
                forget_frames(error)
        return {}

    def _progress_bar(self, iterable: Iterable[Any] | None = None, total: int | None = None) -> _Steps:
        steps = _Steps(self, iterable, total)
        self.num_steps += steps.total or 0
        return steps

    @contextlib.contextmanager
    def _turns(self, modules: list[nn.Module], spans: list[AdaptedSpan]) -> Iterator[None]:
        """Pause at calls of modules and of their blocks, if the turn ends there. LoRAs are in place in its turns alone.

        HAZARD: other pipelines may run the same modules meanwhile. Their calls come here as well, in their threads.
        """
        borrowed = _Borrowed(BorrowedModules(modules), OwnDraws(self.request.seed, _device_of(modules)))
        begin = functools.partial(self._begin_call, borrowed, False)
        begin_block = functools.partial(self._begin_call, borrowed, True)
        blocks = dict.fromkeys(block for module in modules for block in blocks_of(module))
        hooks = [module.register_forward_pre_hook(begin) for module in modules]
        hooks += [block.register_forward_pre_hook(begin_block) for block in blocks if block not in modules]
        borrowed.take()
        self._put_ranks(spans)
        self._put_lenders(borrowed)
        try:
            with applied_adapters(spans, by_keyword=True):
                yield
        finally:
            borrowed.end()
            for hook in hooks:
                hook.remove()

    def _begin_call(self, borrowed: _Borrowed, is_block: bool, *_: Any) -> None:
        """Yield the turn before a module's call, if it ends here. Raises Cancelled."""
        if not self.call.is_here or self._is_among_ranks:
            return
        if self.call.is_cancelled or self.has_news or self._turn.ends(is_block):
            self._pause(borrowed)

    def _pause(self, borrowed: _Borrowed) -> None:
        borrowed.give_back()
        try:
            self.call.pause()
        finally:
            borrowed.take()

    def _put_ranks(self, spans: Sequence[AdaptedSpan]) -> None:
        """Make this call's denoisers run on all ranks, with the request's LoRAs, and its VAE decode on all of them."""
        for name, channel in self._ranks.items():
            module: Any = self._model.modules[name]
            if name in DENOISERS:
                run = LeadingCalls(channel, module, spans).run
                vars(module)["forward"] = self._among_ranks(module.forward, run)
            elif type(module).__name__ in VIDEO_CLASSES:
                vars(module)["decode"] = self._decoder(LeadingTiles(channel, module), module, module.decode)

    def _decoder(self, tiles: LeadingTiles, vae: Any, decode: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return tiles.run(vae, functools.partial(decode, *args, **kwargs))

        return self._among_ranks(decode, run)

    def _among_ranks(self, alone: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of a module: `run` for this call's own use of it, and `alone` for any other."""

        @functools.wraps(alone)  # some callers inspect its parameters
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.call.is_here or self._is_among_ranks:
                return alone(*args, **kwargs)
            self._is_among_ranks = True
            try:
                return run(*args, **kwargs)
            finally:
                self._is_among_ranks = False

        return call

    def _put_lenders(self, borrowed: _Borrowed) -> None:
        """Make this call's methods of modules run in lent memory, if it is planned."""
        if (memory := self._memory) is None:
            return
        for name, module in self._model.modules.items():
            for method in METHODS:
                if nbytes := self.request.forward_bytes.get(f"{name}.{method}"):
                    vars(module)[method] = self._lender(getattr(module, method), memory, nbytes, borrowed)

    def _lender(
        self, method: Callable[..., Any], memory: LendingMemory, nbytes: int, borrowed: _Borrowed
    ) -> Callable[..., Any]:
        """Return the method with its bytes lent while it runs, once forwards that pause have given back enough.

        The request has its room since its admission. Memory that others of this kind hold at a pause is extra.
        """

        @functools.wraps(method)  # some callers inspect its parameters
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.call.is_here or self._is_lent:
                return method(*args, **kwargs)
            while memory.is_lending and memory.room_bytes() < nbytes:
                self._pause(borrowed)
            self._is_lent = True
            try:
                with memory.lend(nbytes):
                    return method(*args, **kwargs)
            finally:
                self._is_lent = False

        return call


class _Borrowed:
    """Modules and random streams: in each turn a call finds them as it left them, and leaves them as it found them."""

    def __init__(self, modules: BorrowedModules, draws: OwnDraws) -> None:
        self._modules, self._draws = modules, draws

    def take(self) -> None:
        self._modules.take()
        self._draws.take()

    def give_back(self) -> None:
        self._draws.give_back()
        self._modules.give_back()

    def end(self) -> None:
        self._draws.give_back()
        self._modules.end()


class _Steps(tqdm):
    """A progress bar that shows nothing and counts for a run."""

    def __init__(self, run: _Run, iterable: Iterable[Any] | None, total: int | None) -> None:
        super().__init__(iterable, total=total, disable=True)
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()

    def update(self, n: float | None = 1) -> None:
        self._run.note_steps(int(n or 0))


@contextlib.contextmanager
def _on_device(modules: list[nn.Module]) -> Iterator[None]:
    """Make the modules' device the current one of this thread, which starts with the first device."""
    device = _device_of(modules)
    with torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext():
        yield


def _device_of(modules: list[nn.Module]) -> torch.device | None:
    return next((parameter.device for module in modules for parameter in module.parameters()), None)
