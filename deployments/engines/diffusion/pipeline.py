"""The denoise loop: requests join and leave a running batch at step boundaries.

A family (flux.py, sdxl.py) says how latents look and how its denoiser is called; the rest is here, and
rows.py says what may be merged.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import nn

from deployments.engines.build import read_config
from deployments.engines.diffusion.decoding import ImageDecoder
from deployments.engines.diffusion.rows import (
    DEFAULT_BOUNDS,
    BatchBounds,
    Part,
    Rows,
    build_rows,
    grouped,
    guided,
    image_size,
    memory_kind,
    merge_key,
    parts_of,
    split_rows,
)
from deployments.engines.diffusion.solver import SolverFactory
from deployments.engines.diffusion.state import (
    Branch,
    DenoiseState,
    check_request,
    numeric_failure,
    resolve_adapters,
    unknown_adapter,
)
from deployments.engines.memory_limits import MemoryLimits, run_in_parts
from deployments.engines.nn.lora import Pairs, applied_adapters, check_targets
from deployments.engines.protocol import ComputationFailed, DiffusionRequest, EngineError
from weights.adapters import LoraAdapter

VAE_FAILED: Final = "the latents are finite, but the picture that the VAE made of them is not"

logger = logging.getLogger(__name__)


class DenoisePipeline(ABC):
    """A model that turns text conditioning into pictures, step by step. One thread at a time."""

    denoiser_name: ClassVar[str]  # the component that predicts noise: "transformer" or "unet"

    def __init__(
        self,
        folder: Path,
        modules: Mapping[str, nn.Module],
        device: str | torch.device = "cpu",
        bounds: BatchBounds = DEFAULT_BOUNDS,
    ) -> None:
        for name in (self.denoiser_name, "vae"):
            if name not in modules:
                raise EngineError(f"{folder}: module {name!r} is missing (given: {', '.join(modules) or 'none'})")
        self.model_index = read_config(folder / "model_index.json")
        self.denoiser: Any = modules[self.denoiser_name]
        self.device = torch.device(device)
        self._decoder = ImageDecoder(modules["vae"])
        self._solvers = SolverFactory(folder, self.model_index)
        self._adapters: dict[str, Pairs] = {}
        self._bounds = bounds
        self._memory = MemoryLimits()

    # What a family says

    @property
    @abstractmethod
    def size_multiple(self) -> int:
        """Pixels that width and height must be multiples of."""

    @abstractmethod
    def _branches(
        self, request: DiffusionRequest, conditioning: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[Branch, ...], float]:
        """Text branches, and the scale of classifier-free guidance (1 without)."""

    @abstractmethod
    def _create_solver(self, request: DiffusionRequest, begin_index: int) -> Any:
        """A fresh solver with the request's timesteps."""

    @abstractmethod
    def _initial_latents(
        self, request: DiffusionRequest, solver: Any, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """Noise (num_images, …), drawn as stock draws it in `dtype` and scaled as the solver begins."""

    @abstractmethod
    def _forward(self, rows: Rows, height: int, width: int) -> torch.Tensor:
        """The denoiser's prediction, of the shape of `rows.latents`."""

    @abstractmethod
    def _latent_images(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Latents of states as the VAE takes them, (B, C, h, w), unscaled."""

    # The loop

    @property
    def resumable(self) -> bool:
        """Whether latents and a step index are all that a request needs to go on in another process."""
        return self._solvers.stateless

    def start(
        self,
        request: DiffusionRequest,
        conditioning: Mapping[str, torch.Tensor],
        *,
        resume_from: tuple[torch.Tensor, int] | None = None,
    ) -> DenoiseState:
        """A request before its first step, or before step `resume_from[1]` with the latents `resume_from[0]`.

        `conditioning` is what `assemble_conditioning` gives. Raises EngineError for what cannot run.
        """
        check_request(request, self.size_multiple)
        adapters = resolve_adapters(request.adapters, self._adapters)
        branches, cfg_scale = self._branches(request, conditioning)
        if resume_from is not None and not self.resumable:
            raise EngineError(f"{self.model_index['scheduler'][1]} keeps history: the request must start again")
        begin_index = resume_from[1] if resume_from else 0
        solver = self._create_solver(request, begin_index)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        # Stock draws in the text encoder's dtype; another dtype would be another picture.
        noise = self._initial_latents(request, solver, conditioning["prompt_embeds"].dtype, generator)
        latents = resume_from[0] if resume_from else noise
        if latents.shape != noise.shape:
            raise EngineError(f"latents have shape {tuple(latents.shape)}, expected {tuple(noise.shape)}")
        latents = latents.to(self.device, self.denoiser.dtype)
        return DenoiseState(request, solver, latents, branches, cfg_scale, generator, begin_index, adapters)

    def share_of_turn(self, state: DenoiseState) -> float:
        """The part of a forward, as large as bounds and memory allow, that a step of the state takes; may exceed 1."""
        most = min(self._memory.allowed(memory_kind(part)) for part in parts_of([state]))
        return state.num_rows / min(most, self._bounds.denoise_rows(state.request.height * state.request.width))

    def step(self, states: Sequence[DenoiseState]) -> None:
        """One denoise step for each state. When a forward raises, no state has moved.

        A state whose own solver raises keeps the reason as its `failure`, and the others move. Raises a state's
        failure when it is to step again, and EngineError when it has no steps left.
        """
        for state in states:
            if state.failure is not None:
                raise state.failure
            if state.done:
                raise EngineError(f"request {state.request.request_id!r} has no steps left")
        noises: dict[int, torch.Tensor] = {}  # by branch, each of which belongs to one state
        with torch.no_grad():
            for group in grouped(parts_of(states), merge_key):
                with applied_adapters(self.denoiser, group[0].state.adapters):
                    noise = self._predict(group)
                noises |= {id(part.branch): own for part, own in zip(group, split_rows(noise, group), strict=True)}
            predictions = [
                (state, guided(state, [noises[id(branch)] for branch in state.branches])) for state in states
            ]
            for state, prediction in predictions:
                self._advance(state, prediction)

    def decode(self, states: Sequence[DenoiseState]) -> list[np.ndarray | ComputationFailed]:
        """Pictures per state, uint8 (num_images, H, W, 3), or why there are none. Finished or not.

        By one VAE call per size, as far as the bounds and memory allow.
        """
        outcomes: dict[int, np.ndarray | ComputationFailed] = {
            id(state): failure for state in states if (failure := numeric_failure(state)) is not None
        }
        for group in grouped([state for state in states if id(state) not in outcomes], image_size):
            pictures, is_finite = self._decode_latents(torch.cat([state.latents for state in group]), group[0])
            first = 0
            for state in group:
                rows = slice(first, first := first + len(state.latents))
                outcomes[id(state)] = pictures[rows] if is_finite[rows].all() else ComputationFailed(VAE_FAILED)
        return [outcomes[id(state)] for state in states]

    def generate(
        self,
        request: DiffusionRequest,
        conditioning: Mapping[str, torch.Tensor],
        on_step: Callable[[DenoiseState], None] | None = None,
    ) -> np.ndarray:
        """The whole loop for one request: uint8 (num_images, H, W, 3). `on_step` sees every new state."""
        state = self.start(request, conditioning)
        while not state.done:
            self.step([state])
            if on_step is not None:
                on_step(state)
        return self.decode_alone(state)

    def decode_alone(self, state: DenoiseState) -> np.ndarray:
        """As `decode`, for one state. Raises ComputationFailed."""
        (outcome,) = self.decode([state])
        if isinstance(outcome, ComputationFailed):
            raise outcome
        return outcome

    # Adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names that a request may use."""
        return tuple(self._adapters)

    def add_adapter(self, name: str, adapter: LoraAdapter) -> None:
        """Makes `adapter` known as `name`. Raises EngineError when it does not fit the denoiser, or wants
        to change another component: applying half of it would be another picture than stock's.
        """
        if name in self._adapters:
            raise EngineError(f"adapter {name!r} is known already; drop it first")
        foreign = sorted(set(adapter.components) - {self.denoiser_name})
        if foreign:
            raise EngineError(
                f"{adapter.path}: changes {', '.join(foreign)}, only {self.denoiser_name!r} can be adapted"
            )
        check_targets(self.denoiser, adapter.components[self.denoiser_name])
        self._adapters[name] = adapter.to(self.device, self.denoiser.dtype).components[self.denoiser_name]

    def drop_adapter(self, name: str) -> None:
        """Forgets `name`; running states that use it keep it."""
        if name not in self._adapters:
            raise EngineError(unknown_adapter(name, self._adapters))
        del self._adapters[name]

    def _predict(self, group: Sequence[Part]) -> torch.Tensor:
        """The denoiser's prediction for all rows of the group, in as few forwards as bounds and memory allow."""
        rows, (height, width) = build_rows(group), image_size(group[0].state)
        parts = run_in_parts(
            lambda start, stop: self._forward(rows.part(start, stop), height, width),
            len(rows),
            self._bounds.denoise_rows(height * width),
            self._memory,
            memory_kind(group[0]),
        )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode_latents(self, latents: torch.Tensor, like: DenoiseState) -> tuple[np.ndarray, np.ndarray]:
        """As `ImageDecoder.decode`, for latents of states of the size of `like`."""
        height, width = image_size(like)
        parts = run_in_parts(
            lambda start, stop: self._decoder.decode(self._latent_images(latents[start:stop], height, width)),
            len(latents),
            self._bounds.decode_rows(height * width),
            self._memory,
            ("decode", height, width),
        )
        pictures, is_finite = zip(*parts, strict=True)
        return np.concatenate(pictures), np.concatenate(is_finite)

    def _advance(self, state: DenoiseState, prediction: torch.Tensor) -> None:
        options = self._solvers.step_options(state.generator)
        try:
            stepped = state.solver.step(prediction, state.timestep, state.latents, **options, return_dict=False)
        except Exception as error:
            logger.exception("request %r ends: its solver failed", state.request.request_id)
            step = f"step {state.step_index + 1} of {state.num_steps}"
            state.failure = ComputationFailed(f"{step}: the solver failed: {type(error).__name__}: {error}")
            return
        state.latents = stepped[0]
        state.are_finite.append(state.latents.isfinite().all())
        state.step_index += 1
