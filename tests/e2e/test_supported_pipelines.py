"""Classes of diffusers with tiny random weights, through the stock engine: what they make is what diffusers makes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from unit.deployments.engines.stock.test_stock_pipelines import load, run
from unit.deployments.engines.stock.tiny_classes import CASES as IMAGE_CASES
from unit.deployments.engines.stock.tiny_classes import assembled
from unit.deployments.engines.stock.tiny_clips import AUDIOS, VIDEOS
from unit.deployments.engines.stock.tiny_further import FURTHER_CASES
from unit.deployments.engines.stock.tiny_ltx2 import LTX2_CASES
from unit.deployments.engines.stock.tiny_pipelines import PIPELINES, saved
from unit.deployments.engines.stock.tiny_seeing import SEEING_CASES
from unit.deployments.engines.stock.tiny_videos_in import VIDEO_CASES

from deployments.cli.models import read_table
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.protocol import StockRequest
from deployments.engines.sounds import Sound
from deployments.engines.stock.engine import StockEngine
from deployments.engines.stock.inputs import FIELDS
from deployments.engines.stock.known import OUTPUTS, read_class
from deployments.engines.stock.loading import StockModel
from deployments.engines.stock.text_parts import text_parts
from deployments.engines.stock.texts import CalledEncoders, TextPlanner, weightless_modules
from deployments.modules.stock_parts import is_stock_text, with_stock_parts
from infra.supported.page import table
from infra.supported.pipelines import COMPARED, Row, rows
from weights.externalize import externalize
from weights.store import WeightStore

pytestmark = pytest.mark.long
DEMO = Path(__file__).parents[2] / "infra" / "demo" / "models"
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


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def as_pil(pixels: Any) -> Any:
    return [as_pil(one) for one in pixels] if isinstance(pixels, tuple) else PIL.Image.fromarray(pixels)


@functools.cache
def rows_by_name() -> dict[str, Row]:
    return {row.class_name: row for row in rows()}


def made(output: Any, makes: Any) -> np.ndarray:
    """Return what diffusers returned, as the engine rounds it: the images, the frames or the samples."""
    found = next(output[name] for name in OUTPUTS[makes] if name in output)
    if makes == "audio":
        return np.asarray(found[0])
    pixels = np.asarray(found[0] if makes == "video" else found)[..., :3]  # how far it can be seen through is not kept
    return pixels if pixels.dtype == np.uint8 else (pixels * 255).round().astype(np.uint8)


def test_the_table_is_the_one_that_is_printed() -> None:
    assert list(table()) == read_table()


def test_all_that_the_table_calls_compared_is() -> None:
    assert sorted({*BUILDERS, *DERIVED, *CASES} - FAMILIES.keys()) == list(COMPARED)


@pytest.mark.parametrize("class_name", COMPARED)
def test_a_class_makes_what_diffusers_makes(class_name: str, tmp_path: Path) -> None:
    row = rows_by_name()[class_name]
    assert row.how.startswith("in turns")
    build, options, image_names = case_of(class_name)
    pipeline = saved(build, tmp_path)
    MENDED.get(class_name, id)(pipeline)
    rng = np.random.default_rng(0)
    side = options.get("height", 32)
    images = dict(pictures(rng, name, side, options.get("width", side)) for name in image_names)
    fields = {"num_inference_steps": 3 if "strength" in options else 2}
    fields |= {name: value for name, value in options.items() if name in FIELDS}
    request = StockRequest(
        "r",
        5,
        "a cat",
        fields={name: value for name, value in fields.items() if name in read_class(class_name).parameters},
        images=images,
        extra={name: value for name, value in options.items() if name not in FIELDS},
        audio={name: sound(rng, pipeline) for name in (CASES[class_name].audio if class_name in CASES else ())},
    )
    output, turns = run(StockEngine(load(tmp_path)), request)
    given = {name: as_pil(pixels) for name, pixels in images.items()}
    given |= {name: torch.from_numpy(one.samples)[None] for name, one in request.audio.items()}
    takes = inspect.signature(pipeline.__call__).parameters
    usual = {"prompt": "a cat", "output_type": "np", "generator": torch.Generator("cpu").manual_seed(5)}
    usual = {name: value for name, value in {**usual, **fields}.items() if name in takes}
    torch.manual_seed(5)  # for what a pipeline draws without the generator
    expected = made(pipeline(**{**usual, **options, **given}), row.makes)
    found = output.samples if row.makes == "audio" else output.images
    rounding = 1e-6 if row.makes == "audio" else 0  # weights that are stored as a direction and a norm
    np.testing.assert_allclose(np.squeeze(found), np.squeeze(expected.astype(found.dtype)), rtol=0, atol=rounding)
    assert turns > 1
    if text_parts(class_name):
        again = run_apart(tmp_path, request)
        np.testing.assert_array_equal(again.samples if row.makes == "audio" else again.images, found)


def run_apart(folder: Path, request: StockRequest) -> Any:
    """Run a request whose texts are encoded where nothing else has weights; returns its last output."""
    store, model = WeightStore(folder / "store"), load(folder)
    manifest = with_stock_parts(externalize(store, "m", folder, dtype="float32"))
    class_name, skeleton, parts = manifest.class_name or "", store.skeleton(manifest), manifest.components
    texts = {name: model.modules[name] for name, part in parts.items() if is_stock_text(part)}
    assert texts.keys() <= text_parts(class_name)
    blank = weightless_modules({name: parts[name] for name in model.modules}, skeleton, torch.device("cpu"))
    planner = TextPlanner(StockModel(class_name, skeleton, blank))
    encoders = CalledEncoders(class_name, skeleton, texts, parts, torch.device("cpu"))
    found: dict[str, Any] = {}
    while (call := planner.next_text(request, found)) is not None:
        found[call.key] = encoders.encode(call.arguments)
    assert found
    others = {name: module for name, module in model.modules.items() if name not in texts}
    blank = {name: planner.model.modules[name] for name in texts}
    return run(StockEngine(planner.model.over(others, blank)), replace(request, texts=found))[0]


def test_every_class_is_served_or_says_why_not() -> None:
    found = list(rows())
    assert all(
        row.how in ("batched", "in turns", "in turns, encodes itself") or row.how.startswith("refused: ")
        for row in found
    )
    assert sum(not row.how.startswith("refused") for row in found) > 250
