"""Nodes that sample become image requests: over tiny models they give what a plain loop gives, or are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from kit.workflows import FakeBackend, Told, workflow_of

from configs.cluster import ClusterConfig
from deployments.engines.diffusion.state import Control
from deployments.local import LocalModels
from deployments.records import ImageRequest
from deployments.workflows.backend import Folder, ModelFacts, Report
from deployments.workflows.checking import check
from deployments.workflows.records import Refused
from deployments.workflows.resizing import resized_masks
from deployments.workflows.running import run as run_workflow
from deployments.workflows.schedules import added_levels, flow_levels, schedule
from deployments.workflows.table import KINDS
from deployments.workflows.values import (
    PENDING,
    ClipValue,
    ControlNetValue,
    ControlUse,
    Latent,
    Later,
    LoraUse,
    ModelValue,
    Prompt,
    Sampler,
    Shift,
    VaeValue,
)

CLASSES = {
    "sdxl": ModelFacts("StableDiffusionXLPipeline"),
    "sd": ModelFacts("StableDiffusionPipeline"),
    "flux": ModelFacts("FluxPipeline", {"guidance_embeds": True}),
    "qwen": ModelFacts("QwenImagePipeline"),
    "pixart": ModelFacts("PixArtAlphaPipeline"),
    "kontext": ModelFacts("FluxKontextPipeline"),
    "hidream": ModelFacts("HiDreamImagePipeline"),
    "z": ModelFacts("ZImagePipeline"),
    "krea": ModelFacts("Krea2Pipeline"),
    "ernie": ModelFacts("ErnieImagePipeline"),
    "lumina": ModelFacts("Lumina2Pipeline"),
    "qwen_21": ModelFacts("QwenImage21Pipeline"),
    "refiner": ModelFacts("StableDiffusionXLImg2ImgPipeline"),
    "fill": ModelFacts("FluxFillPipeline"),
    "control": ModelFacts("FluxControlPipeline"),
    "longcat": ModelFacts("LongCatImagePipeline"),
}
SIZE = Latent(batch=2, width=64, height=96)


class Asked:
    """A catalog and a backend that keeps the requests, and answers with zeros."""

    def __init__(self) -> None:
        self.requests: list[ImageRequest] = []

    def facts(self, model: str) -> ModelFacts:
        return CLASSES[model]

    async def image(self, request: ImageRequest, report: Any) -> np.ndarray:
        self.requests.append(request)
        count = request.n * (1 + (request.output == "latent_and_clean"))
        return np.arange(count, dtype=np.float32)[:, None, None, None] * np.ones((1, 4, 12, 8), np.float32)


def parts(model: str = "sdxl", **prompt: Any) -> dict[str, Any]:
    clip = ClipValue((model,))
    return {
        "model": ModelValue((model,)),
        "positive": (Prompt(clip, "a cat", **prompt),),
        "negative": (Prompt(clip, "a dog", **prompt),),
        "latent_image": SIZE,
    }


def ksampler(**changes: Any) -> dict[str, Any]:
    plain = {"seed": 3, "steps": 4, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    return parts(changes.pop("of", "sdxl")) | plain | changes


def advanced(**changes: Any) -> dict[str, Any]:
    given = ksampler(**changes)
    given["noise_seed"] = given.pop("seed")
    del given["denoise"]
    steps = {"start_at_step": 0, "end_at_step": 10_000}
    return {"add_noise": "enable", "return_with_leftover_noise": "disable", **steps} | given


async def run(name: str, **inputs: Any) -> tuple[Any, list[ImageRequest]]:
    backend = Asked()
    kind = KINDS[name]
    assert {one.name for one in kind.inputs} == set(inputs)
    found = kind.function(backend, **inputs) if kind.reads_catalog else kind.function(**inputs)
    if isinstance(found, Later):
        assert len(found.outputs) == len(kind.outputs)
        found = await found.act(backend, lambda *_: None)  # type: ignore[arg-type]
    return found, backend.requests


async def asked(name: str, **inputs: Any) -> ImageRequest:
    _, [request] = await run(name, **inputs)
    return request


LEVELS = added_levels({})


async def test_a_ksampler_is_one_request():
    (latent,), [request] = await run("KSampler", **ksampler(seed=2**64 - 1))
    assert request.sampler.sigmas == schedule("normal", LEVELS, 4)
    assert (request.sampler.name, request.sampler.cfg, request.sampler.noise_seed) == ("euler", 2.0, 2**64 - 1)
    assert (request.width, request.height, request.n, request.output) == (64, 96, 2, "latent")
    assert (request.prompt, request.negative_prompt, request.model) == ("a cat", "a dog", "sdxl")
    assert request.prompt_syntax == "comfyui"
    assert (latent.batch, latent.width, latent.height) == (2, 64, 96)


async def test_a_second_encoder_may_read_a_text_of_its_own():
    for of, name in (("sdxl", "clip_g"), ("flux", "t5xxl")):
        positive = (Prompt(ClipValue((of,)), "a cat", ((name, "a fat cat"),)),)
        request = await asked("KSampler", **ksampler(of=of, cfg=1.0, positive=positive))
        assert (request.prompt, request.prompt_2) == ("a cat", "a fat cat")
        same = await asked("KSampler", **ksampler(of=of, cfg=1.0, positive=(replace(positive[0], texts=()),)))
        assert same.prompt_2 is None


async def test_a_refiner_is_sampled_as_its_family():
    request = await asked("KSampler", **ksampler(of="refiner"))
    plain = await asked("KSampler", **ksampler())
    assert (request.model, request.sampler) == ("refiner", plain.sampler)


async def test_a_negative_prompt_may_be_zeroed_and_guidance_normed():
    negative = (replace(parts()["negative"][0], zeroed=True),)
    normed = ModelValue(("sdxl",), extra=(("CFGNorm", (0.9,)),))
    request = await asked("KSampler", **ksampler(negative=negative, model=normed))
    assert (request.sampler.zeroes_negative, request.sampler.cfg_norm) == (True, 0.9)
    alone = await asked("KSampler", **ksampler(cfg=1.0, negative=negative, model=replace(normed, extra=())))
    assert (alone.sampler.zeroes_negative, alone.sampler.cfg_norm, alone.negative_prompt) == (False, None, None)
    without = replace(normed, extra=(("CFGNorm", (1.0,)),))
    assert (await asked("KSampler", **ksampler(cfg=1.0, model=without))).sampler.cfg_norm is None
    with pytest.raises(Refused, match="CFGNorm"):
        await asked("KSampler", **ksampler(model=replace(normed, extra=normed.extra * 2)))


@pytest.mark.parametrize("sampler_name", ["dpm_2", "dpm_2_ancestral", "uni_pc"])
async def test_some_samplers_schedule_a_step_more(sampler_name):
    request = await asked("KSampler", **ksampler(sampler_name=sampler_name))
    whole = schedule("normal", LEVELS, 5)
    assert request.sampler.sigmas == (*whole[:4], 0.0)
    half = await asked("KSampler", **ksampler(sampler_name=sampler_name, denoise=0.5))
    more = schedule("normal", LEVELS, 9)
    assert half.sampler.sigmas == (*more[:-2], 0.0)[-5:]


async def test_a_part_of_the_noise_is_the_end_of_a_longer_schedule():
    request = await asked("KSampler", **ksampler(denoise=0.3))
    assert request.sampler.sigmas == schedule("normal", LEVELS, 13)[-5:]
    unchanged, requests = await run("KSampler", **ksampler(denoise=0.0))
    assert unchanged == (SIZE,)
    assert requests == []


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"end_at_step": 2, "return_with_leftover_noise": "enable"}, slice(0, 3)),
        ({"start_at_step": 2}, slice(2, 5)),
        ({"start_at_step": 1, "end_at_step": 3, "return_with_leftover_noise": "enable"}, slice(1, 4)),
    ],
)
async def test_an_advanced_one_takes_some_of_the_steps(changes, places):
    request = await asked("KSamplerAdvanced", **advanced(**changes))
    assert request.sampler.sigmas == schedule("normal", LEVELS, 4)[places]


async def test_an_advanced_one_ends_without_noise_unless_it_is_left_over():
    request = await asked("KSamplerAdvanced", **advanced(end_at_step=2, add_noise="disable"))
    assert request.sampler.sigmas == (*schedule("normal", LEVELS, 4)[:2], 0.0)
    assert not request.sampler.adds_noise
    unchanged, requests = await run("KSamplerAdvanced", **advanced(start_at_step=4))
    assert (unchanged, requests) == ((SIZE,), [])


async def test_custom_samplers_tell_what_was_clean():
    sampler, sigmas = Sampler("euler_ancestral", (("eta", 0.5), ("s_noise", 0.9))), (3.0, 2.0, 1.0)
    given = parts() | {"sampler": sampler, "sigmas": sigmas, "cfg": 1.0, "add_noise": True, "noise_seed": 5}
    (latent, clean), [request] = await run("SamplerCustom", **given)
    assert (request.output, request.sampler.eta, request.sampler.s_noise) == ("latent_and_clean", 0.5, 0.9)
    assert request.negative_prompt is None
    assert [one.samples[:, 0, 0, 0].tolist() for one in (latent, clean)] == [[0, 1], [2, 3]]
    (latent, clean), [request] = await run("SamplerCustom", **given | {"sigmas": (3.0, 0.0)})
    assert request.output == "latent"
    assert latent.samples is clean.samples


async def test_a_guider_and_noise_of_nodes():
    flux = parts("flux")
    (guider,), _ = await run("BasicGuider", model=flux["model"], conditioning=flux["positive"])
    (noise,), _ = await run("RandomNoise", noise_seed=9)
    (sampler,), _ = await run("KSamplerSelect", sampler_name="euler")
    shifted = ModelValue(("flux",), shift=Shift("ModelSamplingSD3", 5.0))
    (sigmas,), _ = await run("BasicScheduler", model=shifted, scheduler="simple", steps=4, denoise=1.0)
    assert sigmas == pytest.approx((1.0, 5 * 0.75 / 4, 5 * 0.5 / 3, 5 * 0.25 / 2, 0.0))
    high, low = (await run("SplitSigmas", sigmas=sigmas, step=1))[0]
    assert (high, low) == (sigmas[:2], sigmas[1:])
    given = {"guider": guider, "sampler": sampler, "sigmas": low, "latent_image": SIZE}
    request = await asked("SamplerCustomAdvanced", noise=noise, **given)
    assert (request.sampler.noise_seed, request.sampler.adds_noise, request.guidance_scale) == (9, True, 3.5)
    (none,), _ = await run("DisableNoise")
    assert not (await asked("SamplerCustomAdvanced", noise=none, **given)).sampler.adds_noise


async def test_latents_masks_and_places_are_handed_over():
    samples = np.ones((3, 4, 12, 8), np.float32)
    latent = Latent(samples, 3, 64, 96, noise_mask=np.ones((2, 9, 9), np.float32), batch_index=(4, 1, 0))
    request = await asked("KSampler", **ksampler(latent_image=latent))
    assert request.latents is samples
    assert request.noise_mask.shape == (3, 9, 9)
    assert (request.n, request.sampler.picks) == (3, (4, 1, 0))
    quiet = await asked("KSamplerAdvanced", **advanced(latent_image=latent, add_noise="disable"))
    assert quiet.sampler.picks is None


async def test_adapters_have_a_scale_for_the_model_and_one_for_texts():
    given = ksampler()
    clip = ClipValue(("other", "sdxl"), (LoraUse("a", 0.5), LoraUse("c", 0.25)))
    given["model"] = ModelValue(("sdxl", "sd"), (LoraUse("a", 1.0), LoraUse("b", 0.5), LoraUse("a", 0.25)))
    for side in ("positive", "negative"):
        given[side] = (replace(given[side][0], clip=clip),)
    request = await asked("KSampler", **given)
    assert [(one.name, one.scale, one.text_scale) for one in request.lora] == [
        *(("a", 1.25, 0.5), ("b", 0.5, 0.0), ("c", 0.0, 0.25))
    ]


@pytest.mark.parametrize(("of", "scheduler"), [("sdxl", "karras"), ("flux", "simple")])
async def test_a_controlnet_acts_between_two_times(of, scheduler):
    """By the engine's rule, in those steps whose sigmas lie between the two levels, and in no other."""
    rng, image = seeded_rng(), np.zeros((1, 96, 64, 3), np.float32)
    shift = None if of == "sdxl" else np.exp(1.15)
    for _ in range(20):
        steps, (start, end) = int(rng.integers(2, 30)), sorted(rng.uniform(0, 1, 2))
        use = ControlUse(ControlNetValue("edges"), image, 0.5, float(start), float(end))
        request = await asked(
            "KSampler", **ksampler(of=of, steps=steps, scheduler=scheduler) | pair_of(of, controls=(use,))
        )
        if of == "sdxl":
            high, low = (
                float(np.exp(np.interp(999 * (1 - p), range(1000), np.log(LEVELS.table)))) for p in (start, end)
            )
        else:
            high, low = (float(shift / (shift + 1 / (1 - p) - 1)) for p in (start, end))
        sigmas = request.sampler.sigmas[:-1]
        expected = [low <= sigma <= high for sigma in sigmas]
        nets = [Control(one.name, None, (), one.scale, one.start, one.end, False) for one in request.control]
        assert [any(net.acts_at(step, steps) for net in nets) for step in range(steps)] == expected
    with pytest.raises(Refused, match="heun"):
        await asked("KSampler", **ksampler(of=of, sampler_name="heun") | pair_of(of, controls=(use,)))


async def test_what_follows_a_sampler_can_be_planned():
    found = KINDS["KSampler"].function(Asked(), **ksampler(latent_image=Latent(samples=PENDING, noise_mask=PENDING)))
    assert [one.samples for one in found.outputs] == [PENDING]


def pair_of(model: str = "sdxl", **prompt: Any) -> dict[str, Any]:
    return {side: parts(model, **prompt)[side] for side in ("positive", "negative")}


@pytest.mark.parametrize(
    ("changes", "input", "shown"),
    [
        ({"of": "pixart"}, "model", "PixArtAlphaPipeline"),
        ({"model": ModelValue(("sd",))}, "model", "both the model and the text encoder"),
        ({"model": ModelValue(("sdxl",), extra=(("PatchModelAddDownscale", ()),))}, "model", "PatchModelAddDownscale"),
        ({"model": ModelValue(("sdxl",), shift=Shift("ModelSamplingSD3", 3.0))}, "model", "flow models"),
        ({"positive": parts()["positive"] * 2}, "positive", "2 conditionings"),
        ({"negative": ()}, "negative", "0 conditionings"),
        ({"steps": 1001}, "steps", "1001 steps"),
        ({"steps": 1, "sampler_name": "uni_pc_bh2"}, "sampler_name", "two steps"),
        ({"denoise": 0.001, "steps": 900}, "steps", "steps are scheduled"),
        ({"latent_image": Latent(width=64, height=64, batch_index=(90,))}, None, ""),
        (
            {"latent_image": Latent(width=64, height=64, noise_mask=PENDING), "sampler_name": "ddim"},
            "sampler_name",
            "ddim",
        ),
        (pair_of(zeroed=True), "positive", "a negative prompt"),
        (pair_of(start=0.5), "positive", "all steps"),
        (pair_of(extra=(("sdxl_sizes", (64, 96, 8, 0, 64, 96)),)), "positive", "sdxl_sizes"),
        ({"of": "qwen", **pair_of("qwen", texts=(("clip_g", "another"),))}, "positive", "one text"),
        ({"negative": (replace(parts()["negative"][0], texts=(("clip_g", "another"),)),)}, "negative", "one text"),
        ({"of": "flux", "positive": (Prompt(ClipValue(("flux",)), "a (cat:1.2)"),)}, "positive", "weights"),
        ({"positive": (Prompt(ClipValue(("sdxl",)), "embedding:cat"),)}, "positive", "embeddings"),
    ],
)
def test_what_no_request_can_say_is_refused_before_anything_runs(changes, input, shown):
    with pytest.raises(Refused, match=shown) as caught:
        KINDS["KSampler"].function(Asked(), **ksampler(**changes))
    assert input is None or caught.value.input == input


class Drawing(Asked):
    """A backend whose diffusers makes images."""

    async def image(self, request: ImageRequest, report: Any) -> np.ndarray:
        self.requests.append(request)
        return np.full((request.n, request.height or 0, request.width or 0, 3), 0.5, np.float32)


def drawn_by_stock(**changes: Any) -> dict[str, Any]:
    shifted = ModelValue(("hidream",), shift=Shift("ModelSamplingSD3", 3.0))
    latent = Latent(batch=2, width=1360, height=768)
    return ksampler(**({"of": "hidream", "model": shifted, "latent_image": latent, "cfg": 5.0} | changes))


async def test_a_model_of_diffusers_own_code_is_sampled_from_noise_to_images():
    backend = Drawing()
    later = KINDS["KSampler"].function(backend, **drawn_by_stock(sampler_name="uni_pc"))
    (waiting,) = later.outputs
    (latent,) = await later.act(backend, lambda *_: None)
    (request,) = backend.requests
    assert (request.guidance_scale, request.negative_prompt, request.output) == (5.0, "a dog", "image")
    assert (request.width, request.height, request.n, request.seed) == (1360, 768, 2, 3)
    assert (request.sampler.cfg, request.sampler.num_steps, request.sampler.sigmas[0]) == (1.0, 4, 1.0)
    decode = KINDS["VAEDecode"].function
    assert decode(waiting, VaeValue(("hidream", "x"))) == (PENDING,)
    (images,) = decode(latent, VaeValue(("hidream",)))
    assert images.shape == (2, 768, 1360, 3)
    with pytest.raises(Refused, match="its own VAE"):
        decode(latent, VaeValue(("flux",)))


@pytest.mark.parametrize(
    ("changes", "input", "shown"),
    [
        ({"model": ModelValue(("hidream",))}, "model", "said by a node"),
        ({"latent_image": Latent(width=512, height=512)}, "latent_image", "makes 1024x1024"),
        ({"latent_image": Latent(width=1024, height=1024, noise_mask=PENDING)}, "latent_image", "whole images"),
        ({"denoise": 0.5}, "sampler", "noise"),
        ({"cfg": 0.5}, "cfg", "by 1 or more"),
        (
            {"of": "kontext", "model": ModelValue(("kontext",)), "sampler_name": "lcm"}
            | {"latent_image": Latent(width=1024, height=1024)},
            "sampler_name",
            "draws noise",
        ),
        (pair_of("hidream", guidance=3.0), "positive", "no guidance"),
        (pair_of("hidream", references=(Latent(),)), "positive", "reads 0"),
        (pair_of("hidream", zeroed=True), "positive", "negative prompt"),
    ],
)
def test_what_diffusers_own_code_does_not_do_is_refused_before_anything_runs(changes, input, shown):
    with pytest.raises(Refused, match=shown) as caught:
        KINDS["KSampler"].function(Drawing(), **drawn_by_stock(**changes))
    assert caught.value.input == input


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("krea", {"guidance_scale": 4.0, "prompt": "s <Prompt Start> a cat", "extra": {}}),
        ("ernie", {"guidance_scale": 5.0, "extra": {"use_pe": False}}),
        (
            "lumina",
            {
                **{"guidance_scale": 5.0, "prompt": "a cat", "negative_prompt": "a dog", "max_sequence_length": 512},
                "extra": {"cfg_normalization": False, "system_prompt": "s"},
            },
        ),
        ("qwen_21", {"true_cfg_scale": 5.0, "extra": {}}),
    ],
)
async def test_classes_are_asked_for_plain_guidance_in_their_own_words(of: str, expected: dict[str, Any]) -> None:
    backend, clip = Drawing(), ClipValue((of,))
    said = {"positive": (Prompt(clip, "s <Prompt Start> a cat"),), "negative": (Prompt(clip, "a dog"),)}
    given = ksampler(of=of, latent_image=Latent(width=1024, height=992), cfg=5.0) | said
    later = KINDS["KSampler"].function(backend, **given)
    await later.act(backend, lambda *_: None)
    (request,) = backend.requests
    assert {name: getattr(request, name) for name in expected} == expected


def test_a_text_without_a_system_prompt_is_refused_where_the_class_puts_one_before_it():
    given = ksampler(of="lumina", latent_image=Latent(width=1024, height=1024))
    with pytest.raises(Refused, match="no '<Prompt Start>'"):
        KINDS["KSampler"].function(Drawing(), **given)


def prompts_of_qwen_21(**changes: Any) -> tuple[Any, ...]:
    plain = {"clip": ClipValue(("qwen_21",)), "prompt": "a hat", "negative_prompt": "", "images": {}, "resolution": 0}
    return KINDS["TextEncodeQwenImage21"].function(**plain | changes)


@pytest.mark.parametrize("resolution", [0, 256, 1024])
async def test_images_beside_a_prompt_of_qwen_image_2_1_keep_the_size_that_its_node_gives_them(resolution: int) -> None:
    from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions

    pixels = seeded_rng().integers(0, 256, (1, 200, 330, 3)).astype(np.float32) / 255
    images, vae = {"image_1": pixels, "image_2": pixels[:, ::-1]}, VaeValue(("qwen_21",))
    positive, negative, latent = prompts_of_qwen_21(images=images, vae=vae, resolution=resolution)
    size = calculate_dimensions(resolution**2, 330 / 200)[:2] if resolution else (320, 192)
    assert (latent.width, latent.height) == size
    said = {"model": ModelValue(("qwen_21",)), "positive": positive, "negative": negative, "latent_image": latent}
    backend = Drawing()
    await KINDS["KSampler"].function(backend, **ksampler(cfg=3.0) | said).act(backend, lambda *_: None)
    (request,) = backend.requests
    assert [one.shape[1::-1] for one in request.references] == [size, size]
    side = request.extra["output_resolution"]
    assert calculate_dimensions(side**2, size[0] / size[1])[:2] == size
    assert (request.width, request.height, request.true_cfg_scale) == (*size, 3.0)


@pytest.mark.parametrize(
    ("images", "has_vae", "shown"),
    [
        ({"image_1": np.zeros((1, 64, 64, 3), np.float32)}, False, "link it"),
        ({"image_1": np.zeros((1, 64, 64, 4), np.float32)}, True, "transparency"),
        ({f"image_{at}": np.zeros((1, 64 * at, 64, 3), np.float32) for at in (1, 2)}, True, "64x64, 64x128"),
    ],
)
def test_images_that_qwen_image_2_1_would_read_otherwise_are_refused(images, has_vae, shown):
    vae = {"vae": VaeValue(("qwen_21",))} if has_vae else {}
    positive, negative, _ = prompts_of_qwen_21(images=images, **vae)
    said = {"model": ModelValue(("qwen_21",)), "positive": positive, "negative": negative}
    with pytest.raises(Refused, match=shown):
        KINDS["KSampler"].function(Drawing(), **ksampler(latent_image=Latent(width=64, height=64)) | said)


def test_a_cache_of_qwen_image_2_1_that_rounds_is_refused():
    model = ModelValue(("qwen_21",))
    assert KINDS["QwenImage21Cache"].function(model, device="cpu", dtype="default") == (model,)
    with pytest.raises(Refused, match="a cache in int8"):
        KINDS["QwenImage21Cache"].function(model, device="cpu", dtype="int8")


async def test_a_patch_of_z_image_is_a_control_of_all_forwards() -> None:
    image, net = np.full((1, 96, 64, 3), 0.5, np.float32), ControlNetValue("union")
    patch = {"model": ModelValue(("z",)), "vae": VaeValue(("z",)), "model_patch": net, "image": image, "strength": 0.7}
    (model,) = KINDS["QwenImageDiffsynthControlnet"].function(**patch)
    backend = Asked()
    later = KINDS["KSampler"].function(backend, **ksampler(of="z", model=model, cfg=1.0))
    await later.act(backend, lambda *_: None)
    (use,) = backend.requests[0].control
    assert (use.name, use.scale, use.start, use.end) == ("union", 0.7, 0.0, 1.0)
    np.testing.assert_array_equal(use.image, np.full((96, 64, 3), 128))
    for changes, shown in [({"mask": image[..., 0]}, "mask"), ({"vae": VaeValue(("flux",))}, "the VAE of its model")]:
        with pytest.raises(Refused, match=shown):
            KINDS["QwenImageDiffsynthControlnet"].function(**patch | changes)
    (flux,) = KINDS["QwenImageDiffsynthControlnet"].function(
        **patch | {"model": ModelValue(("flux",)), "vae": VaeValue(("flux",))}
    )
    with pytest.raises(Refused, match="patches of a FluxPipeline"):
        KINDS["KSampler"].function(backend, **ksampler(of="flux", model=flux))


async def test_what_is_saved_is_handed_on() -> None:
    workflow = workflow_of(
        empty=("EmptyImage", {"width": 16, "height": 16, "batch_size": 1, "color": 255}),
        save=("SaveImage", {"images": ("empty", 0), "filename_prefix": "a"}),
        show=("PreviewImage", {"images": ("save", 0)}),
    )
    backend = FakeBackend()
    assert check(workflow, backend).errors == ()
    shown = await run_workflow(workflow, backend, Told())
    assert sorted(shown) == ["save", "show"]


async def test_kontext_reads_an_encoded_image_of_its_sizes():
    pixels = seeded_rng().integers(0, 256, (1, 752, 1392, 3)).astype(np.float32) / 255
    encoded = Latent(np.zeros((1, 16, 94, 174), np.float32), 1, 1392, 752, pixels=pixels)
    given = ksampler(of="kontext", latent_image=encoded, cfg=1.0)
    given["positive"] = (Prompt(ClipValue(("kontext",)), "a hat", guidance=2.5, references=(encoded,)),)
    backend = Drawing()
    later = KINDS["KSampler"].function(backend, **given)
    await later.act(backend, lambda *_: None)
    (request,) = backend.requests
    assert (request.guidance_scale, request.true_cfg_scale, request.max_sequence_length) == (2.5, 1.0, 256)
    assert (request.width, request.height) == (1392, 752)
    np.testing.assert_array_equal(request.references[0], np.rint(pixels[0] * 255))
    for reference, shown in [(replace(encoded, pixels=None), "no encoded image"), (encoded, "FluxKontextImageScale")]:
        small = replace(reference, pixels=None if reference.pixels is None else pixels[:, :512, :512])
        given["positive"] = (replace(given["positive"][0], references=(small,)),)
        with pytest.raises(Refused, match=shown):
            KINDS["KSampler"].function(backend, **given)


async def test_latents_of_diffusers_own_code_go_to_a_decoder_alone():
    workflow = workflow_of(
        model=("UNETLoader", {"unet_name": "unet.safetensors", "weight_dtype": "default"}),
        shifted=("ModelSamplingAuraFlow", {"model": ("model", 0), "shift": 3.0}),
        clip=("CLIPLoader", {"clip_name": "clip_l.safetensors", "type": "ovis"}),
        text=("CLIPTextEncode", {"clip": ("clip", 0), "text": "a cat"}),
        empty=("EmptySD3LatentImage", {"width": 64, "height": 64, "batch_size": 1}),
        sample=(
            "KSampler",
            {
                **{"model": ("shifted", 0), "positive": ("text", 0), "negative": ("text", 0)},
                **{"latent_image": ("empty", 0), "seed": 1, "steps": 2, "cfg": 1.0, "denoise": 1.0},
                **{"sampler_name": "euler", "scheduler": "simple"},
            },
        ),
        repeat=("RepeatLatentBatch", {"samples": ("sample", 0), "amount": 2}),
        vae=("VAELoader", {"vae_name": "ae.safetensors"}),
        decode=("VAEDecode", {"samples": ("repeat", 0), "vae": ("vae", 0)}),
        save=("PreviewImage", {"images": ("decode", 0)}),
    )
    (error,) = check(workflow, FakeBackend(class_name="OvisImagePipeline")).errors
    assert (error.node, "can only be decoded" in error.message) == ("repeat", True)


MODELS = Path(__file__).parents[4] / "infra" / "demo" / "models"
DIGITS = "digits-sdxl"


class Local(FakeBackend):
    """A backend over the demo's model in this process."""

    def __init__(self, store: Path) -> None:
        super().__init__(class_name="StableDiffusionXLPipeline")
        models = [{"id": DIGITS, "path": str(MODELS / DIGITS), "dtype": "float32"}]
        self.models = LocalModels(ClusterConfig.model_validate({"store": {"path": str(store)}, "models": models}))

    def models_of(self, folder: Folder, name: str) -> tuple[str, ...]:
        return (DIGITS,) if (folder, name) == ("checkpoints", "base.safetensors") else ()

    def facts(self, model: str) -> ModelFacts:
        return ModelFacts(self.class_name, {"pixels_per_latent": 4})

    async def image(self, request: ImageRequest, report: Report) -> np.ndarray:
        result = await self.models._generate(request, report)
        assert result.array is not None
        return result.array

    async def encode(self, model: str, images: np.ndarray) -> np.ndarray:
        return await self.image(ImageRequest(model=model, prompt=" ", pixels=images, output="encoded"), lambda *_: None)

    async def decode(self, model: str, latents: np.ndarray) -> np.ndarray:
        request = ImageRequest(model=model, prompt=" ", latents=latents, output="decoded")
        return await self.image(request, lambda *_: None)


def stock_latents(sigmas: tuple[float, ...], noise: torch.Tensor, vae_latents: Any = None) -> tuple[Any, np.ndarray]:
    """Return diffusers' pipeline, and the latents that its Euler makes over these levels."""
    import diffusers

    stock = diffusers.StableDiffusionXLPipeline.from_pretrained(MODELS / DIGITS, torch_dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    stock.scheduler = solver = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="trailing"
    )
    solver.set_timesteps(sigmas=list(sigmas))
    begun = noise * sigmas[0]
    if vae_latents is not None:
        begun = begun + torch.from_numpy(vae_latents) * stock.vae.config.scaling_factor
    elif sigmas[0] > 14.6:
        begun = noise * (sigmas[0] ** 2 + 1) ** 0.5
    # The nearest times, where diffusers reads those between two.
    levels = torch.from_numpy(LEVELS.table).log()
    times = [float((levels - float(np.log(one))).abs().argmin()) for one in sigmas[:-1]]
    texts = stock.encode_prompt("a handwritten five", negative_prompt="a handwritten six", num_images_per_prompt=2)
    x = begun
    for number, time in enumerate(times):
        level, following = sigmas[number], sigmas[number + 1]
        outputs = []
        for prompt, pooled in ((texts[1], texts[3]), (texts[0], texts[2])):
            added = {"text_embeds": pooled, "time_ids": torch.tensor([[32.0, 32, 0, 0, 32, 32]] * 2)}
            read = x / (level**2 + 1) ** 0.5
            with torch.no_grad():
                outputs.append(
                    stock.unet(read, time, encoder_hidden_states=prompt, added_cond_kwargs=added, return_dict=False)[0]
                )
        x = x + (outputs[0] + 3.0 * (outputs[1] - outputs[0])) * (following - level)
    return stock, (x / stock.vae.config.scaling_factor).numpy()


def first_pass(**changes: Any) -> dict[str, Any]:
    own = {"seed": 3, "steps": 4, "cfg": 3.0, "sampler_name": "euler", "scheduler": "sgm_uniform", "denoise": 1.0}
    links = {name: (name, 0) for name in ("positive", "negative")}
    return {**own, **links, "model": ("load", 0), "latent_image": ("empty", 0), **changes}


@pytest.mark.slow  # imports diffusers
async def test_a_workflow_of_two_passes_makes_the_image_of_diffusers(tmp_path):
    """Text to image, and a second pass over the first one's latents: both as a plain loop over stock's modules."""
    workflow = workflow_of(
        load=("CheckpointLoaderSimple", {"ckpt_name": "base.safetensors"}),
        positive=("CLIPTextEncode", {"text": "a handwritten five", "clip": ("load", 1)}),
        negative=("CLIPTextEncode", {"text": "a handwritten six", "clip": ("load", 1)}),
        empty=("EmptyLatentImage", {"width": 32, "height": 32, "batch_size": 2}),
        first=("KSampler", first_pass()),
        second=("KSampler", first_pass(latent_image=("first", 0), seed=8, denoise=0.5)),
        decode=("VAEDecode", {"samples": ("first", 0), "vae": ("load", 2)}),
        again=("VAEDecode", {"samples": ("second", 0), "vae": ("load", 2)}),
        one=("SaveImage", {"images": ("decode", 0), "filename_prefix": "one"}),
        two=("SaveImage", {"images": ("again", 0), "filename_prefix": "two"}),
    )
    backend, told = Local(tmp_path), Told()
    assert check(workflow, backend).errors == ()
    shown = await run_workflow(workflow, backend, told)
    assert [len(shown[name]["images"]) for name in ("one", "two")] == [2, 2]
    noises = [torch.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(seed)) for seed in (3, 8)]
    stock, latents = stock_latents(schedule("sgm_uniform", LEVELS, 4), noises[0])
    _, second = stock_latents(schedule("sgm_uniform", LEVELS, 8)[-5:], noises[1], latents)
    for found, expected in zip((backend.saved[:2], backend.saved[2:]), (latents, second), strict=True):
        with torch.no_grad():
            pixels = (stock.vae.decode(torch.from_numpy(expected)).sample / 2 + 0.5).clamp(0, 1)
        pixels = np.floor(pixels.permute(0, 2, 3, 1).numpy() * 255)
        assert np.abs(np.stack([one[2] for one in found]).astype(int) - pixels).max() <= 1


async def beside_of(kind: str, backend: FakeBackend, **inputs: Any) -> tuple[Any, ...]:
    """Return the outputs of a node that puts an image beside prompts, over the backend's VAE."""
    prompts = {side: parts("fill")[side] for side in ("positive", "negative")}
    later = KINDS[kind].function(backend, vae=VaeValue(("fill",)), **prompts, **inputs)
    return await later.act(backend, lambda *_: None)  # type: ignore[no-any-return]


async def test_a_model_that_fills_in_reads_the_masked_image_and_a_soft_mask():
    rng = seeded_rng()
    pixels, mask = rng.random((1, 64, 80, 3), np.float32), rng.random((1, 32, 40), np.float32)
    made = await beside_of("InpaintModelConditioning", FakeBackend(), pixels=pixels, mask=mask, noise_mask=True)
    wide = resized_masks(mask, 80, 64, "bilinear")
    gray = ((pixels - 0.5) * (1 - np.rint(wide))[..., None] + 0.5).astype(np.float32)
    model = ModelValue(("fill",), extra=(("DifferentialDiffusion", ()),))
    given = ksampler(of="fill", cfg=1.0, model=model, positive=made[0], negative=made[1], latent_image=made[2])
    backend = Drawing()
    await KINDS["KSampler"].function(backend, **given).act(backend, lambda *_: None)
    (request,) = backend.requests
    encode = FakeBackend().encode
    np.testing.assert_array_equal(request.beside_latents, await encode("fill", gray))
    np.testing.assert_array_equal(request.latents, await encode("fill", pixels))
    for found in (request.beside_mask, request.noise_mask):
        np.testing.assert_array_equal(found, wide)
    lowest = flow_levels(math.exp(1.15), 10_000).lowest
    assert (request.sampler.masks_until, request.guidance_scale, request.true_cfg_scale) == (lowest, 3.5, None)
    assert (request.width, request.height, request.output) == (80, 64, "image")
    for changes, shown in [
        ({"cfg": 2.0}, "plainly, by 1"),
        ({"positive": parts("fill")["positive"]}, "InpaintModelConditioning"),
        ({"model": replace(model, extra=(("CFGNorm", (1.0,)),))}, "CFGNorm"),
        ({"model": replace(model, extra=model.extra * 2)}, "DifferentialDiffusion"),
    ]:
        with pytest.raises(Refused, match=shown):
            KINDS["KSampler"].function(backend, **given | changes)
    with pytest.raises(Refused, match=r"a strength of 0\.5"):
        KINDS["DifferentialDiffusion"].function(model=model, strength=0.5)


async def test_a_control_image_is_read_in_further_channels():
    pixels = seeded_rng().random((1, 66, 80, 3), np.float32)
    positive, negative, zeros = await beside_of("InstructPixToPixConditioning", FakeBackend(), pixels=pixels)
    assert not zeros.samples.any()
    moved = {"positive": positive, "negative": negative, "latent_image": zeros}
    backend = Drawing()
    given = ksampler(of="control", cfg=1.0, **moved) | {"model": ModelValue(("control", "fill"))}
    given["positive"] = tuple(replace(one, clip=ClipValue(("control",)), guidance=30.0) for one in positive)
    await KINDS["KSampler"].function(backend, **given).act(backend, lambda *_: None)
    (request,) = backend.requests
    np.testing.assert_array_equal(request.beside_latents, await FakeBackend().encode("", pixels[:, 1:65]))
    assert (request.beside_mask, request.latents, request.guidance_scale) == (None, None, 30.0)
    native = replace(given["positive"][0], clip=ClipValue(("flux",)))
    with pytest.raises(Refused, match="further channels"):
        KINDS["KSampler"].function(backend, **given | {"model": ModelValue(("flux",)), "positive": (native,)})


async def test_a_class_may_leave_flux_guidance_unread_and_have_its_own_normed():
    model = ModelValue(("longcat",), extra=(("CFGNorm", (0.9,)),))
    given = ksampler(of="longcat", model=model, cfg=4.0, latent_image=Latent(width=64, height=64))
    given |= {side: (replace(given[side][0], guidance=4.0, text="a (cat)"),) for side in ("positive", "negative")}
    backend = Drawing()
    await KINDS["KSampler"].function(backend, **given).act(backend, lambda *_: None)
    (request,) = backend.requests
    assert (request.sampler.cfg_norm, request.sampler.cfg, request.guidance_scale) == (0.9, 1.0, 4.0)
    assert (request.prompt, request.extra) == (
        "a (cat)",
        {"enable_cfg_renorm": False, "enable_prompt_rewrite": False},
    )
    with pytest.raises(Refused, match="attenuation alone"):
        KINDS["CFGNorm"].function(model=model, strength=1.0, pre_cfg=True)


@pytest.mark.slow  # imports diffusers
async def test_a_vae_of_a_class_that_diffusers_code_runs_encodes_alone(tmp_path):
    import diffusers

    stock = diffusers.FluxPipeline.from_pretrained(MODELS / "digits-flux")
    stock.save_pretrained(tmp_path / "kontext")
    index = tmp_path / "kontext" / "model_index.json"
    index.write_text(index.read_text().replace("FluxPipeline", "FluxKontextPipeline"))
    models = [{"id": "kontext", "path": str(tmp_path / "kontext"), "dtype": "float32"}]
    store = {"path": str(tmp_path / "store")}
    local = LocalModels(ClusterConfig.model_validate({"store": store, "models": models}))
    pixels = seeded_rng().random((2, 32, 32, 3), np.float32)
    request = ImageRequest(model="kontext", prompt=" ", pixels=pixels, output="encoded")
    found = (await local._generate(request, lambda *_: None)).array
    with torch.no_grad():
        images = torch.from_numpy(pixels).movedim(-1, 1) * 2 - 1
        expected = stock.vae.float().encode(images).latent_dist.mode().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
