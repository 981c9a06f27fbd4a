"""The denoise loop, in which requests join and leave a batch at step boundaries, and the decoding of latents.

A family (`families/`) defines the form of latents and the call of its denoiser; the rest is here. rows.py decides which
requests share a forward.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from deployments.engines.costs.memory_limits import MemoryLimits, run_in_parts
from deployments.engines.diffusion.decoding import VAE_FAILED, LatentsDecoder, VaeAlone, kernels
from deployments.engines.diffusion.extrapolation import Extrapolation, noise_levels
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.families.base import Branch, Family, ImageSize, Rows
from deployments.engines.diffusion.first_latents import LatentsMaker
from deployments.engines.diffusion.fitted_loras import FittedLoras
from deployments.engines.diffusion.image_codec import ImageCodec, RecordingCodec, ReplayingCodec
from deployments.engines.diffusion.image_prompts import ImagePrompter, make_image_prompts, prompted_by_images
from deployments.engines.diffusion.modulation import Modulation
from deployments.engines.diffusion.previews import expected_latents
from deployments.engines.diffusion.ranked_rows import Forward, LeadingRows, RowsFollower
from deployments.engines.diffusion.ranked_tiles import LeadingTiles
from deployments.engines.diffusion.rows import (
    DEFAULT_BOUNDS,
    BatchBounds,
    Condition,
    Work,
    batch_key,
    build_rows,
    by_adapters,
    decode_key,
    grouped,
    guided,
    image_size,
    memory_kind,
    parts_of,
    split_rows,
    workspace_kind,
)
from deployments.engines.diffusion.samplers import SigmaSolver, StepNoise
from deployments.engines.diffusion.solvers import SolverFactory, step_options
from deployments.engines.diffusion.state import (
    DenoiseState,
    check_request,
    encoded_references,
    make_controls,
    numeric_failure,
    reference_sizes,
    take_branches,
)
from deployments.engines.graph.card_graphs import replays_on
from deployments.engines.graph.replay import Replays
from deployments.engines.graph.workspace import UNBOUNDED, Workspace
from deployments.engines.libraries.config_files import read_config
from deployments.engines.native.library import load_kernels
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.nn.few_rows import HOSTS
from deployments.engines.nn.forwards import checked_blocks, make_quick, outer_blocks, replaced_forwards
from deployments.engines.nn.lora import Batch, MergedLayers, applied_adapters
from deployments.engines.ranks.following import RankChannel
from deployments.engines.ranks.group import RankGroup
from deployments.engines.records.protocol import ComputationFailed, DiffusionRequest, EngineError
from weights.memory.devices import computes_on_host, host_generator
from weights.operations.adapters import LoraAdapter, LoraPair

Adapter = LoraAdapter | nn.Module | ImagePrompter
# What each adapter of a request adds to its forwards, with its name: the pairs of a LoRA by module, a ControlNet, or
# the tokens that an IP-Adapter makes of an image.
AdapterShapes = Sequence[tuple[str, Mapping[str, LoraPair] | nn.Module | int | None]]
PREVIEW_VAE: Final = "preview_vae"  # the name of a small VAE among the modules

logger = logging.getLogger(__name__)


class DenoisePipeline:
    """A model that turns text conditioning into images, step by step. One thread at a time.

    If denoiser and VAE have no room together, there are two pipelines, each with one of them blank (`skeletons.py`):
    one encodes the images of a request (`encode_inputs`) and decodes its latents, the other runs its steps.
    """

    def __init__(
        self,
        family: Family,
        folder: Path,
        modules: Mapping[str, nn.Module],
        device: str | torch.device = "cpu",
        bounds: BatchBounds = DEFAULT_BOUNDS,
        workspace: Workspace = UNBOUNDED,
        replays: Replays | None = None,
        ranks: RankChannel | None = None,
        tiles: RankChannel | None = None,
    ) -> None:
        """`replays` are those of this pipeline's denoiser; without them it runs each forward anew. Of several `ranks`
        this is the first, and has the requests of all. Those of `tiles` have its VAE.
        """
        for name in (family.denoiser_name, "vae"):
            if name not in modules:
                raise EngineError(f"{folder}: module {name!r} is missing (given: {', '.join(modules) or 'none'})")
        self.model_index = read_config(folder / "model_index.json")
        self.family = family = family.variant(self.model_index)
        self.denoiser: Any = modules[family.denoiser_name]
        self.device = torch.device(device)
        self._dtype: Any = self.denoiser.dtype  # read once: diffusers goes through all modules for it
        shared_tiles = None if tiles is None else LeadingTiles(tiles, modules["vae"])
        self._codec = ImageCodec(modules["vae"], bounds.max_vae_bytes, shared_tiles)
        self._solvers = SolverFactory(folder, self.model_index)
        self._loras = FittedLoras(family, family.denoiser_name, self.denoiser)
        self._modulation = Modulation(family, self.denoiser)
        self._blocks = outer_blocks(self.denoiser)
        self._bounds = bounds
        self._workspace = workspace
        self._memory = MemoryLimits()
        self._decoder = self._previewer = LatentsDecoder(family, self._codec, bounds, self._memory, workspace)
        config: Any = self.denoiser.config
        self.vae_alone = VaeAlone(family, self._codec, config, self._decoder)
        if PREVIEW_VAE in modules:
            small = ImageCodec(modules[PREVIEW_VAE], bounds.max_vae_bytes)
            self._previewer = LatentsDecoder(family, small, bounds, MemoryLimits(), workspace)
        self._replays = replays_on(replays, self.device, self.denoiser, workspace)
        if self.device.type in HOSTS:
            load_kernels()  # compiled now, if need be, not while the first image waits
        self._ranks = None if ranks is None else LeadingRows(ranks, self)
        if self._ranks is not None and self._ranks.are_whole:
            self._replays, self._blocks = None, []  # of all ranks' exchanges, and where one rank could stop alone
        for name in modules.keys() & {family.denoiser_name, "vae", PREVIEW_VAE}:
            make_batch_invariant(modules[name])
            make_quick(modules[name])
        if reason := family.network.refusal(config):
            raise EngineError(f"{folder}: {reason}")

    def start_request(
        self,
        request: DiffusionRequest,
        conditioning: Mapping[str, torch.Tensor],
        adapters: Mapping[str, Adapter] | None = None,
        posteriors: Sequence[torch.Tensor] = (),
    ) -> DenoiseState:
        """Return a request before its first step.

        `conditioning` is from the family's `Texts.assemble`; `adapters` has the LoRAs, ControlNets
        and IP-Adapters of the request. A LoRA's effect on text encoders is in the conditioning.
        `posteriors` are those of `encode_inputs`, if the VAE is blank. Raises EngineError if it cannot run.
        """
        codec = ReplayingCodec(self._codec.vae, posteriors, self.device) if self._codec.is_blank else self._codec
        return self._start(request, conditioning, adapters, codec)

    def merge_adapter(self, request: DiffusionRequest, adapters: Mapping[str, Adapter]) -> None:
        """Prepare a request that `merges_adapter` for `start_request`, in any thread. Raises EngineError."""
        self._loras.forms_of(request, adapters)

    def adapter_shapes(self, request: DiffusionRequest, adapters: Mapping[str, Adapter]) -> AdapterShapes:
        """Return the shapes that a request's adapters add to its forwards, without a merged LoRA (`adapter_names`).

        Pairs are tensors without memory; a ControlNet is itself, None if it is missing. Any thread may call it. Raises
        EngineError as `start_request` does.
        """
        nets = {name: one for name, one in adapters.items() if isinstance(one, nn.Module)}
        tokens = {name: one.num_tokens for name, one in adapters.items() if isinstance(one, ImagePrompter)}
        beside: list[tuple[str, Any]] = [(use.name, nets.get(use.name)) for use in request.control]
        beside += [(use.name, tokens.get(use.name)) for use in request.image_prompts]
        if request.merges_adapter or not request.adapters:
            return beside
        paths = {layer: path for path, layer in self.denoiser.named_modules()}
        found, _ = self._loras.forms_of(request, adapters)
        names = sorted(use.name for use in request.adapters)
        pairs_of = [{paths[layer]: pair.to("meta") for layer, pair in own.items()} for own, _ in found]
        return [*zip(names, pairs_of, strict=True), *beside]

    def encode_inputs(
        self,
        request: DiffusionRequest,
        conditioning: Mapping[str, torch.Tensor],
        adapters: Mapping[str, Adapter],
    ) -> tuple[torch.Tensor, ...]:
        """Return the VAE's encodings of a request's images, for a `start_request` whose VAE is blank.

        The denoiser may be blank. Raises as `start_request` does; LoRAs and IP-Adapters are not looked at.
        """
        codec = RecordingCodec(self._codec)
        self._start(
            replace(request, adapters=(), image_prompts=(), merges_adapter=False), conditioning, adapters, codec
        )
        return tuple(codec.noted)

    def decode_latents(self, request: DiffusionRequest, latents: torch.Tensor) -> np.ndarray | torch.Tensor:
        """Return the result of latents denoised by the other pipeline: images, uint8 (num_images, H, W, 3), or latents
        as results have them, as the request wants.

        Raises ComputationFailed.
        """
        if request.ends_with_latents:
            return self._decoder.handed_out(latents.to(self.device), (request.height, request.width))
        runs_alone = request.deterministic and not computes_on_host(self.device)
        size, may_change = (request.height, request.width), not request.deterministic
        images, is_finite = self._decoder.decode(latents.to(self.device), size, may_change, runs_alone)
        if not is_finite.all():
            raise ComputationFailed(VAE_FAILED)
        return images

    def _start(
        self,
        request: DiffusionRequest,
        conditioning: Mapping[str, torch.Tensor],
        adapters: Mapping[str, Adapter] | None,
        codec: ImageCodec,
    ) -> DenoiseState:
        family, multiple = self.family, self.family.latents.size_multiple(self._codec.scale_factor)
        check_request(request, multiple)
        request = replace(request, references=encoded_references(request, family, multiple))
        beside = tuple(reference_sizes(request, family, self._codec, multiple))
        size = self._codec.size(request.height, request.width)._replace(references=beside)
        known = adapters or {}
        pairs, merged = self._loras.forms_of(request, known)
        branches = self._branches(request, conditioning)
        maker = LatentsMaker(family, codec, self.denoiser.config, self.device)
        solver, generator = _solver_of(request, size, self._solvers, maker, self._dtype), host_generator(request.seed)
        controls = make_controls(request, known, family, self.denoiser, codec, generator, self.device)
        image_prompts = make_image_prompts(request, known, family, self.denoiser, len(branches))
        # Stock draws in the text encoder's dtype; another dtype would be another image.
        runs_alone = request.deterministic and not computes_on_host(self.device)
        drawn_dtype = torch.float32 if family.latents.are_float32 else conditioning["prompt_embeds"].dtype
        with kernels(runs_alone):
            if isinstance(solver, SigmaSolver):
                first = maker.sampled_latents(request, size, solver, self._dtype)
                generator = solver.step_generator(request.seed)
            else:
                first = maker.first_latents(request, size, solver, generator, drawn_dtype)
        are_float32 = family.latents.are_float32 or request.sampler is not None
        latents = first.latents.to(self.device, torch.float32 if are_float32 else self._dtype)
        cfg_scale = family.guidance_of(request).scale(request)
        extrapolation = None
        if request.acceleration is not None:
            levels = noise_levels(solver)[first.first_step :]
            extrapolation = Extrapolation(request.acceleration, levels, self._workspace)
        return DenoiseState(
            request,
            solver,
            latents,
            branches,
            cfg_scale,
            generator,
            size,
            family.latents.batch_shape(size),
            adapters=pairs,
            merged=merged,
            first_step=first.first_step,
            kept=first.kept,
            extra_channels=first.extra_channels,
            controls=controls,
            image_prompts=image_prompts,
            runs_alone=runs_alone,
            extrapolation=extrapolation,
        )

    def _branches(self, request: DiffusionRequest, conditioning: Mapping[str, torch.Tensor]) -> tuple[Branch, ...]:
        family, sampler = self.family, request.sampler
        if sampler is not None and sampler.zeroes_negative:
            negative = {name: one for name, one in conditioning.items() if name.startswith("negative_")}
            conditioning = {**conditioning, **family.texts.zeroed(negative)}
        is_guided = family.guidance_of(request).uses_negative(request, "negative_prompt_embeds" in conditioning)
        widths = family.network.text_widths(self.denoiser)
        # No ControlNet of diffusers uses a mask.
        padded_length = family.texts.padded_length if family.texts.masks and not request.control else None
        return take_branches(conditioning, widths, is_guided, self.device, self._dtype, padded_length=padded_length)

    def step_work(self, state: DenoiseState) -> Work:
        """Return the work of one step."""
        parts = parts_of([state])
        bound = self._bounds.denoise_rows(state.request.height * state.request.width)
        most = min(
            min(self._memory.allowed(memory_kind(part)), self._workspace.most_rows(workspace_kind(part), bound))
            for part in parts
        )
        return Work(frozenset(batch_key(part) for part in parts), str(memory_kind(parts[-1])), state.num_rows, most)

    def decode_work(self, state: DenoiseState) -> Work:
        """Return the work of decoding the images, or of handing out the latents."""
        height, width = image_size(state)
        if state.request.ends_with_latents:
            return Work(frozenset([("latents", decode_key(state))]), "latents", len(state.latents), math.inf)
        kind, most = self._decoder.room(height, width)
        return Work(frozenset([decode_key(state)]), str(kind), len(state.latents), most)

    def step(self, states: Sequence[DenoiseState], check: Callable[[], None] = lambda: None) -> None:
        """Move each state on by one denoise step. If a forward or an extrapolation raises, no state has moved.

        States with an extrapolated step take no row of a forward.

        `check` is called before each block of the denoiser; its exception ends the step there.
        A state whose own solver raises keeps the error as its `failure`, and the others move. Raises a state's
        failure when it is to step again, and EngineError when it has no steps left.
        """
        for state in states:
            if state.failure is not None:
                raise state.failure
            if state.done:
                raise EngineError(f"request {state.request.request_id!r} has no steps left")
        if not self._blocks:
            check()
        noises: dict[int, torch.Tensor] = {}  # by branch; each belongs to one state
        computed = [state for state in states if not state.is_extrapolated]
        with torch.no_grad(), checked_blocks(self._blocks if computed else (), check):
            for mates in grouped(parts_of(computed), batch_key):
                noise = self._predict(group := by_adapters(mates))
                noises |= {id(part.branch): own for part, own in zip(group, split_rows(noise, group), strict=True)}
            predictions = {
                id(state): guided(self.family, state, [noises[id(branch)] for branch in state.branches])
                for state in computed
            }
            outputs = [_output_of(state, predictions.get(id(state))) for state in states]  # all, before any moves
            for state, output in zip(states, outputs, strict=True):
                self._advance(state, output)

    def decode(self, states: Sequence[DenoiseState]) -> list[np.ndarray | torch.Tensor | ComputationFailed]:
        """Return the images of each state, finished or not: uint8 (num_images, H, W, 3), or the error.

        One VAE call per size, as far as the bounds and memory allow. Where latents are asked for, they are as results
        have them. If the VAE is blank, all are latents in the denoiser's form. Both are on the host.
        """
        outcomes: dict[int, np.ndarray | torch.Tensor | ComputationFailed] = {
            id(state): failure for state in states if (failure := numeric_failure(state)) is not None
        }
        if self._codec.is_blank:
            return [outcomes.get(id(state), _ended(state).cpu()) for state in states]
        for state in states:
            if state.request.ends_with_latents and id(state) not in outcomes:
                outcomes[id(state)] = self._decoder.handed_out(_ended(state), image_size(state))
        for group in grouped([state for state in states if id(state) not in outcomes], decode_key):
            images, is_finite = self._decoder.decode_group([state.latents for state in group], group)
            first = 0
            for state in group:
                rows = slice(first, first := first + len(state.latents))
                outcomes[id(state)] = images[rows] if is_finite[rows].all() else ComputationFailed(VAE_FAILED)
        return [outcomes[id(state)] for state in states]

    def decode_previews(self, states: Sequence[DenoiseState]) -> list[np.ndarray | None]:
        """Return the images that the last step of each state expects, as `decode` does; None if they are not finite.

        A small VAE makes them where the model has one for that.
        """
        previews: dict[int, np.ndarray | None] = {}
        for group in grouped(states, decode_key):
            expected = [state.expected for state in group if state.expected is not None]
            images, is_finite = self._previewer.decode_group(expected, group)
            first = 0
            for state in group:
                rows = slice(first, first := first + len(state.latents))
                previews[id(state)] = images[rows] if is_finite[rows].all() else None
                state.expected = None
        return [previews[id(state)] for state in states]

    def generate(
        self,
        request: DiffusionRequest,
        conditioning: Mapping[str, torch.Tensor],
        on_step: Callable[[DenoiseState], None] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> np.ndarray:
        """Run the whole loop for one request: uint8 (num_images, H, W, 3). `on_step` sees every new state."""
        state = self.start_request(request, conditioning, adapters)
        while not state.done:
            self.step([state])
            if on_step is not None:
                on_step(state)
        return self._decode_alone(state)

    def _decode_alone(self, state: DenoiseState) -> np.ndarray:
        """Decode one state, as `decode` does. Raises ComputationFailed."""
        (outcome,) = self.decode([state])
        if isinstance(outcome, ComputationFailed):
            raise outcome
        assert isinstance(outcome, np.ndarray)  # the VAE is not blank
        return outcome

    def _forward(self, rows: Rows, height: int, width: int) -> torch.Tensor:
        images = prompted_by_images(rows.image_prompts)
        adapters = applied_adapters(rows.adapters, Batch(len(rows), self.family.adapters.repeats_rows))
        with adapters, images, self._modulation.given(rows.modulation):
            return self.family.network.predict_noise(self.denoiser, rows, self._codec.size(height, width))

    def follower(self, group: RankGroup) -> RowsFollower:
        """Return the follower of such a pipeline of rank 0, which runs this rank's part of its forwards."""
        return RowsFollower(group, self)

    def run_rows(self, rows: Rows, height: int, width: int, merged: MergedLayers | None = None) -> torch.Tensor:
        """Replay `_forward`, if the layers are the denoiser's own or `merged`. A replay cannot be cancelled."""
        if self._replays is None:
            return self._forward(rows, height, width)
        lengths = rows.lengths if self.family.texts.counts_tokens else ()
        return self._replays.run(
            (rows.form(), height, width, lengths, torch.get_num_threads()),
            rows.tensors(),
            lambda given: self._forward(rows.with_tensors(given), height, width),
            rows.lasting_tensors(),
            [*(control.net for control in rows.controls), *([] if merged is None else [merged])],
        )

    def _predict(self, group: Sequence[Condition]) -> torch.Tensor:
        """Return the denoiser's prediction for all rows of the group, in as few forwards as bounds and memory allow."""
        first = group[0].state
        height, width = image_size(first)
        with kernels(first.runs_alone), replaced_forwards(first.merged.forwards if first.merged else {}):
            kind = memory_kind(group[0])
            bound = 1 if first.runs_alone else self._bounds.denoise_rows(height * width)
            forward: Forward = self._forward if first.runs_alone else partial(self.run_rows, merged=first.merged)
            if self._ranks is not None and first.merged is None:
                forward = partial(self._ranks.run, forward)
            num_rows = sum(len(state.latents) for state, _ in group)
            largest = self._workspace.largest({workspace_kind(part) for part in group}, num_rows)
            with self._workspace.lend(largest, num_rows, bound) as most:
                rows = build_rows(group, self._modulation.rows_of(group))
                parts = run_in_parts(
                    lambda start, stop: forward(rows.part(start, stop), height, width),
                    len(rows),
                    most,
                    self._memory,
                    kind,
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _advance(self, state: DenoiseState, prediction: torch.Tensor) -> None:
        """Take a step of the state's solver; its error becomes the state's failure."""
        options = step_options(state.solver, state.generator)
        try:
            stepped = state.solver.step(prediction, state.timestep, state.latents, **options, return_dict=False)
        except Exception as error:
            logger.exception("request %r ends: its solver failed", state.request.request_id)
            step = f"step {state.step_index + 1} of {state.num_steps}"
            state.failure = ComputationFailed(f"{step}: the solver failed: {type(error).__name__}: {error}")
            return
        if state.step_index + 1 in state.preview_at:
            place = len(state.solver.timesteps) - state.num_steps_left
            state.expected = expected_latents(state.solver, place, state.latents, prediction)
        state.latents = stepped[0]
        state.step_index += 1
        if state.kept is not None:
            state.latents = state.kept.put_back(state.solver, state.latents, None if state.done else state.timestep)
        state.are_finite.append(state.latents.isfinite().all())


def _solver_of(
    request: DiffusionRequest, size: ImageSize, solvers: SolverFactory, maker: LatentsMaker, dtype: torch.dtype
) -> Any:
    """Return the solver of a request, or its sampler. Raises EngineError."""
    steps, device = maker.family.steps, maker.device
    if request.sampler is None:
        schedule, changes = partial(steps.schedule, request, size=size), partial(steps.solver_changes, request)
        return solvers.create_solver(device, request, schedule, changes)
    noise = StepNoise(maker.shape_of(request, size), maker.family.latents, size, device)
    return solvers.create_sampler(device, request.sampler, noise, dtype)


def _ended(state: DenoiseState) -> torch.Tensor:
    """Return the latents of a state, and behind them what its last step found without noise, if that is asked for."""
    if state.request.output != "latent_and_clean" or not isinstance(state.solver, SigmaSolver):
        return state.latents
    expected = state.latents if state.solver.expected is None else state.solver.expected
    return torch.cat([state.latents, expected])


def _output_of(state: DenoiseState, computed: torch.Tensor | None) -> torch.Tensor:
    """Return the model's output at a state's step, computed or extrapolated from earlier outputs."""
    if computed is None and state.extrapolation is not None:
        return state.extrapolation.predict(state.step_index).to(state.latents.dtype)
    assert computed is not None
    if state.extrapolation is not None:
        state.extrapolation.note(state.step_index, computed)
    return computed


def create_pipeline(
    class_name: str,
    folder: Path,
    modules: Mapping[str, nn.Module],
    *,
    device: str | torch.device = "cpu",
    bounds: BatchBounds = DEFAULT_BOUNDS,
    workspace: Workspace = UNBOUNDED,
    replays: Replays | None = None,
    ranks: RankChannel | None = None,
    tiles: RankChannel | None = None,
) -> DenoisePipeline:
    """Return the denoise loop for a folder in diffusers' layout. `modules` has the denoiser and "vae", on `device`, and
    perhaps a "preview_vae".

    Text encoders live elsewhere. Raises EngineError for a class that no family knows.
    """
    return DenoisePipeline(family_of(class_name), folder, modules, device, bounds, workspace, replays, ranks, tiles)


def settings_hash(folder: Path) -> str:
    """Return the identity of a pipeline's settings beside its modules: model_index.json and the solver's config.

    Raises EngineError for a folder without them.
    """
    digest = hashlib.sha256()
    for file in (folder / "model_index.json", folder / "scheduler" / "scheduler_config.json"):
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise EngineError(f"{file}: {error.strerror or error}") from None
    return digest.hexdigest()
