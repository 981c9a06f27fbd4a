"""One request between two denoise steps, and the checks that a request must pass to become one.

The ControlNets of a request are networks beside the denoiser, whose residuals it adds up in some of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from deployments.engines.diffusion.extrapolation import Extrapolation
from deployments.engines.diffusion.families.base import MAX_SIDE_PX, Branch, Family, ImageSize
from deployments.engines.diffusion.image_codec import ImageCodec, unit_pixels
from deployments.engines.diffusion.samplers import why_no_sigmas
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.nn.forwards import make_quick
from deployments.engines.nn.lora import FittedPairs, MergedLayers
from deployments.engines.records.input_images import find_bad_image
from deployments.engines.records.protocol import ComputationFailed, DiffusionRequest, EngineError
from weights.memory.devices import host_generator

if TYPE_CHECKING:
    from deployments.engines.diffusion.families.prompted import ImagePrompt
    from deployments.engines.diffusion.first_latents import KeptImage


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """A ControlNet and its image inputs, (num_images, …) each. `reads_prompt`: never the negative prompt.

    `mode` is that of a union.
    """

    name: str
    net: Any
    inputs: tuple[torch.Tensor, ...]
    scale: float
    start: float
    end: float
    reads_prompt: bool
    mode: int | None = None

    def acts_at(self, step_index: int, num_steps: int) -> bool:
        """Return whether the net acts at a step, counted from 0: all of it lies within its part of the schedule."""
        return not (step_index / num_steps < self.start or (step_index + 1) / num_steps > self.end)


def make_controls(
    request: DiffusionRequest,
    known: Mapping[str, object],
    family: Family,
    denoiser: Any,
    codec: ImageCodec,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Control, ...]:
    """Return the ControlNets of a request, in its order; encoding an image may draw from the generator, as in stock.

    `known` has them by name. Raises EngineError for an unknown one or one that does not fit the denoiser.
    """
    stream = host_generator(request.seed) if family.adapters.draws_controls_apart else generator

    def encode(images: torch.Tensor, *, shifts: bool = True, draws: bool = True) -> torch.Tensor:
        if not draws:
            return codec.most_likely(images, family.latents.scale)
        latents = codec.encode(images, stream)
        return family.latents.scale(latents, codec.vae) if shifts else latents * codec.vae.config["scaling_factor"]

    controls = []
    for use in request.control:
        net = known.get(use.name)
        if not isinstance(net, nn.Module):
            nets = ", ".join(sorted(name for name, thing in known.items() if isinstance(thing, nn.Module)))
            raise EngineError(f"control: {use.name!r} is no known ControlNet (known: {nets or 'none'})")
        if reason := _misfit(family, net, denoiser, codec.scale_factor):
            raise EngineError(f"control: {use.name!r} {reason}")
        if reason := _wrong_mode(use.mode, family.adapters.num_modes(net)):
            raise EngineError(f"control: {use.name!r} {reason}")
        make_batch_invariant(net)
        make_quick(net)
        pixels = unit_pixels(use.image, device).expand(request.num_images, -1, -1, -1)
        with torch.no_grad():
            inputs = family.adapters.control_inputs(net, pixels, encode)
        inputs = tuple(one.to(device, denoiser.dtype) for one in inputs)
        reads_prompt = family.adapters.controls_read_prompt
        controls.append(Control(use.name, net, inputs, use.scale, use.start, use.end, reads_prompt, use.mode))
    if reason := family.adapters.why_not_together([control.net for control in controls]):
        raise EngineError(f"control: {reason}")
    return tuple(controls)


def _wrong_mode(mode: int | None, num_modes: int) -> str | None:
    """Return why a request's mode is not one of a ControlNet's, or None."""
    if not num_modes:
        return None if mode is None else f"is no union of ControlNets, and has no mode {mode}"
    if mode is not None and 0 <= mode < num_modes:
        return None
    said = "without a mode" if mode is None else f"with mode {mode}"
    return f"is a union of {num_modes} ControlNets, asked {said}: expected one of 0 to {num_modes - 1}"


def _misfit(family: Family, net: Any, denoiser: Any, pixels_per_latent: int) -> str | None:
    """Return why the ControlNet cannot go with the denoiser, or None."""
    reason = family.control_misfit(type(net).__name__, net.config, denoiser.config, pixels_per_latent)
    if reason is None and net.dtype != denoiser.dtype:
        return f"is in {net.dtype}, and the model in {denoiser.dtype}: register it again, without a dtype"
    return reason


MAX_STEPS = 1000
MAX_IMAGES = 32
SEEDS = range(-(2**63), 2**64)  # accepted by torch.Generator.manual_seed


@dataclass(slots=True)
class DenoiseState:
    """A running request. `latents` (num_images, …) are in the family's form: packed patches or a latent image.

    `branches` is (prompt,) or, under classifier-free guidance, (negative, prompt), and `cfg_scale` its
    weight. The solver is this request's alone, since it counts its own steps. `adapters` are weights with
    their strength; `merged` is a merged one instead. `are_finite` has a flag for every step done here, on the
    device: reading one would make the device wait, so it is read only with the images. A state with a
    `failure` takes no more steps.

    `shape` is the `Family.latents.batch_shape` of its `size`.

    A request with an image begins at `first_step` of the solver's schedule. `kept` and `extra_channels` are those of
    `FirstLatents`.

    A state that `runs_alone` shares no forward, and its rows go one by one: if a device rounds by batch, nothing else
    gives the same bits in any batch and with any amount of memory.

    `ahead` has `Modulation`'s outputs for coming steps.

    `extrapolation` chooses the steps without a forward; with None all steps have one.

    After a step of `preview_at`, `expected` has the latents that the step expects at the end. `solver_at_start` has the
    solver's attributes before the first step.
    """

    request: DiffusionRequest
    solver: Any
    latents: torch.Tensor
    branches: tuple[Branch, ...]
    cfg_scale: float
    generator: torch.Generator
    size: ImageSize
    shape: Hashable
    step_index: int = 0
    adapters: tuple[tuple[FittedPairs, float], ...] = ()
    merged: MergedLayers | None = None
    are_finite: list[torch.Tensor] = field(default_factory=list)
    failure: Exception | None = None
    first_step: int = 0
    kept: KeptImage | None = None
    extra_channels: torch.Tensor | None = None
    controls: tuple[Control, ...] = ()
    image_prompts: tuple[ImagePrompt, ...] = ()
    runs_alone: bool = False
    preview_at: tuple[int, ...] = ()
    expected: torch.Tensor | None = None
    ahead: dict[int, Any] = field(default_factory=dict)
    extrapolation: Extrapolation | None = None
    solver_at_start: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.solver_at_start = dict(vars(self.solver))

    @property
    def acting_controls(self) -> tuple[Control, ...]:
        """Return the ControlNets that act in the next step."""
        return tuple(control for control in self.controls if control.acts_at(self.step_index, self.num_steps))

    @property
    def num_steps(self) -> int:
        """Return the number of steps in all; second-order solvers take more of them than `num_inference_steps`."""
        return len(self.solver.timesteps) - self.first_step

    @property
    def done(self) -> bool:
        """Return whether all steps are made."""
        return self.step_index >= self.num_steps

    @property
    def num_steps_left(self) -> int:
        """Number of steps to come."""
        return self.num_steps - self.step_index

    @property
    def num_forwards_left(self) -> int:
        """Number of coming steps with a forward."""
        return self.num_steps_left if self.extrapolation is None else self.extrapolation.num_computed(self.step_index)

    @property
    def is_extrapolated(self) -> bool:
        """Return whether the next step has no forward."""
        return self.extrapolation is not None and not self.done and self.extrapolation.skips(self.step_index)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of a forward for one step."""
        return self.request.num_images * len(self.branches)

    @property
    def timestep(self) -> torch.Tensor:
        """Return the solver's current timestep, a scalar tensor."""
        return self.solver.timesteps[self.first_step + self.step_index]


def check_request(request: DiffusionRequest, size_multiple: int) -> None:
    """Raise EngineError for a request that no pipeline with sides of `size_multiple` pixels can run."""
    for name, side in (("width", request.width), ("height", request.height)):
        _check_count(name, side, MAX_SIDE_PX)
        if side % size_multiple:
            raise EngineError(f"{name} {side}: expected a multiple of {size_multiple}")
    if bad := find_bad_image(request):
        raise EngineError(": ".join(bad))
    _check_count("num_inference_steps", request.num_inference_steps, MAX_STEPS)
    if request.sigmas is not None and request.timesteps is not None:
        raise EngineError("sigmas: give either sigmas or timesteps")
    for name, schedule in (("sigmas", request.sigmas), ("timesteps", request.timesteps)):
        if schedule is None:
            continue
        if len(schedule) != request.num_inference_steps:
            raise EngineError(f"{name}: {len(schedule)} of them for {request.num_inference_steps} steps")
        if not all(math.isfinite(one) and one >= 0 for one in schedule) or sorted(schedule)[::-1] != list(schedule):
            raise EngineError(f"{name}: expected numbers of 0 or more that do not rise")
    if reason := _bad_sampler(request):
        raise EngineError(f"sampler: {reason}")
    _check_count("num_images", request.num_images, MAX_IMAGES)
    for name in ("guidance_scale", "true_cfg_scale"):
        value = getattr(request, name)
        if not (isinstance(value, int | float) and math.isfinite(value)):
            raise EngineError(f"{name} {value!r}: expected a finite number")
    if not _is_int(request.seed) or request.seed not in SEEDS:
        raise EngineError(f"seed {request.seed!r}: expected an integer of 64 bits")


def _bad_sampler(request: DiffusionRequest) -> str | None:
    """Return why a request's sampler cannot run it, or why its latents need one, or None."""
    sampler, others = request.sampler, ("latents", "noise_mask")
    if sampler is None:
        needing = [name for name in others if getattr(request, name) is not None]
        needing += ["reference_latents"] if request.reference_latents else []
        needing += ["output"] if request.ends_with_latents else []
        return f"{needing[0]} is of a request with a sampler, and this has none" if needing else None
    if reason := why_no_sigmas(sampler.sigmas):
        return f"sigmas: {reason}"
    if sampler.num_steps != request.num_inference_steps:
        return f"{sampler.num_steps} steps for {request.num_inference_steps}"
    if sampler.picks is not None and len(sampler.picks) != request.num_images:
        return f"picks: {len(sampler.picks)} of them for {request.num_images} images"
    if request.noise_mask is not None and len(request.noise_mask) not in (1, request.num_images):
        return f"noise_mask: {len(request.noise_mask)} of them for {request.num_images} images"
    if request.noise_mask is not None and sampler.name == "ddim":
        return "ddim draws noise over a mask of its own; use euler"
    beside = ("scheduler", "sigmas", "timesteps", "variation", "init_image", "mask_image")
    given = [name for name in beside if getattr(request, name) is not None]
    given += ["scheduler_options"] if request.scheduler_options else []
    return f"it is in place of {given[0]}; leave one of them out" if given else None


def encoded_references(request: DiffusionRequest, family: Family, multiple: int) -> tuple[npt.NDArray[np.uint8], ...]:
    """Return the references of a request in the sizes for the VAE.

    Raises EngineError for a number of them that the family does not read.
    """
    found, most = len(request.references), family.references.most
    if not min(most, 1) <= found <= most:
        expected = f"1 to {most}" if most > 1 else most or "none"
        raise EngineError(f"{found} references, and a {family.class_name} reads {expected}")
    if request.reference_latents and not family.references.takes_latents:
        raise EngineError(f"reference_latents: a {family.class_name} reads none")
    return tuple(family.references.encoded(image, multiple) for image in request.references)


def reference_sizes(request: DiffusionRequest, family: Family, codec: ImageCodec, multiple: int) -> Iterator[ImageSize]:
    """Yield the sizes of what is read beside a request's latents. Raises EngineError for latents of half a patch."""
    for image in request.references:
        yield codec.size(*image.shape[:2])
    cell = family.latents.patch * codec.scale_factor  # pixels
    for given in request.reference_latents:
        height, width = (side * cell for side in given.shape[2:])
        if height % multiple or width % multiple:
            raise EngineError(f"reference_latents: of {width}x{height} pixels, expected multiples of {multiple}")
        yield codec.size(height, width)


def numeric_failure(state: DenoiseState) -> ComputationFailed | None:
    """Return why the latents are no image: the first step after which they were not finite. Waits for the device."""
    flags: list[bool] = torch.stack(state.are_finite).tolist() if state.are_finite else []
    if all(flags):
        return None
    step = state.step_index - len(flags) + flags.index(False) + 1
    return ComputationFailed(f"the latents are not finite from step {step} of {state.num_steps} on")


def take_branches(
    conditioning: Mapping[str, torch.Tensor],
    widths: tuple[int, int | None],
    guided: bool,
    device: torch.device,
    dtype: torch.dtype,
    *,
    padded_length: Callable[[int], int] | None = None,
) -> tuple[Branch, ...]:
    """Return (prompt,) or, when `guided`, (negative, prompt). The two may differ in length.

    Each is padded to its own `padded_length`, and masked there; None means no padding. `widths` is the model's
    (D, P); P is None for a model without pooled text. Raises EngineError for missing tensors or other shapes.
    """
    prefixes = ("negative_", "") if guided else ("",)
    branches = []
    for prefix in prefixes:
        prompt = _conditioning(conditioning, prefix + "prompt_embeds", (1, None, widths[0]))
        pooled = None
        if widths[1] is not None:
            pooled = _conditioning(conditioning, prefix + "pooled_prompt_embeds", (1, widths[1])).to(device, dtype)
        branch = Branch(prompt.to(device, dtype), pooled)
        branches.append(_padded(branch, padded_length) if padded_length else branch)
    return tuple(branches)


def _padded(branch: Branch, padded_length: Callable[[int], int]) -> Branch:
    num_tokens = branch.prompt.shape[1]
    length = padded_length(num_tokens)
    if length == num_tokens:
        return branch
    mask = (torch.arange(length, device=branch.prompt.device) < num_tokens)[None]
    return Branch(
        torch.nn.functional.pad(branch.prompt, (0, 0, 0, length - num_tokens)), branch.pooled, mask, num_tokens
    )


def _conditioning(conditioning: Mapping[str, torch.Tensor], name: str, shape: tuple[int | None, ...]) -> torch.Tensor:
    tensor = conditioning.get(name)
    if tensor is None:
        raise EngineError(f"conditioning lacks {name!r} (given: {', '.join(conditioning) or 'nothing'})")
    fits = tensor.ndim == len(shape) and all(w in (None, g) for w, g in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.numel() == 0:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise EngineError(f"{name} has shape {tuple(tensor.shape)}, expected ({expected})")
    return tensor


def _check_count(name: str, value: object, limit: int) -> None:
    if not (_is_int(value) and 1 <= value <= limit):  # type: ignore[operator]
        raise EngineError(f"{name} {value!r}: expected an integer from 1 to {limit}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
