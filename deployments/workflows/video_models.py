"""Models of videos, which diffusers' own code runs: one request from noise to frames, of one sampler or of two.

Of a pipeline with two denoisers, one for much noise and one for little, two samplers run one after the other. Both are
one request where their steps are one schedule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from configs.options import DRAWING_SAMPLERS
from deployments.engines.diffusion.adapted_parts import stage_of
from deployments.records import ClipRequest
from deployments.workflows.backend import Backend, Catalog, Frames, Report
from deployments.workflows.records import Refused
from deployments.workflows.resizing import resized, resized_masks
from deployments.workflows.values import PENDING, Image, Latent, Later, LoraUse, Mask, Plan, Prompt, Scene

_IS_NOISE: Final = 1e-4  # so near to 1, the first level is noise alone
_SAME_LEVEL: Final = 1e-6
_WITHOUT_MEMORY: Final = ("euler", "ddim")  # samplers whose step reads no other one, and runs one forward
_STAGES: Final = ("high noise", "low noise")
_USUAL_FPS: Final = 25.0  # of LTX, where no node says another
_HUNYUAN_GUIDANCE: Final = 6.0
_TOGETHER: Final = 8  # frames that are scaled as one
FRAME_RATE: Final = "frame_rate"  # what a node says on a prompt


@dataclass(frozen=True, slots=True)
class VideoRule:
    """Rules of the pipeline of a class: how many frames a place of a latent has, what its sides are multiples of, and
    the kind of the scene that it reads. It may read a guidance of FluxGuidance, or a frame rate."""

    frames: int = 4
    multiple: int = 16
    scene: str | None = None
    reads_guidance: bool = False
    reads_rate: bool = False


VIDEO_CLASSES: Final[Mapping[str, VideoRule]] = {
    "WanPipeline": VideoRule(),
    "WanImageToVideoPipeline": VideoRule(scene="frames"),
    "WanVACEPipeline": VideoRule(scene="vace"),
    "HunyuanVideoPipeline": VideoRule(reads_guidance=True),
    "LTXPipeline": VideoRule(frames=8, multiple=32, reads_rate=True),
}


def fitting(catalog: Catalog, models: Sequence[str], scene: Scene | None) -> str:
    """Return the first of models that have one file whose class makes videos of such a scene; else the first."""
    wanted = None if scene is None else scene.kind
    for model in models:
        rule = VIDEO_CLASSES.get(catalog.facts(model).class_name)
        if rule is not None and rule.scene == wanted:
            return model
    return models[0]


def check_video(plan: Plan, prompts: Sequence[Prompt], class_name: str) -> None:
    """Raise Refused for what a pipeline of diffusers does not do for a plan."""
    rule, latent, scene = VIDEO_CLASSES[class_name], plan.latent, prompts[0].scene
    if not latent.frames:
        raise Refused(f"a {class_name} makes videos: expected the latent of a video", "latent_image")
    if latent.batch != 1 or latent.noise_mask is not None or latent.batch_index is not None:
        raise Refused(f"a {class_name} makes one whole video of noise", "latent_image")
    if latent.width % rule.multiple or latent.height % rule.multiple:
        shown = f"{latent.width}x{latent.height} pixels: sides of a {class_name} are multiples of {rule.multiple}"
        raise Refused(shown, "latent_image")
    if (latent.frames - 1) % rule.frames:
        raise Refused(f"the latent of {latent.frames} frames is none of a {class_name}", "latent_image")
    if plan.sampler.name in DRAWING_SAMPLERS:
        raise Refused(f"{plan.sampler.name} draws noise in its steps, which a {class_name} does not", "sampler_name")
    if plan.cfg < 1 or plan.model.extra:
        raise Refused(f"a {class_name} is guided by its pipeline: plainly, by 1 or more", "cfg")
    for side, prompt in zip(("positive", "negative"), prompts, strict=False):
        if prompt.zeroed or prompt.clip.last_layer is not None:
            raise Refused(f"a {class_name} reads a text as it is", side)
        if prompt.guidance is not None and not rule.reads_guidance:
            raise Refused(f"a {class_name} reads no guidance", side)
        if prompt.controls or prompt.images or prompt.references or prompt.beside is not None:
            raise Refused(f"a {class_name} reads no such image", side)
        if prompt.scene is not scene:
            raise Refused("both prompts are read beside the same pictures", side)
        if (None if prompt.scene is None else prompt.scene.kind) != rule.scene:
            read = {None: "reads no pictures", "frames": "begins at a picture", "vace": "reads a control video"}
            raise Refused(f"a {class_name} {read[rule.scene]}: link the node for it", side)
    if scene is not None:
        _check_scene(scene, latent, class_name)


def _check_scene(scene: Scene, latent: Latent, class_name: str) -> None:
    if (scene.width, scene.height, scene.length) != (latent.width, latent.height, latent.frames):
        raise Refused("the latent is of another size than the pictures beside the prompt", "latent_image")
    if scene.kind == "frames" and scene.start is None:
        raise Refused(f"a {class_name} begins at a picture: link a start image", "positive")
    for seen in scene.seen:
        if not any(_is_same(seen.image, one) for one in (scene.start, scene.end) if one is not None):
            raise Refused("the image encoder reads another image than the video begins or ends with", "positive")
    if scene.masks is not None and scene.control is None:
        raise Refused("masks of a control video, which is not linked", "positive")


def _is_same(one: Image, other: Image) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one is other or np.array_equal(one, other)
    return one is other


def begins(plan: Plan) -> bool:
    """Return whether a plan hands on noise, for a sampler that follows."""
    return plan.sigmas[-1] != 0


def check_first(plan: Plan, class_name: str) -> None:
    """Raise Refused for a plan that does not begin at noise alone."""
    if not plan.adds_noise or abs(plan.sigmas[0] - 1) > _IS_NOISE:
        raise Refused(f"a {class_name} is run from noise alone", "sampler")


def whole_plan(plan: Plan, class_name: str) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of a video with all of its steps, and what the request says of two denoisers.

    Raises Refused where two samplers do not do what one call of the pipeline does.
    """
    first, stage, steps = plan.latent.begun, stage_of(plan.model.file), len(plan.sigmas) - 1
    if first is None:
        check_first(plan, class_name)
        # A file that does not say which denoiser it has is of a model with one.
        return plan, {} if stage is None else {"second_from": 0 if stage else steps}
    if (stage_of(first.model.file), stage) != (0, 1):
        said = f"{first.model.file!r}, then {plan.model.file!r}"
        raise Refused(f"{said}: two samplers take a file of {_STAGES[0]} and one of {_STAGES[1]}, by its name", "model")
    if plan.adds_noise or abs(first.sigmas[-1] - plan.sigmas[0]) > _SAME_LEVEL:
        raise Refused("the second sampler goes on at another level of noise than the first one ends at", "latent_image")
    if plan.sampler != first.sampler or plan.sampler.name not in _WITHOUT_MEMORY:
        known = ", ".join(_WITHOUT_MEMORY)
        raise Refused(f"two samplers that share a video are both one of {known}", "sampler_name")
    if plan.positive != first.positive or (plan.cfg != 1 and plan.negative != first.negative):
        raise Refused("both samplers of a video read the same prompts", "positive")
    if first.cfg == 1 and plan.cfg != 1:
        raise Refused("a video whose first steps are not guided is not guided later", "cfg")
    loras = (*_of_stage(first, 0), *_of_stage(plan, 1))
    model = replace(first.model, loras=loras)
    joined = replace(first, model=model, sigmas=(*first.sigmas, *plan.sigmas[1:]))
    return joined, {"second_from": len(first.sigmas) - 1, "extra": {"guidance_scale_2": plan.cfg}}


def _of_stage(plan: Plan, stage: int) -> tuple[LoraUse, ...]:
    for use in plan.model.loras:
        if stage_of(use.name) != stage:
            raise Refused(f"the LoRA {use.name!r} says by its id for which denoiser it is: {_STAGES[stage]}", "model")
    return plan.model.loras


def guidance_of(plan: Plan, prompt: Prompt, class_name: str) -> dict[str, Any]:
    """Return the scales of a request's guidance."""
    if VIDEO_CLASSES[class_name].reads_guidance:
        own = _HUNYUAN_GUIDANCE if prompt.guidance is None else prompt.guidance
        return {"guidance_scale": own, "true_cfg_scale": plan.cfg}
    return {"guidance_scale": plan.cfg}


def reads_rate(class_name: str) -> bool:
    """Return whether a class makes videos by their frame rate."""
    rule = VIDEO_CLASSES.get(class_name)
    return rule is not None and rule.reads_rate


def rate_of(prompt: Prompt, class_name: str) -> dict[str, Any]:
    """Return the frames per second that a model reads. Raises Refused for a part of a frame."""
    if not reads_rate(class_name):
        return {}
    rate = next((values[0] for kind, values in prompt.extra if kind == FRAME_RATE), _USUAL_FPS)
    if rate != int(rate) or not 1 <= rate <= 120:
        raise Refused(f"{rate:g} frames per second: a {class_name} reads a whole number from 1 to 120", "positive")
    return {"fps": rate}


def filmed(request: ClipRequest, latent: Latent, scene: Scene | None, count: int) -> Later:
    """Return the latents of a request, so many times, with their frames."""
    waiting = Latent(
        PENDING,
        width=latent.width,
        height=latent.height,
        frames=latent.frames,
        before=latent.before,
        decoded=PENDING,
        decoded_by=request.model,
    )

    async def act(backend: Backend, report: Report) -> tuple[Latent, ...]:
        pictures = {} if scene is None else await asyncio.to_thread(scene_pictures, scene)
        extra = request.extra if scene is None or scene.strength == 1 else _with_strength(request.extra, scene)
        frames: Any = await backend.video(request.model_copy(update={"images": pictures, "extra": extra}), report)
        expected = (latent.frames, latent.height, latent.width, 3)
        if frames.shape != expected:
            raise Refused(f"frames of {frames.shape}: expected {expected}")
        return (waiting.changed(decoded=frames),) * count

    return Later(act, (waiting,) * count)


def _with_strength(extra: Mapping[str, Any], scene: Scene) -> dict[str, Any]:
    return {**extra, "conditioning_scale": scene.strength}


def scene_pictures(scene: Scene) -> dict[str, Any]:
    """Return the images of a request, in the size of its video. Raises Refused for what its pipeline would change."""
    found: dict[str, Any] = {}
    for name, image, shown in (("image", scene.start, "start"), ("last_image", scene.end, "end")):
        if isinstance(image, np.ndarray):
            if len(image) != 1:
                raise Refused(f"a batch of {len(image)} images to {shown} with: expected one", "positive")
            found[name] = _sized(image, scene)[0]
    if isinstance(scene.reference, np.ndarray):
        found["reference_images"] = (_sized(scene.reference[:1], scene)[0],)
    if isinstance(scene.control, np.ndarray):
        # Some frames at a time: a video as numbers takes four times its bytes.
        parts = [_sized(some, scene) for some in _groups(scene.control[: scene.length])]
        control = _filled(np.concatenate(parts), scene.length, 128)
        found["video"] = tuple(control)
    if isinstance(scene.masks, np.ndarray):
        parts = [_masks_sized(some, scene) for some in _groups(scene.masks[: scene.length])]
        found["mask"] = tuple(_filled(np.concatenate(parts), scene.length, 255))
    return found


def _sized(images: Image, scene: Scene) -> Frames:
    assert isinstance(images, np.ndarray)
    if images.dtype == np.uint8:
        images = np.asarray(images / np.float32(255), np.float32)
    fitted = resized(images[..., :3], scene.width, scene.height, "bilinear", "center")
    return np.rint(np.clip(fitted, 0, 1) * 255).astype(np.uint8)


def _masks_sized(masks: Mask, scene: Scene) -> Frames:
    assert isinstance(masks, np.ndarray)
    fitted = resized_masks(masks, scene.width, scene.height, "bilinear", "center")
    if not np.isin(fitted, (0, 1)).all():
        raise Refused("masks of a control video are 0 or 1 everywhere, in its size", "positive")
    return np.repeat((fitted * 255).astype(np.uint8)[..., None], 3, -1)


def _groups(frames: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for place in range(0, len(frames), _TOGETHER):
        yield frames[place : place + _TOGETHER]


def _filled(frames: Frames, length: int, value: int) -> Frames:
    """Return frames, with plain ones behind them up to a length."""
    rest = np.full((length - len(frames), *frames.shape[1:]), value, np.uint8)
    return np.concatenate([frames, rest])
