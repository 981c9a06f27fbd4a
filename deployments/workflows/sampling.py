"""Samplers, schedules, noise and guiders: kinds of nodes that become one image request, with latents in and out.

What the request cannot say is refused: that of a device is found by the device.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

import numpy as np

from configs.options import Sampler as SamplerOption
from configs.options import SamplerName
from deployments.engines.diffusion.families import FAMILIES
from deployments.records import NO_PROMPT, REFERENCES, ControlNetUse, ImageRequest
from deployments.records import LoraUse as RequestLora
from deployments.workflows.backend import Backend, Catalog, ModelFacts, Report
from deployments.workflows.kinds import Kind, Output, boolean, choice, integer, link, number, text
from deployments.workflows.records import Refused
from deployments.workflows.references import READ, check_references, reference_pixels
from deployments.workflows.resizing import resized
from deployments.workflows.schedules import (
    MAX_STEPS,
    SCHEDULES,
    Levels,
    beta_quantiles,
    exponential,
    flux_2,
    karras,
    last_part,
    levels_of,
    manual,
    schedule,
    turbo,
)
from deployments.workflows.values import (
    PENDING,
    PENDING_LATENT,
    Conditioning,
    ControlUse,
    Guider,
    Latent,
    Later,
    LoraUse,
    ModelValue,
    Noise,
    Prompt,
    Sampler,
    Shift,
    Sigmas,
)

_SAMPLERS: Final[tuple[str, ...]] = get_args(SamplerName)
_SCHEDULES: Final = tuple(SCHEDULES)
# These schedule a step more, and leave the last level but one out.
_ONE_MORE: Final = ("dpm_2", "dpm_2_ancestral", "uni_pc", "uni_pc_bh2")
_TWICE: Final = ("heun", "dpm_2", "dpm_2_ancestral", "dpmpp_2s_ancestral")  # forwards a step
_UNI_PC: Final = ("uni_pc", "uni_pc_bh2")
_LAST_TIME: Final = 999.0  # of Stable Diffusion
_FULL: Final = 0.9999  # from this part on, all of a schedule runs
_MAX_STEP: Final = 10_000
_SEED_BITS: Final = 63  # of an image's seed; the noise has its own, of 64
_GUIDANCE: Final = 3.5  # what FLUX reads where nobody says another
_FLUXES: Final = ("FluxPipeline", "Flux2Pipeline")
_OF_CLIPS: Final = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")  # whose prompts may have weights
# Languages models read these models' prompts, and brackets are characters of theirs.
_UNWEIGHTED: Final = (
    *("Flux2Pipeline", "Flux2KleinPipeline", "QwenImagePipeline", "QwenImageEditPipeline"),
    *("QwenImageEditPlusPipeline", "ZImagePipeline"),
)
_T5_TOKENS: Final[Mapping[str, int]] = {"FluxPipeline": 256, "StableDiffusion3Pipeline": 77}
_GROWN_SIZES: Final = "sdxl_sizes"
_NORMED: Final = "CFGNorm"  # equal to nothing without guidance


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The request of a sampling node of any kind."""

    model: ModelValue
    positive: Conditioning
    negative: Conditioning | None
    cfg: float
    sampler: Sampler
    sigmas: Sigmas
    seed: int
    adds_noise: bool
    latent: Latent


def sampled(catalog: Catalog, plan: Plan, *, with_clean: bool = False) -> tuple[Latent, ...] | Later:
    """Return the latents of a plan, and with `with_clean` what was clean in them behind them.

    Raises Refused for what no image request can say, and the errors of a bad request.
    """
    count = 2 if with_clean else 1
    if not plan.sigmas:
        return (plan.latent,) * count
    name, facts = _model(catalog, plan)
    ends_clean = plan.sigmas[-1] == 0
    output = "latent" if ends_clean or not with_clean else "latent_and_clean"
    cell = FAMILIES[facts.class_name].latents.pixels_per_cell(facts.variant)
    _request(plan, name, facts, output)  # its refusals come before anything runs

    async def act(backend: Backend, report: Report) -> tuple[Latent, ...]:
        request = await asyncio.to_thread(_request, plan, name, facts, output)
        array = await backend.image(request, report)
        parts = np.split(array, 2) if output == "latent_and_clean" else [array] * count
        height, width = (side * cell for side in array.shape[2:])
        return tuple(
            plan.latent.changed(samples=one, batch=len(one), width=width, height=height, pixels=None) for one in parts
        )

    waiting = replace(PENDING_LATENT, noise_mask=plan.latent.noise_mask)
    return Later(act, (waiting,) * count)


def _model(catalog: Catalog, plan: Plan) -> tuple[str, ModelFacts]:
    """Return the registered model that has all parts of a plan."""
    names = plan.model.models
    for prompt in _read(plan):
        found = tuple(name for name in names if name in prompt.clip.models)
        if not found:
            both = f"{', '.join(names)} and {', '.join(prompt.clip.models)}"
            raise Refused(f"no registered model has both the model and the text encoder: {both}", "model")
        names = found
    facts = catalog.facts(names[0])
    if facts.class_name not in FAMILIES:
        raise Refused(f"{names[0]} is a {facts.class_name}, whose steps this cluster does not run itself", "model")
    return names[0], facts


def _read(plan: Plan) -> tuple[Prompt, ...]:
    """Return the prompts that are read: no negative one without guidance."""
    sides = [("positive", plan.positive)]
    if plan.cfg != 1 and plan.negative is not None:
        sides.append(("negative", plan.negative))
    for name, side in sides:
        if len(side) != 1:
            raise Refused(f"{len(side)} conditionings are combined: a request has one", name)
    return tuple(side[0] for _, side in sides)


def _request(plan: Plan, name: str, facts: ModelFacts, output: str) -> ImageRequest:
    prompts, latent = _read(plan), plan.latent
    positive, negative = prompts[0], prompts[1] if len(prompts) > 1 else None
    if plan.cfg != 1 and negative is None:
        raise Refused("guidance needs a negative prompt", "negative")
    _check_model(plan, facts)
    for side, prompt in zip(("positive", "negative"), prompts, strict=False):
        _check_prompt(prompt, positive, side, facts, latent)
    check_references(prompts, facts.class_name, facts.variant)
    pictures = reference_pixels(positive)
    given = latent.samples if isinstance(latent.samples, np.ndarray) else None
    mask = None if latent.noise_mask is None or latent.noise_mask is PENDING else latent.noise_mask
    batch = latent.batch if given is None else len(given)
    fields: dict[str, Any] = {
        "model": name,
        "prompt": _words(positive, facts, "positive"),
        "negative_prompt": None if negative is None else _words(negative, facts, "negative"),
        "lora": _loras(plan.model, positive),
        "n": batch,
        "seed": plan.seed % 2**_SEED_BITS,
        "sampler": _sampler(plan, latent),
        "latents": given,
        "noise_mask": None if mask is None else _for_batch(mask, batch),
        "output": output,
        "guidance_scale": _guidance(positive),
        "max_sequence_length": _T5_TOKENS.get(facts.class_name),
        "prompt_syntax": "comfyui" if facts.class_name in _OF_CLIPS else "plain",
        "clip_skip": _clip_skip(positive, facts),
        "images": {REFERENCES: pictures} if pictures else {},
    }
    if latent.samples is None:
        fields |= _sides(latent, facts)
    parts = [_acting_part(use, plan, facts) for use in positive.controls]
    fields["control"] = tuple(
        _control(use, latent, part)
        for use, part in zip(positive.controls, parts, strict=True)
        if use.image is not PENDING and part is not None
    )
    return ImageRequest(**fields)


def _sides(latent: Latent, facts: ModelFacts) -> dict[str, int]:
    """Return the width and height of an empty latent's images, which have whole places in the latent."""
    latents = FAMILIES[facts.class_name].latents
    cell, multiple = latents.pixels_per_cell(facts.variant), latents.multiple_of(facts.variant)
    sides = {"width": latent.width // cell * cell, "height": latent.height // cell * cell}
    if any(side % multiple for side in sides.values()):
        raise Refused(
            f"{latent.width}x{latent.height} pixels: sides of this model are multiples of {multiple}", "latent_image"
        )
    return sides


def _check_model(plan: Plan, facts: ModelFacts) -> None:
    for kind, values in plan.model.extra:
        if kind != _NORMED or plan.cfg != 1 or values != (1.0,):
            raise Refused(f"{kind} changes the model in a way that this cluster does not", "model")
    options = dict(plan.sampler.options)
    if unknown := options.keys() - {"eta", "s_noise"}:
        raise Refused(f"{min(unknown)} is no option of the sampler here", "sampler")
    if not all(a > b >= 0 for a, b in itertools.pairwise(plan.sigmas)) or len(plan.sigmas) < 2:
        shown = ", ".join(f"{one:g}" for one in plan.sigmas[:10])
        raise Refused(f"sigmas {shown}: expected two or more, each lower than the one before", "sigmas")
    if plan.sampler.name in _UNI_PC and (len(plan.sigmas) < 3 or facts.class_name not in _OF_CLIPS):
        raise Refused(f"{plan.sampler.name} takes two steps at least, and no flow", "sampler_name")
    if len(plan.sigmas) > MAX_STEPS + 1:
        raise Refused(f"{len(plan.sigmas) - 1} steps: at most {MAX_STEPS}", "sigmas")


def _check_prompt(prompt: Prompt, positive: Prompt, side: str, facts: ModelFacts, latent: Latent) -> None:
    """Raise Refused for what is on a prompt and cannot be said of a request."""
    why = None
    if prompt.zeroed:
        why = "ConditioningZeroOut is honoured where guidance is off (cfg 1), since nothing reads it then"
    elif (prompt.start, prompt.end) != (0.0, 1.0):
        why = "a prompt is read in all steps, and not in a part of them"
    elif any(own != prompt.text for _, own in prompt.texts):
        why = "all text encoders read one text"
    elif prompt.clip.loras != positive.clip.loras or prompt.clip.last_layer != positive.clip.last_layer:
        why = "both prompts are read by the same text encoder, with the same LoRAs"
    elif [_control_key(use) for use in prompt.controls] != [_control_key(use) for use in positive.controls]:
        why = "a ControlNet acts on both prompts, or on none"
    elif facts.class_name in _FLUXES and _guidance(prompt) != _guidance(positive):
        why = "both prompts have one guidance"
    for kind, values in prompt.extra:
        if kind in READ or (kind == _GROWN_SIZES and _are_plain_sizes(values, latent)):
            continue
        why = why or f"{kind} is not honoured here"
    if why is not None:
        raise Refused(why, side)


def _are_plain_sizes(values: tuple[Any, ...], latent: Latent) -> bool:
    """Return whether SDXL's sizes are those of the image, uncropped."""
    width, height, crop_w, crop_h, target_width, target_height = values
    if latent.samples is PENDING:
        return True
    own = (latent.width, latent.height)
    return crop_w == crop_h == 0 and (width, height) == own == (target_width, target_height)


def _control_key(use: ControlUse) -> tuple[Any, ...]:
    return use.net, id(use.image), use.strength, use.start, use.end


def _clip_skip(prompt: Prompt, facts: ModelFacts) -> int:
    """Return how many layers of its CLIPs a prompt leaves out."""
    layer = prompt.clip.last_layer
    if layer is None:
        return 0
    usual = {"StableDiffusionPipeline": -1, "StableDiffusionXLPipeline": -2}.get(facts.class_name)
    if usual is None or layer > usual:
        raise Refused(f"a last layer of {layer} has no counterpart with a {facts.class_name}", "positive")
    return usual - layer


def _words(prompt: Prompt, facts: ModelFacts, side: str) -> str:
    """Return the text of a prompt as an encoder reads it."""
    words = prompt.text
    if facts.class_name not in _UNWEIGHTED:
        if "embedding:" in words:
            raise Refused("embeddings are not read by their names in a prompt", side)
        if facts.class_name in _OF_CLIPS:
            return words or NO_PROMPT
        if "(" in words.replace("\\(", "").replace("\\)", ""):
            raise Refused(f"weights in prompts are for CLIP, and a {facts.class_name} reads them with T5 too", side)
        words = words.replace("\\(", "(").replace("\\)", ")")
    return words or NO_PROMPT


def _guidance(prompt: Prompt) -> float:
    return _GUIDANCE if prompt.guidance is None else prompt.guidance


def _loras(model: ModelValue, positive: Prompt) -> tuple[RequestLora, ...]:
    """Return the adapters of the model and of its text encoders, each with both scales."""
    in_model, in_texts = _summed(model.loras), _summed(positive.clip.loras)
    return tuple(
        RequestLora(name=name, scale=in_model.get(name, 0.0), text_scale=in_texts.get(name, 0.0))
        for name in dict.fromkeys((*in_model, *in_texts))
    )


def _summed(uses: tuple[LoraUse, ...]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for use in uses:
        scales[use.name] = scales.get(use.name, 0.0) + use.scale
    return scales


def _sampler(plan: Plan, latent: Latent) -> SamplerOption:
    fields: dict[str, Any] = {"cfg": plan.cfg, "adds_noise": plan.adds_noise, "noise_seed": plan.seed}
    picks = latent.batch_index if plan.adds_noise else None
    name: Any = plan.sampler.name
    if name == "ddim" and latent.noise_mask is not None:
        raise Refused("ddim draws noise over a mask of its own: use euler", "sampler_name")
    try:
        return SamplerOption(name=name, sigmas=plan.sigmas, picks=picks, **fields, **dict(plan.sampler.options))
    except ValueError as error:
        raise Refused(f"the sampler cannot run so: {error}", "sampler") from None


def _for_batch(mask: Any, batch: int) -> Any:
    """Return a mask for each image, or one for all: they are repeated, or left out, as ComfyUI does."""
    masks = np.ascontiguousarray(mask, np.float32)
    if len(masks) in (1, batch):
        return masks
    return np.tile(masks, (math.ceil(batch / len(masks)), 1, 1))[:batch]


def _control(use: ControlUse, latent: Latent, part: tuple[float, float]) -> ControlNetUse:
    if use.net.mode is not None:
        raise Refused("modes of a union of ControlNets are not honoured here yet", "positive")
    image = use.image
    assert isinstance(image, np.ndarray)
    if len(image) != 1:
        raise Refused(f"{len(image)} images for a ControlNet: a request has one", "positive")
    width, height = latent.width, latent.height
    if width and height and image.shape[1:3] != (height, width):
        image = resized(image, width, height, "nearest-exact", "center")
    pixels = np.rint(np.clip(image[0, :, :, :3], 0, 1) * 255).astype(np.uint8)
    start, end = part
    return ControlNetUse(name=use.net.name, image=pixels, scale=use.strength, start=start, end=end)


def _acting_part(use: ControlUse, plan: Plan, facts: ModelFacts) -> tuple[float, float] | None:
    """Return the part of the steps in which a ControlNet acts, None for none: its percents are those of times."""
    if (use.start, use.end) == (0.0, 1.0):
        return 0.0, 1.0
    if plan.sampler.name in _TWICE:
        raise Refused(f"with {plan.sampler.name} a ControlNet acts in all steps here, and not in a part", "positive")
    levels = levels_of(facts.class_name, facts.variant, facts.scheduler, plan.model.shift)
    begin, end = (_level_at(levels, one) for one in (use.start, use.end))
    acting = [number for number, sigma in enumerate(plan.sigmas[:-1]) if end <= sigma <= begin]
    count = len(plan.sigmas) - 1
    # A step acts that lies within a part: half a step more keeps it there, however it is rounded.
    return (max(0.0, (acting[0] - 0.5) / count), min(1.0, (acting[-1] + 1.5) / count)) if acting else None


def _level_at(levels: Levels, percent: float) -> float:
    """Return the level of noise at a percent of the times, which begin with noise alone."""
    if percent <= 0:
        return math.inf
    if percent >= 1:
        return 0.0
    last = 1.0 if levels.shift is not None else _LAST_TIME
    return float(levels.at(np.array((1 - percent) * last)))


# The functions of the kinds.


def _levels(catalog: Catalog, model: ModelValue) -> Levels:
    facts = catalog.facts(model.models[0])
    return levels_of(facts.class_name, facts.variant, facts.scheduler, model.shift)


def _planned_sigmas(levels: Levels, sampler: str, scheduler: str, steps: int, denoise: float) -> Sigmas:
    """Return the levels of KSampler."""
    own = steps + 1 if sampler in _ONE_MORE else steps

    def of(number: int) -> Sigmas:
        found = schedule(scheduler, levels, number)
        return (*found[:-2], found[-1]) if sampler in _ONE_MORE else found

    if denoise > _FULL:
        return of(own)
    if denoise <= 0:
        return ()
    most = int(steps / denoise)
    return of(most + 1 if sampler in _ONE_MORE else most)[-(steps + 1) :]


def _ksampler(
    catalog: Catalog,
    model: ModelValue,
    seed: int,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: Conditioning,
    negative: Conditioning,
    latent_image: Latent,
    denoise: float,
) -> tuple[Latent, ...] | Later:
    sigmas = _planned_sigmas(_levels(catalog, model), sampler_name, scheduler, steps, denoise)
    plan = Plan(model, positive, negative, cfg, Sampler(sampler_name), sigmas, seed, True, latent_image)
    return sampled(catalog, plan)


def _ksampler_advanced(
    catalog: Catalog,
    model: ModelValue,
    add_noise: str,
    noise_seed: int,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: Conditioning,
    negative: Conditioning,
    latent_image: Latent,
    start_at_step: int,
    end_at_step: int,
    return_with_leftover_noise: str,
) -> tuple[Latent, ...] | Later:
    sigmas = _planned_sigmas(_levels(catalog, model), sampler_name, scheduler, steps, 1.0)
    if end_at_step < len(sigmas) - 1:
        sigmas = sigmas[: end_at_step + 1]
        if return_with_leftover_noise == "disable":
            sigmas = (*sigmas[:-1], 0.0)
    sigmas = sigmas[start_at_step:] if start_at_step < len(sigmas) - 1 else ()
    adds = add_noise == "enable"
    plan = Plan(model, positive, negative, cfg, Sampler(sampler_name), sigmas, noise_seed, adds, latent_image)
    return sampled(catalog, plan)


def _custom(
    catalog: Catalog,
    model: ModelValue,
    add_noise: bool,
    noise_seed: int,
    cfg: float,
    positive: Conditioning,
    negative: Conditioning,
    sampler: Sampler,
    sigmas: Sigmas,
    latent_image: Latent,
) -> tuple[Latent, ...] | Later:
    plan = Plan(model, positive, negative, cfg, sampler, sigmas, noise_seed, add_noise, latent_image)
    return sampled(catalog, plan, with_clean=True)


def _custom_advanced(
    catalog: Catalog, noise: Noise, guider: Guider, sampler: Sampler, sigmas: Sigmas, latent_image: Latent
) -> tuple[Latent, ...] | Later:
    if guider.kind == "dual_cfg":
        raise Refused("guidance by two prompts is not computed here", "guider")
    adds = noise.seed is not None
    plan = Plan(
        guider.model,
        guider.positive,
        guider.negative,
        guider.scale,
        sampler,
        sigmas,
        noise.seed or 0,
        adds,
        latent_image,
    )
    return sampled(catalog, plan, with_clean=True)


def _basic_guider(model: ModelValue, conditioning: Conditioning) -> tuple[Guider]:
    return (Guider("basic", model, conditioning),)


def _cfg_guider(model: ModelValue, positive: Conditioning, negative: Conditioning, cfg: float) -> tuple[Guider]:
    return (Guider("cfg", model, positive, negative, cfg),)


def _random_noise(noise_seed: int) -> tuple[Noise]:
    return (Noise(noise_seed),)


def _no_noise() -> tuple[Noise]:
    return (Noise(None),)


def _select(sampler_name: str) -> tuple[Sampler]:
    return (Sampler(sampler_name),)


def _ancestral(eta: float, s_noise: float) -> tuple[Sampler]:
    return (Sampler("euler_ancestral", (("eta", eta), ("s_noise", s_noise))),)


def _basic_scheduler(catalog: Catalog, model: ModelValue, scheduler: str, steps: int, denoise: float) -> tuple[Sigmas]:
    return (last_part(scheduler, _levels(catalog, model), steps, min(denoise, 1.0)),)


def _beta_scheduler(catalog: Catalog, model: ModelValue, steps: int, alpha: float, beta: float) -> tuple[Sigmas]:
    return (beta_quantiles(_levels(catalog, model), steps, alpha, beta),)


def _turbo_scheduler(catalog: Catalog, model: ModelValue, steps: int, denoise: float) -> tuple[Sigmas]:
    return (turbo(_levels(catalog, model), steps, denoise),)


def _karras_scheduler(steps: int, sigma_max: float, sigma_min: float, rho: float) -> tuple[Sigmas]:
    return (karras(steps, _above_zero(sigma_min), _above_zero(sigma_max), rho),)


def _exponential_scheduler(steps: int, sigma_max: float, sigma_min: float) -> tuple[Sigmas]:
    return (exponential(steps, _above_zero(sigma_min), _above_zero(sigma_max)),)


def _above_zero(sigma: float) -> float:
    if sigma <= 0:
        raise Refused(f"a level of {sigma:g}: expected more than 0", "sigma_min")
    return sigma


def _flux_2_scheduler(steps: int, width: int, height: int) -> tuple[Sigmas]:
    return (flux_2(steps, width, height),)


def _manual_sigmas(sigmas: str) -> tuple[Sigmas]:
    return (manual(sigmas),)


def _split(sigmas: Sigmas, step: int) -> tuple[Sigmas, Sigmas]:
    return sigmas[: step + 1], sigmas[step:]


def _split_denoise(sigmas: Sigmas, denoise: float) -> tuple[Sigmas, Sigmas]:
    last = round(max(len(sigmas) - 1, 0) * denoise)
    return sigmas[:-last], sigmas[-(last + 1) :]


def _flip(sigmas: Sigmas) -> tuple[Sigmas]:
    flipped = sigmas[::-1]
    return ((1e-4, *flipped[1:]) if flipped[:1] == (0.0,) else flipped,)


def _set_first(sigmas: Sigmas, sigma: float) -> tuple[Sigmas]:
    return ((sigma, *sigmas[1:]),)


def _shift(kind: str) -> Any:
    def shifted(model: ModelValue, shift: float) -> tuple[ModelValue]:
        return (replace(model, shift=Shift(kind, shift)),)

    return shifted


def _shift_flux(model: ModelValue, max_shift: float, base_shift: float, width: int, height: int) -> tuple[ModelValue]:
    shift = Shift("ModelSamplingFlux", base_shift=base_shift, max_shift=max_shift, width=width, height=height)
    return (replace(model, shift=shift),)


_MODEL: Final = link("model", "MODEL")
_POSITIVE, _NEGATIVE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING")
_LATENT: Final = link("latent_image", "LATENT")
_SIGMAS: Final = link("sigmas", "SIGMAS")
_SAMPLER: Final = link("sampler", "SAMPLER")
_STEPS: Final = integer("steps", 20, 1, _MAX_STEP)
_CFG: Final = number("cfg", 8.0, 0.0, 100.0)
_SAMPLER_NAME: Final = choice("sampler_name", _SAMPLERS)
_SCHEDULER: Final = choice("scheduler", _SCHEDULES)
_DENOISE: Final = number("denoise", 1.0, 0.0, 1.0)
_ENABLE: Final = ("enable", "disable")
_OUT_SIGMAS: Final = (Output("SIGMAS"),)
_OUT_MODEL: Final = (Output("MODEL"),)
_OUT_SAMPLER: Final = (Output("SAMPLER"),)
_OUT_BOTH: Final = (Output("LATENT", "output"), Output("LATENT", "denoised_output"))
_SEED_MAX: Final = 2**64 - 1


def _sampling(name: str, inputs: tuple[Any, ...], outputs: tuple[Output, ...], function: Any) -> Kind:
    return Kind(name, inputs, outputs, function, is_opaque=True, reads_catalog=True, category="sampling")


def _sigmas(name: str, inputs: tuple[Any, ...], function: Any, *, reads_catalog: bool = False) -> Kind:
    return Kind(name, inputs, _OUT_SIGMAS, function, reads_catalog=reads_catalog, category="sampling/custom_sampling")


SAMPLING: Final = (
    _sampling(
        "KSampler",
        (
            *(_MODEL, integer("seed", 0, 0, _SEED_MAX), _STEPS, _CFG, _SAMPLER_NAME, _SCHEDULER),
            *(_POSITIVE, _NEGATIVE, _LATENT, _DENOISE),
        ),
        (Output("LATENT"),),
        _ksampler,
    ),
    _sampling(
        "KSamplerAdvanced",
        (
            *(_MODEL, choice("add_noise", _ENABLE), integer("noise_seed", 0, 0, _SEED_MAX), _STEPS, _CFG),
            *(_SAMPLER_NAME, _SCHEDULER, _POSITIVE, _NEGATIVE, _LATENT),
            *(integer("start_at_step", 0, 0, _MAX_STEP), integer("end_at_step", _MAX_STEP, 0, _MAX_STEP)),
            choice("return_with_leftover_noise", ("disable", "enable")),
        ),
        (Output("LATENT"),),
        _ksampler_advanced,
    ),
    _sampling(
        "SamplerCustom",
        (
            *(_MODEL, boolean("add_noise", True), integer("noise_seed", 0, 0, _SEED_MAX), _CFG, _POSITIVE, _NEGATIVE),
            *(_SAMPLER, _SIGMAS, _LATENT),
        ),
        _OUT_BOTH,
        _custom,
    ),
    _sampling(
        "SamplerCustomAdvanced",
        (link("noise", "NOISE"), link("guider", "GUIDER"), _SAMPLER, _SIGMAS, _LATENT),
        _OUT_BOTH,
        _custom_advanced,
    ),
    Kind("BasicGuider", (_MODEL, link("conditioning", "CONDITIONING")), (Output("GUIDER"),), _basic_guider),
    Kind("CFGGuider", (_MODEL, _POSITIVE, _NEGATIVE, _CFG), (Output("GUIDER"),), _cfg_guider),
    Kind("RandomNoise", (integer("noise_seed", 0, 0, _SEED_MAX),), (Output("NOISE"),), _random_noise),
    Kind("DisableNoise", (), (Output("NOISE"),), _no_noise),
    Kind("KSamplerSelect", (_SAMPLER_NAME,), _OUT_SAMPLER, _select),
    Kind(
        "SamplerEulerAncestral",
        (number("eta", 1.0, 0.0, 100.0), number("s_noise", 1.0, 0.0, 100.0)),
        _OUT_SAMPLER,
        _ancestral,
    ),
    _sigmas("BasicScheduler", (_MODEL, _SCHEDULER, _STEPS, _DENOISE), _basic_scheduler, reads_catalog=True),
    _sigmas(
        "BetaSamplingScheduler",
        (_MODEL, _STEPS, number("alpha", 0.6, 0.0, 50.0), number("beta", 0.6, 0.0, 50.0)),
        _beta_scheduler,
        reads_catalog=True,
    ),
    _sigmas(
        "SDTurboScheduler",
        (_MODEL, integer("steps", 1, 1, 10), _DENOISE),
        _turbo_scheduler,
        reads_catalog=True,
    ),
    _sigmas(
        "KarrasScheduler",
        (
            *(integer("steps", 20, 1, MAX_STEPS), number("sigma_max", 14.614642, 0.0, 5000.0)),
            *(number("sigma_min", 0.0291675, 0.0, 5000.0), number("rho", 7.0, 0.01, 100.0)),
        ),
        _karras_scheduler,
    ),
    _sigmas(
        "ExponentialScheduler",
        (
            *(integer("steps", 20, 1, MAX_STEPS), number("sigma_max", 14.614642, 0.0, 5000.0)),
            number("sigma_min", 0.0291675, 0.0, 5000.0),
        ),
        _exponential_scheduler,
    ),
    _sigmas(
        "Flux2Scheduler",
        (integer("steps", 20, 1, MAX_STEPS), integer("width", 1024, 16), integer("height", 1024, 16)),
        _flux_2_scheduler,
    ),
    _sigmas("ManualSigmas", (text("sigmas", "1, 0.5"),), _manual_sigmas),
    Kind(
        "SplitSigmas",
        (_SIGMAS, integer("step", 0, 0, _MAX_STEP)),
        (Output("SIGMAS", "high_sigmas"), Output("SIGMAS", "low_sigmas")),
        _split,
    ),
    Kind(
        "SplitSigmasDenoise",
        (_SIGMAS, _DENOISE),
        (Output("SIGMAS", "high_sigmas"), Output("SIGMAS", "low_sigmas")),
        _split_denoise,
    ),
    _sigmas("FlipSigmas", (_SIGMAS,), _flip),
    _sigmas("SetFirstSigma", (_SIGMAS, number("sigma", 136.0, 0.0, 20_000.0)), _set_first),
    Kind("ModelSamplingSD3", (_MODEL, number("shift", 3.0, 0.0, 100.0)), _OUT_MODEL, _shift("ModelSamplingSD3")),
    Kind(
        "ModelSamplingAuraFlow",
        (_MODEL, number("shift", 1.73, 0.0, 100.0)),
        _OUT_MODEL,
        _shift("ModelSamplingAuraFlow"),
    ),
    Kind(
        "ModelSamplingFlux",
        (
            *(_MODEL, number("max_shift", 1.15, 0.0, 100.0), number("base_shift", 0.5, 0.0, 100.0)),
            *(integer("width", 1024, 16), integer("height", 1024, 16)),
        ),
        _OUT_MODEL,
        _shift_flux,
    ),
)
