"""The plan of a sampling node of any kind, and the one image request that it becomes, with latents in and out.

What the request cannot say is refused: that of a device is found by the device.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from configs.options import Sampler as SamplerOption
from deployments.engines.diffusion.families import FAMILIES
from deployments.records import NO_PROMPT, REFERENCES, ClipRequest, ControlNetUse, ImageRequest
from deployments.records import LoraUse as RequestLora
from deployments.workflows.backend import Backend, Catalog, ModelFacts, Report
from deployments.workflows.records import Refused
from deployments.workflows.references import READ, check_references, reference_latents, reference_pixels
from deployments.workflows.resizing import resized
from deployments.workflows.schedules import MAX_STEPS, Levels, levels_of
from deployments.workflows.stock_models import (
    DIFFERENTIAL,
    NORMED,
    STOCK_CLASSES,
    beside_fields,
    check_stock,
    drawn,
    stock_images,
    stock_references,
    stock_text,
)
from deployments.workflows.values import (
    PENDING,
    PENDING_LATENT,
    ControlUse,
    Latent,
    Later,
    LoraUse,
    ModelValue,
    Plan,
    Prompt,
)
from deployments.workflows.video_models import (
    FRAME_RATE,
    VIDEO_CLASSES,
    begins,
    check_first,
    check_video,
    filmed,
    fitting,
    guidance_of,
    rate_of,
    reads_rate,
    whole_plan,
)

_TWICE: Final = ("heun", "dpm_2", "dpm_2_ancestral", "dpmpp_2s_ancestral")  # forwards a step
_UNI_PC: Final = ("uni_pc", "uni_pc_bh2")
_LAST_TIME: Final = 999.0  # of Stable Diffusion
_SEED_BITS: Final = 63  # of an image's seed; the noise has its own, of 64
_GUIDANCE: Final = 3.5  # what FLUX reads where nobody says another
_FLUXES: Final = ("FluxPipeline", "Flux2Pipeline")
_OF_TWO_TEXTS: Final = ("FluxPipeline", "StableDiffusionXLPipeline")  # for either of their two text encoders
_OF_CLIPS: Final = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")  # whose prompts may have weights
# Languages models read these models' prompts, and brackets are characters of theirs.
_UNWEIGHTED: Final = (
    *("Flux2Pipeline", "Flux2KleinPipeline", "QwenImagePipeline", "QwenImageEditPipeline"),
    *("QwenImageEditPlusPipeline", "ZImagePipeline", "QwenImage21Pipeline", "Krea2Pipeline", "ErnieImagePipeline"),
    "LongCatImagePipeline",
)
# As many as ComfyUI's T5 reads, or the most that a class reads.
_MOST_TOKENS: Final[Mapping[str, int]] = {
    "FluxPipeline": 256,
    "FluxKontextPipeline": 256,
    "FluxFillPipeline": 256,
    "FluxControlPipeline": 256,
    "StableDiffusion3Pipeline": 77,
    "Lumina2Pipeline": 512,
}
_PATCHED: Final = ("ZImagePipeline",)  # whose ControlNets ComfyUI has as patches of models
_GROWN_SIZES: Final = "sdxl_sizes"


def sampled(catalog: Catalog, plan: Plan, *, with_clean: bool = False) -> tuple[Latent, ...] | Later:
    """Return the latents of a plan, and with `with_clean` what was clean in them behind them.

    Raises Refused for what no image request can say, and the errors of a bad request.
    """
    count = 2 if with_clean else 1
    if not plan.sigmas:
        return (plan.latent,) * count
    name, facts = _model(catalog, plan)
    if facts.class_name in VIDEO_CLASSES:
        return _filmed(plan, name, facts, count)
    if plan.latent.frames:
        raise Refused(f"the latent of a video, and a {facts.class_name} makes images here", "latent_image")
    if facts.class_name in STOCK_CLASSES:
        return _drawn_by_stock(plan, name, facts, count)
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


def _drawn_by_stock(plan: Plan, name: str, facts: ModelFacts, count: int) -> Later:
    """Return the latents of a plan whose model is run by diffusers' own code: only their images are there."""
    prompts, positive, negative = _checked_prompts(plan, facts)
    check_stock(plan, prompts, facts.class_name)
    rule = STOCK_CLASSES[facts.class_name]
    pictures, sized = stock_images(positive, rule)
    pictures = pictures or stock_references(positive)
    text, options = stock_text(_words(positive, facts, "positive"), rule)
    request = ImageRequest(
        model=name,
        prompt=text,
        negative_prompt=None if negative is None else _words(negative, facts, "negative"),
        lora=_loras(plan.model, positive),
        n=plan.latent.batch,
        seed=plan.seed % 2**_SEED_BITS,
        width=plan.latent.width or None,
        height=plan.latent.height or None,
        sampler=_sampler(plan, plan.latent, facts).model_copy(update={"cfg": 1.0, "zeroes_negative": False}),
        max_sequence_length=_MOST_TOKENS.get(facts.class_name),
        images={REFERENCES: pictures} if pictures else {},
        extra=options | sized,
        **beside_fields(positive, plan.latent),
        **rule.scales(plan.cfg, _guidance(positive)),
    )
    return drawn(request, count)


def _filmed(plan: Plan, name: str, facts: ModelFacts, count: int) -> tuple[Latent, ...] | Later:
    """Return the latents of a video's plan: with their frames, or begun where noise is left in them."""
    prompts, positive, negative = _checked_prompts(plan, facts)
    check_video(plan, prompts, facts.class_name)
    if begins(plan):
        check_first(plan, facts.class_name)
        return (plan.latent.changed(samples=PENDING, begun=plan),) * count
    whole, denoisers = whole_plan(plan, facts.class_name)
    if whole.negative is not None and whole.cfg != 1:
        (negative,) = whole.negative
    latent = plan.latent.changed(begun=None)
    request = ClipRequest(
        model=name,
        prompt=_words(positive, facts, "positive"),
        negative_prompt=None if negative is None else _words(negative, facts, "negative"),
        lora=_loras(whole.model, positive),
        seed=whole.seed % 2**_SEED_BITS,
        width=latent.width,
        height=latent.height,
        num_frames=latent.frames,
        sampler=_sampler(replace(whole, cfg=1.0), latent, facts),
        output="frames",
        reports_steps=True,
        **guidance_of(whole, positive, facts.class_name),
        **rate_of(positive, facts.class_name),
        **denoisers,
    )
    return filmed(request, latent, positive.scene, count)


def _model(catalog: Catalog, plan: Plan) -> tuple[str, ModelFacts]:
    """Return the registered model that has all parts of a plan."""
    names = plan.model.models
    for prompt in _read(plan):
        found = tuple(name for name in names if name in prompt.clip.models)
        if not found:
            both = f"{', '.join(names)} and {', '.join(prompt.clip.models)}"
            raise Refused(f"no registered model has both the model and the text encoder: {both}", "model")
        names = found
    begun = plan.latent.begun
    if begun is not None:
        names = tuple(name for name in names if name in begun.model.models)
        if not names:
            both = f"{', '.join(begun.model.models)} and {', '.join(plan.model.models)}"
            raise Refused(f"no registered model has the files of both samplers: {both}", "model")
    name = fitting(catalog, names, plan.positive[0].scene)
    facts = facts_of(catalog, name)
    if not any(facts.class_name in known for known in (FAMILIES, STOCK_CLASSES, VIDEO_CLASSES)):
        raise Refused(f"{name} is a {facts.class_name}, whose steps this cluster does not run itself", "model")
    return name, facts


def facts_of(catalog: Catalog, model: str) -> ModelFacts:
    """Return the facts of a model under the class of its family: it may be saved for another task, a refiner's, say."""
    facts = catalog.facts(model)
    return replace(facts, class_name=FAMILIES[facts.class_name].class_name) if facts.class_name in FAMILIES else facts


def _read(plan: Plan) -> tuple[Prompt, ...]:
    """Return the prompts that are read: no negative one without guidance."""
    sides = [("positive", plan.positive)]
    if plan.cfg != 1 and plan.negative is not None:
        sides.append(("negative", plan.negative))
    for name, side in sides:
        if len(side) != 1:
            raise Refused(f"{len(side)} conditionings are combined: a request has one", name)
    return tuple(side[0] for _, side in sides)


def _checked_prompts(plan: Plan, facts: ModelFacts) -> tuple[tuple[Prompt, ...], Prompt, Prompt | None]:
    """Return the prompts that are read, all and by their side. Raises Refused for what no request says of a model."""
    prompts = _read(plan)
    _check_model(plan, facts)
    for side, prompt in zip(("positive", "negative"), prompts, strict=False):
        _check_prompt(prompt, prompts[0], side, facts, plan.latent)
    return prompts, prompts[0], prompts[1] if len(prompts) > 1 else None


def _request(plan: Plan, name: str, facts: ModelFacts, output: str) -> ImageRequest:
    (prompts, positive, negative), latent = _checked_prompts(plan, facts), plan.latent
    if plan.cfg != 1 and negative is None:
        raise Refused("guidance needs a negative prompt", "negative")
    check_references(prompts, facts.class_name, facts.variant)
    pictures = reference_pixels(positive)
    given = latent.samples if isinstance(latent.samples, np.ndarray) else None
    mask = None if latent.noise_mask is None or latent.noise_mask is PENDING else latent.noise_mask
    batch = latent.batch if given is None else len(given)
    fields: dict[str, Any] = {
        "model": name,
        "prompt": _words(positive, facts, "positive"),
        "prompt_2": _second_words(positive, facts),
        "negative_prompt": None if negative is None else _words(negative, facts, "negative"),
        "lora": _loras(plan.model, positive),
        "n": batch,
        "seed": plan.seed % 2**_SEED_BITS,
        "sampler": _sampler(plan, latent, facts),
        "latents": given,
        "noise_mask": None if mask is None else _for_batch(mask, batch),
        "output": output,
        "guidance_scale": _guidance(positive),
        "max_sequence_length": _MOST_TOKENS.get(facts.class_name),
        "prompt_syntax": "comfyui" if facts.class_name in _OF_CLIPS else "plain",
        "clip_skip": _clip_skip(positive, facts),
        "images": {REFERENCES: pictures} if pictures else {},
        "reference_latents": reference_latents(positive),
    }
    if latent.samples is None:
        fields |= _sides(latent, facts)
    controls = (*positive.controls, *plan.model.controls)
    parts = [_acting_part(use, plan, facts) for use in controls]
    fields["control"] = tuple(
        _control(use, latent, part)
        for use, part in zip(controls, parts, strict=True)
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
    kinds = [kind for kind, _ in plan.model.extra]
    for kind in kinds:
        if kind not in (NORMED, DIFFERENTIAL) or kinds.count(kind) > 1:
            raise Refused(f"{kind} changes the model in a way that this cluster does not", "model")
    if plan.model.controls and facts.class_name not in _PATCHED:
        raise Refused(
            f"patches of a {facts.class_name} are not honoured here: apply a ControlNet to the prompts", "model"
        )
    options = dict(plan.sampler.options)
    if unknown := options.keys() - {"eta", "s_noise"}:
        raise Refused(f"{min(unknown)} is no option of the sampler here", "sampler")
    if not all(a > b >= 0 for a, b in itertools.pairwise(plan.sigmas)) or len(plan.sigmas) < 2:
        shown = ", ".join(f"{one:g}" for one in plan.sigmas[:10])
        raise Refused(f"sigmas {shown}: expected two or more, each lower than the one before", "sigmas")
    if plan.sampler.name in _UNI_PC and len(plan.sigmas) < 3:
        raise Refused(f"{plan.sampler.name} takes two steps at least", "sampler_name")
    if len(plan.sigmas) > MAX_STEPS + 1:
        raise Refused(f"{len(plan.sigmas) - 1} steps: at most {MAX_STEPS}", "sigmas")


def _check_prompt(prompt: Prompt, positive: Prompt, side: str, facts: ModelFacts, latent: Latent) -> None:
    """Raise Refused for what is on a prompt and cannot be said of a request."""
    why = None
    if prompt.zeroed and side == "positive":
        why = "ConditioningZeroOut is honoured on a negative prompt"
    elif (prompt.start, prompt.end) != (0.0, 1.0):
        why = "a prompt is read in all steps, and not in a part of them"
    elif (side == "negative" or facts.class_name not in _OF_TWO_TEXTS) and _second_text(prompt) is not None:
        why = "all text encoders read one text"
    elif prompt.clip.loras != positive.clip.loras or prompt.clip.last_layer != positive.clip.last_layer:
        why = "both prompts are read by the same text encoder, with the same LoRAs"
    elif [_control_key(use) for use in prompt.controls] != [_control_key(use) for use in positive.controls]:
        why = "a ControlNet acts on both prompts, or on none"
    elif prompt.beside is not None and prompt.beside.mask is None and facts.class_name in FAMILIES:
        why = f"an image in further channels is not read by a {facts.class_name}"
    elif facts.class_name in _FLUXES and _guidance(prompt) != _guidance(positive):
        why = "both prompts have one guidance"
    for kind, values in prompt.extra:
        if kind in READ or (kind == _GROWN_SIZES and _are_plain_sizes(values, latent)):
            continue
        if kind == FRAME_RATE and reads_rate(facts.class_name):
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
            raise Refused(f"weights in prompts are for CLIP, and a {facts.class_name} has another text encoder", side)
        words = words.replace("\\(", "(").replace("\\)", ")")
    return words or NO_PROMPT


def _second_text(prompt: Prompt) -> str | None:
    """Return the text of the second encoder where it has one of its own."""
    return next((own for _, own in prompt.texts if own != prompt.text), None)


def _second_words(prompt: Prompt, facts: ModelFacts) -> str | None:
    own = _second_text(prompt)
    return None if own is None else _words(replace(prompt, text=own), facts, "positive")


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


def _sampler(plan: Plan, latent: Latent, facts: ModelFacts) -> SamplerOption:
    fields: dict[str, Any] = {"cfg": plan.cfg, "adds_noise": plan.adds_noise, "noise_seed": plan.seed}
    fields["zeroes_negative"] = plan.cfg != 1 and plan.negative is not None and plan.negative[0].zeroed
    changes = dict(plan.model.extra)
    norm = changes.get(NORMED)
    fields["cfg_norm"] = norm[0] if norm is not None and (plan.cfg != 1 or norm != (1.0,)) else None
    if DIFFERENTIAL in changes and latent.noise_mask is not None:
        levels = levels_of(facts.class_name, facts.variant, facts.scheduler, plan.model.shift)
        fields["masks_until"] = max(levels.lowest, plan.sigmas[-1])
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
        image = resized(image, width, height, use.scaling, "center")
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


def levels_of_model(catalog: Catalog, model: ModelValue) -> Levels:
    """Return the levels of noise of the registered model that a file belongs to."""
    facts = facts_of(catalog, model.models[0])
    return levels_of(facts.class_name, facts.variant, facts.scheduler, model.shift)
