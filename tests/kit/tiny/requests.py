"""Every class that is compared with diffusers: tiny random pipelines, and a request to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from kit.tiny.classes import CASES as IMAGE_CASES
from kit.tiny.classes import assembled
from kit.tiny.clips import AUDIOS, VIDEOS
from kit.tiny.further import FURTHER_CASES
from kit.tiny.ltx2 import LTX2_CASES
from kit.tiny.pipelines import PIPELINES
from kit.tiny.seeing import SEEING_CASES
from kit.tiny.videos_in import VIDEO_CASES

from deployments.engines.records.protocol import StockRequest
from deployments.engines.records.sounds import Sound
from deployments.engines.stock.inputs import FIELDS
from deployments.engines.stock.known import read_class

DEMO = Path(__file__).parents[3] / "infra" / "demo" / "models"
CASES = {**IMAGE_CASES, **VIDEO_CASES, **SEEING_CASES, **FURTHER_CASES, **LTX2_CASES}
BUILDERS = {**PIPELINES, **VIDEOS, **AUDIOS}
SIZE = {"height": 32, "width": 32}
IMAGE = ("image",)
PAINT = ("image", "mask_image")
SMALL_KONTEXT = {**SIZE, "max_area": 1024, "_auto_resize": False}
# Classes that are made of another one's parts: that one, the arguments of a call, and the images that it is given.
DERIVED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "AnimateDiffPAGPipeline": ("AnimateDiffPipeline", {**SIZE, "num_frames": 4}, ()),
    "ChromaImg2ImgPipeline": ("ChromaPipeline", {**SIZE, "strength": 0.9, "max_sequence_length": 16}, IMAGE),
    "ChromaInpaintPipeline": ("ChromaPipeline", {**SIZE, "strength": 0.9, "max_sequence_length": 16}, PAINT),
    "ConsistencyModelPipeline": ("DDPMPipeline", {}, ()),
    "DDIMPipeline": ("DDPMPipeline", {}, ()),
    "Flux2KleinInpaintPipeline": (
        "Flux2KleinPipeline", {**SIZE, "max_sequence_length": 64, "strength": 0.9}, PAINT
    ),
    "FluxKontextInpaintPipeline": ("digits-flux", SMALL_KONTEXT, PAINT),
    "FluxKontextPipeline": ("digits-flux", SMALL_KONTEXT, IMAGE),
    "HunyuanDiTPAGPipeline": (
        "HunyuanDiTPipeline", {"height": 16, "width": 16, "use_resolution_binning": False}, ()
    ),
    "KandinskyV22Img2ImgCombinedPipeline": (
        "KandinskyV22CombinedPipeline", {**SIZE, "prior_num_inference_steps": 2, "strength": 0.9}, IMAGE
    ),
    "LTXConditionPipeline": ("LTXPipeline", {**SIZE, "num_frames": 9, "max_sequence_length": 16}, ()),
    "LTXImageToVideoPipeline": ("LTXPipeline", {**SIZE, "num_frames": 9, "max_sequence_length": 16}, IMAGE),
    "LatentConsistencyModelImg2ImgPipeline": ("LatentConsistencyModelPipeline", {"strength": 0.9}, IMAGE),
    "SanaPAGPipeline": (
        "SanaPipeline", {**SIZE, "use_resolution_binning": False, "complex_human_instruction": []}, ()
    ),
    "SemanticStableDiffusionPipeline": ("LatentConsistencyModelPipeline", SIZE, ()),
    "StableDiffusionModelEditingPipeline": ("LatentConsistencyModelPipeline", {"height": 16, "width": 16}, ()),
    "StableDiffusionPAGImg2ImgPipeline": ("StableDiffusionPAGPipeline", {"pag_scale": 2.0, "strength": 0.9}, IMAGE),
    "StableDiffusionPAGInpaintPipeline": ("StableDiffusionPAGPipeline", {**SIZE, "strength": 0.9}, PAINT),
    "StableDiffusionPanoramaPipeline": ("StableDiffusionPAGPipeline", SIZE, ()),
    "StableDiffusionSAGPipeline": ("LatentConsistencyModelPipeline", SIZE, ()),
    "StableDiffusionXLPAGImg2ImgPipeline": ("digits-sdxl", {"strength": 0.9}, IMAGE),
    "StableDiffusionXLPAGInpaintPipeline": ("digits-sdxl", {**SIZE, "strength": 0.9}, PAINT),
    "StableDiffusionXLPAGPipeline": ("digits-sdxl", SIZE, ()),
}  # fmt: skip

# What diffusers' own call fails without: an option of its config that this denoiser does not have, and that tells of
# nothing that it takes.
MENDED: dict[str, Callable[[Any], object]] = {
    "ChromaInpaintPipeline": lambda pipeline: pipeline.transformer.register_to_config(guidance_embeds=False)
}


def built_from(base: str, class_name: str) -> Any:
    """A class over the parts of another one."""
    if base in BUILDERS:
        parts = BUILDERS[base][0]().components
    else:
        parts = diffusers.DiffusionPipeline.from_pretrained(DEMO / base, torch_dtype=torch.float32).components
    cls = getattr(diffusers, class_name)
    names, options = cls._get_signature_keys(cls)
    unchecked = {"requires_safety_checker": False} if "requires_safety_checker" in options else {}
    return cls(**{name: parts.get(name) for name in names}, **unchecked)


def case_of(class_name: str) -> tuple[Callable[[], Any], Mapping[str, Any], tuple[str, ...]]:
    if class_name in CASES:
        case = CASES[class_name]
        return lambda: assembled(class_name, **case.parts()), case.options, case.images
    if class_name in DERIVED:
        base, options, images = DERIVED[class_name]
        return lambda: built_from(base, class_name), options, images
    build, options = BUILDERS[class_name]
    return build, options, IMAGE if class_name == "StableDiffusionInstructPix2PixPipeline" else ()


def pictures(rng: np.random.Generator, said: str, height: int, width: int) -> tuple[str, Any]:
    """The parameter and its image, or so many as are said behind its name. A mask keeps what is below."""
    name, _, count = said.partition(":")
    mask = np.where(np.arange(height) < 16, 255, 0).astype(np.uint8)[:, None].repeat(width, 1)
    drawn = [
        mask if "mask" in name else rng.integers(0, 256, (height, width, 3), np.uint8) for _ in range(int(count or 1))
    ]
    return name, tuple(drawn) if count else drawn[0]


def sound(rng: np.random.Generator, pipeline: Any) -> Sound:
    """A second of noise, as the pipeline's VAE takes it."""
    config = pipeline.vae.config
    samples = rng.uniform(-1, 1, (config.audio_channels, config.sampling_rate)).astype(np.float32)
    return Sound(samples, config.sampling_rate)


def request_to(class_name: str, pipeline: Any) -> StockRequest:
    """A request with all that the class's case asks for, random images and sounds among it."""
    _, options, image_names = case_of(class_name)
    rng, side = np.random.default_rng(0), options.get("height", 32)
    fields = {"num_inference_steps": 3 if "strength" in options else 2}
    fields |= {name: value for name, value in options.items() if name in FIELDS}
    return StockRequest(
        "r",
        5,
        "a cat",
        fields={name: value for name, value in fields.items() if name in read_class(class_name).parameters},
        images=dict(pictures(rng, name, side, options.get("width", side)) for name in image_names),
        extra={name: value for name, value in options.items() if name not in FIELDS},
        audio={name: sound(rng, pipeline) for name in (CASES[class_name].audio if class_name in CASES else ())},
    )
