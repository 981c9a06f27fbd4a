"""Samplers of k-diffusion in the place of the scheduler of a pipeline that diffusers runs.

The pipeline has its own guidance and draws its first noise. Its latents stay in float32 from step to step, whatever
dtype it hands on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from configs.options import DRAWING_SAMPLERS, Sampler
from deployments.engines.diffusion.families.base import ImageSize
from deployments.engines.diffusion.families.flow_matching import PATCH, FlowLatents, PackedLatents
from deployments.engines.diffusion.noise_forms import noise_form
from deployments.engines.diffusion.samplers import SAMPLERS, MaskedLatents, SigmaSolver, StepNoise, why_no_sigmas
from deployments.engines.records.protocol import EngineError, StockRequest

_IMAGE_AXES: Final = 4  # of latents that are no patches
_BESIDE: Final = ("sigmas", "timesteps", "strength")
_BOUNDARY: Final = "boundary_ratio"  # the level of a flow's noise below which the second of two denoisers runs
_ABOVE_ALL: Final = 2.0
_PROMPT_FIRST: Final = ("LongCatImagePipeline",)  # whose steps run the prompt's forward, then that of the negative one
_IS_NOISE: Final = 1e-4  # so near to 1, a flow's first level is noise alone


class SampledScheduler:
    """A sampler in the form in which pipelines call their scheduler. Of one call.

    `own` is the scheduler that it stands in place of, whose noise it removes.
    """

    order: Final = 1
    init_noise_sigma: Final = 1.0

    def __init__(self, own: Any, sampler: Sampler) -> None:
        """Raise EngineError for a sampler that cannot run here."""
        if reason := _why_not(sampler):
            raise EngineError(f"sampler: {reason}")
        form, first = noise_form(own), sampler.sigmas[0]
        if form.kind != "flow_prediction":
            raise EngineError("sampler: diffusers' own code runs this model, whose noise is no flow's; leave it out")
        if abs(first - 1) > _IS_NOISE:
            raise EngineError(f"sampler: the first sigma is {first:g}, and this model begins at noise alone: 1")
        self.config = own.config
        self._form, self._sampler = form, sampler
        self._solver = self._solver_for((), torch.device("cpu"))
        self._generator = self._solver.step_generator(0)
        self.timesteps, self.sigmas = self._solver.timesteps, self._solver.sigmas
        self._exact: torch.Tensor | None = None
        self._handed: torch.Tensor | None = None
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._outputs: list[torch.Tensor] = []

    def keep(self, latents: torch.Tensor, mask: torch.Tensor) -> None:
        """Keep these latents, in the form of the pipeline's, where the mask is 0."""
        self._kept = latents.float(), mask.float()

    def note(self, output: torch.Tensor) -> None:
        """Take note of what a forward of the step gave."""
        self._outputs.append(output)

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        timesteps: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        **_: Any,
    ) -> None:
        """Take the sampler's own schedule to the device, whatever the pipeline asks for."""
        self.timesteps = self._solver.timesteps.to(device)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Do nothing: a call begins at its first step."""

    def scale_model_input(self, sample: torch.Tensor, timestep: Any = None) -> torch.Tensor:
        """Return the latents, which a flow's model reads as they are."""
        return sample

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Any,
        sample: torch.Tensor,
        *_: Any,
        return_dict: bool = True,
        **__: Any,
    ) -> Any:
        """Return the latents for the next forward, in the dtype of those given. Raises EngineError."""
        if self._exact is None and self._sampler.name in DRAWING_SAMPLERS:
            if sample.ndim != _IMAGE_AXES:
                raise EngineError(f"sampler: {self._sampler.name} draws noise in its steps, and not in patches")
            self._solver = self._solver_for(sample.shape, sample.device)
        elif self._exact is None and self._outputs:
            self._solver = self._solver_for(sample.shape, sample.device, is_packed=True)
        if self._exact is None and self._kept is not None:
            latents, mask = self._kept
            self._solver.kept = MaskedLatents(latents.to(sample.device), sample.float(), mask.to(sample.device))
        exact = self._exactly(sample)
        if self._outputs:
            prompted, self._outputs = self._outputs[0][:, : sample.shape[1]], []
            model_output = self._solver.normed(model_output.float(), prompted.float(), exact)
        (self._exact,) = self._solver.step(model_output, timestep, exact, self._generator)
        has_ended = self._solver.at == len(self._solver.timesteps)
        self._handed = (self._exact if has_ended else self._solver.scale_model_input(self._exact)).to(sample.dtype)
        return SimpleNamespace(prev_sample=self._handed) if return_dict else (self._handed,)

    def _solver_for(self, shape: Sequence[int], device: torch.device, *, is_packed: bool = False) -> SigmaSolver:
        """Return the solver for latents of a shape, in which the noise of steps is drawn."""
        latents: FlowLatents = PackedLatents() if is_packed else FlowLatents()
        # Where a patch stands in its image is nothing to the length of its places: here they are one column.
        size = ImageSize(0, 0, PATCH * shape[1], PATCH) if is_packed else ImageSize(0, 0, 0, 0)
        noise = StepNoise(shape, latents, size, device)
        return SAMPLERS[self._sampler.name](self._form, self._sampler, noise, torch.device("cpu"), torch.float32)

    def _exactly(self, sample: torch.Tensor) -> torch.Tensor:
        """Return latents in float32: those of the last step where the pipeline has changed nothing."""
        if self._exact is not None and self._handed is not None and torch.equal(sample, self._handed):
            return self._exact
        return sample.float()


@contextlib.contextmanager
def noting_prompts(pipeline: Any, sampler: Sampler | None) -> Iterator[None]:
    """Tell the sampler of what forwards of this thread gave, within the block, if it norms guidance by them.

    Raises EngineError for a class whose forwards come in another order.
    """
    if sampler is None or sampler.cfg_norm is None:
        yield
        return
    if (name := type(pipeline).__name__) not in _PROMPT_FIRST:
        raise EngineError(f"sampler: guidance of a {name} cannot be normed: diffusers' own code guides it")
    here = threading.get_ident()

    def note(module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() == here:
            pipeline.scheduler.note(output[0])

    hook = pipeline.transformer.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


def check_sampled(request: StockRequest, *, has_strength: bool) -> None:
    """Raise EngineError for what a request with a sampler cannot have beside it.

    `has_strength`: the class begins at its image, under noise of its scheduler.
    """
    given = [name for name in _BESIDE if name in request.fields]
    given += ["scheduler"] if request.scheduler is not None else []
    given += ["scheduler_options"] if request.scheduler_options else []
    given += ["images"] if request.images and has_strength else []
    if request.sampler is not None and given:
        raise EngineError(f"sampler: it is in place of {given[0]}; leave one of them out")
    if request.sampler is None and request.second_from is not None:
        raise EngineError("second_from: it is a step of a sampler, and the request has none")


def set_boundary(pipeline: Any, request: StockRequest) -> None:
    """Make the second of a pipeline's two denoisers run from the step of a request on.

    Raises EngineError for a step of a pipeline with a single one.
    """
    sampler, step = request.sampler, request.second_from
    if sampler is None or step is None:
        return
    if pipeline.config.get(_BOUNDARY) is None:
        if step < sampler.num_steps:
            raise EngineError(f"second_from: {step}, and a {type(pipeline).__name__} of this model has one denoiser")
        return
    levels = sampler.sigmas
    between = (levels[step - 1] + levels[step]) / 2 if 0 < step < sampler.num_steps else 0.0
    pipeline.register_to_config(**{_BOUNDARY: between if step else _ABOVE_ALL})


def _why_not(sampler: Sampler) -> str | None:
    if reason := why_no_sigmas(sampler.sigmas):
        return f"sigmas: {reason}"
    if sampler.cfg != 1 or sampler.zeroes_negative:
        return "diffusers' own code guides this model: by guidance_scale, and not by cfg"
    if sampler.sigmas[-1] != 0 or not sampler.adds_noise or sampler.picks is not None:
        return "diffusers' own code runs this model from noise to an image, and hands over no latents"
    return None
