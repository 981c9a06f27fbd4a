"""Models that diffusers' own code runs, from noise to images: a sampler stands in place of their scheduler.

Their pipelines read texts, and guide, by themselves. Of the latents only the images are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from configs.options import DRAWING_SAMPLERS
from deployments.records import MAX_NAMED_IMAGES, ImageRequest
from deployments.workflows.backend import Backend, Report
from deployments.workflows.images import KONTEXT_SIZES
from deployments.workflows.records import Refused
from deployments.workflows.references import EDITS
from deployments.workflows.resizing import scaled_to_area
from deployments.workflows.values import PENDING, Latent, Later, Plan, Prompt

_CELL: Final = 16  # pixels
_QWEN_21_CELL: Final = 32
_IS_NOISE: Final = 1e-4  # so near to 1, the first level is noise alone
_COLORS: Final = 3
_BESIDE: Final = {"fill": "InpaintModelConditioning", "control": "InstructPixToPixConditioning"}
NORMED, DIFFERENTIAL = "CFGNorm", "DifferentialDiffusion"  # what nodes say of a model
_AREA: Final = 1024 * 1024  # of the images that some pipelines make, whatever is asked for


@dataclass(frozen=True, slots=True)
class StockRule:
    """A class whose guidance is the negative prompt's output and, times the scale, the difference of the prompt's.

    Its images have whole cells, and perhaps one area: the exact sides, `cut` or `rounded`, in whole cells. It may read
    images beside its latents: latents of encoded images as `references`, or the `images` of its prompt's node, which
    come in whole cells. One that `draws` has latents in the shape of images, in which samplers draw the noise of their
    steps. `scale` is the parameter of the scale; `guidance_scale` may begin above one (`beyond_one`), and be beside it,
    or alone, that of FluxGuidance; a model may leave that unread. A class that `norms` has CFGNorm's guidance. In
    channels `beside` its latents a model may read those of an image with a part to fill in, or of a control image.
    `options` are further parameters, without which its pipeline would do more than its nodes say.
    Where a text is `parted`, what stands before the part is the parameter `system_prompt`.
    """

    area: Literal["any", "cut", "rounded"] = "any"
    beside: Literal["fill", "control"] | None = None
    most_references: int = 0
    most_images: int = 0
    scale: Literal["guidance_scale", "true_cfg_scale", "beyond_one", "none"] = "guidance_scale"
    guidance: Literal["refused", "read", "unread"] = "refused"
    norms: bool = False
    draws: bool = False
    cell: int = _CELL
    options: Mapping[str, Any] = field(default_factory=dict)
    parted: str = ""

    def scales(self, cfg: float, guidance: float) -> dict[str, Any]:
        """Return the parameters of guidance by `cfg`, and of what FluxGuidance said."""
        if self.scale == "beyond_one":
            return {"guidance_scale": cfg - 1}
        found: dict[str, Any] = {} if self.scale == "none" else {self.scale: cfg}
        return found | {"guidance_scale": guidance} if self.guidance == "read" else found

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the images that are made where this is asked for, as diffusers calculates it."""
        sides: tuple[float, float] = width, height
        if self.area != "any":
            scale = math.sqrt(_AREA / max(width * height, 1))
            sides = width * scale, height * scale
        if self.area == "rounded":
            sides = round(sides[0]), round(sides[1])
        return int(sides[0] // self.cell * self.cell), int(sides[1] // self.cell * self.cell)


STOCK_CLASSES: Final[Mapping[str, StockRule]] = {
    "HiDreamImagePipeline": StockRule("cut", draws=True),
    "OvisImagePipeline": StockRule(),
    "FluxKontextPipeline": StockRule("rounded", most_references=1, scale="true_cfg_scale", guidance="read"),
    "FluxFillPipeline": StockRule(beside="fill", scale="none", guidance="read"),
    "FluxControlPipeline": StockRule(beside="control", scale="none", guidance="read"),
    "LongCatImagePipeline": StockRule(
        guidance="unread", norms=True, options={"enable_cfg_renorm": False, "enable_prompt_rewrite": False}
    ),
    "Krea2Pipeline": StockRule(scale="beyond_one"),
    "ErnieImagePipeline": StockRule(draws=True, options={"use_pe": False}),
    "Lumina2Pipeline": StockRule(draws=True, options={"cfg_normalization": False}, parted=" <Prompt Start> "),
    "QwenImage21Pipeline": StockRule(scale="true_cfg_scale", cell=_QWEN_21_CELL, most_images=MAX_NAMED_IMAGES),
}


def check_stock(plan: Plan, prompts: Sequence[Prompt], class_name: str) -> None:
    """Raise Refused for what a pipeline of diffusers does not do for a plan."""
    rule, latent, size = STOCK_CLASSES[class_name], plan.latent, (plan.latent.width, plan.latent.height)
    if (latent.noise_mask is not None and rule.beside != "fill") or latent.batch_index is not None:
        raise Refused(f"a {class_name} is run from noise to whole images", "latent_image")
    # Beside noise alone, what a latent has in it is nothing: only its size counts, which a check may not know.
    if latent.samples is not PENDING and (made := rule.size(*size)) != size:
        shown = "{}x{} pixels: a {} makes {}x{} of them".format(*size, class_name, *made)
        raise Refused(shown, "latent_image")
    if not plan.adds_noise or plan.sigmas[-1] != 0 or abs(plan.sigmas[0] - 1) > _IS_NOISE:
        raise Refused(f"a {class_name} is run from noise alone to images, and hands on no noise", "sampler")
    if plan.sampler.name in DRAWING_SAMPLERS and not rule.draws:
        raise Refused(
            f"{plan.sampler.name} draws noise in its steps, which a {class_name} does not here", "sampler_name"
        )
    if plan.cfg < 1 or (plan.cfg != 1 and rule.scale == "none"):
        taken = "1" if rule.scale == "none" else "1 or more"
        raise Refused(f"a {class_name} is guided by its pipeline: plainly, by {taken}", "cfg")
    known = (*([NORMED] if rule.norms else []), *([DIFFERENTIAL] if rule.beside == "fill" else []))
    if other := [kind for kind, _ in plan.model.extra if kind not in known]:
        raise Refused(f"{other[0]} changes how a {class_name} is guided, which its pipeline does by itself", "model")
    for side, prompt in zip(("positive", "negative"), prompts, strict=False):
        if prompt.zeroed or prompt.clip.last_layer is not None:
            raise Refused(f"a {class_name} reads a text as it is", side)
        if prompt.guidance is not None and rule.guidance == "refused":
            raise Refused(f"a {class_name} reads no guidance", side)
        if prompt.controls or (prompt.beside is not None and rule.beside is None):
            raise Refused(f"a {class_name} reads no such image", side)
        read = None if prompt.beside is None else "control" if prompt.beside.mask is None else "fill"
        if read != rule.beside:
            raise Refused(
                f"a {class_name} reads an encoded image: link the node {_BESIDE[rule.beside or 'fill']}", side
            )
        if prompt.images and (EDITS, (True,)) not in prompt.extra:
            raise Refused("an editing model's VAE reads the images, too: link it to the prompt's node", side)
        for what, count, most in (
            ("references", len(prompt.references), rule.most_references),
            ("images", len(prompt.images), rule.most_images),
        ):
            if count > most:
                raise Refused(f"{count} {what}: a {class_name} reads {most}", side)
        own, first = ([id(image) for image in (*one.images, *one.references)] for one in (prompt, prompts[0]))
        if own != first:
            raise Refused("both prompts are read beside the same images", side)


def stock_text(words: str, rule: StockRule) -> tuple[str, dict[str, Any]]:
    """Return a prompt, and the parameters for a class that parts it from what stands before it. Raises Refused."""
    if not rule.parted:
        return words, dict(rule.options)
    before, found, after = words.partition(rule.parted)
    if not found or not before or not after:
        raise Refused(f"the text has no {rule.parted.strip()!r} between the system's prompt and its own", "positive")
    return after, dict(rule.options) | {"system_prompt": before}


def beside_fields(prompt: Prompt, latent: Latent) -> dict[str, Any]:
    """Return the fields of a request for what its model reads in further channels; none while it is not there."""
    beside = prompt.beside
    if beside is None or not isinstance(beside.latent.samples, np.ndarray):
        return {}
    fields: dict[str, Any] = {"beside_latents": beside.latent.samples, "beside_mask": beside.mask}
    if isinstance(latent.noise_mask, np.ndarray):
        fields |= {"latents": latent.samples, "noise_mask": latent.noise_mask}
    if any(array is not None and len(array) != 1 for array in fields.values()):
        raise Refused("a batch of images to read beside a prompt: expected one", "positive")
    return fields


def stock_images(prompt: Prompt, rule: StockRule) -> tuple[tuple[npt.NDArray[np.uint8], ...], dict[str, Any]]:
    """Return the images of a prompt's node, and the parameter that leaves their sizes; none while they are not there.

    Raises Refused for those that no one resolution leaves as they are: the class scales all to one area.
    """
    arrays = [image for image in prompt.images if isinstance(image, np.ndarray)]
    if not arrays:
        return (), {}
    sizes = [(one.shape[2], one.shape[1]) for one in arrays]
    if any(one.shape[-1] != _COLORS for one in arrays):
        raise Refused("an image with transparency beside a prompt: expected three colors", "positive")
    side = round(math.sqrt(sizes[0][0] * sizes[0][1]))
    for size in sizes:
        if scaled_to_area(*size, side * side, rule.cell) != size:
            shown = ", ".join("{}x{}".format(*one) for one in sizes)
            raise Refused(f"images of {shown}: their model scales all to one area; say a resolution", "positive")
    pixels = tuple(np.rint(np.clip(one[0], 0, 1) * 255).astype(np.uint8) for one in arrays)
    return pixels, {"output_resolution": side}


def stock_references(prompt: Prompt) -> tuple[npt.NDArray[np.uint8], ...]:
    """Return the images that a prompt's latents were encoded from; none while they are not there.

    Raises Refused for those that the pipeline would scale.
    """
    found = []
    for latent in prompt.references:
        if latent.pixels is None:
            raise Refused("a reference that is no encoded image: its pipeline reads images", "positive")
        if isinstance(latent.pixels, np.ndarray):
            count, height, width, _ = latent.pixels.shape
            if count != 1 or (width, height) not in KONTEXT_SIZES:
                shown = f"{count} references of {width}x{height}"
                raise Refused(f"{shown}: expected one of a size that FluxKontextImageScale makes", "positive")
            found.append(np.rint(np.clip(latent.pixels[0], 0, 1) * 255).astype(np.uint8))
    return tuple(found)


def drawn(request: ImageRequest, count: int) -> Later:
    """Return the latents of a request, so many times, with their images."""
    width, height = request.width or 0, request.height or 0
    waiting = Latent(PENDING, request.n, width, height, decoded=PENDING, decoded_by=request.model)

    async def act(backend: Backend, report: Report) -> tuple[Latent, ...]:
        images = await backend.image(request, report)
        if images.shape[:3] != (request.n, height, width):
            raise Refused(f"images of {np.shape(images)}: expected {request.n} of {width}x{height}")
        return (waiting.changed(decoded=images),) * count

    return Later(act, (waiting,) * count)
