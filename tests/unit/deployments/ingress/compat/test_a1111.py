"""/sdapi/v1, asked by webuiapi, a client of the Stable Diffusion WebUI."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import httpx
import numpy as np
import pytest
import webuiapi
from PIL import Image
from starlette.testclient import TestClient
from unit.deployments.ingress.compat.conftest import OpenApp
from unit.deployments.ingress.http_fakes import CONFIG, Replicas, client_over

from cluster.registry.directory import ModelRecord
from deployments.engines.diffusion import solvers
from deployments.engines.records.protocol import EngineError
from deployments.ingress.compat.a1111_bodies import SAMPLERS, SCHEDULERS, TextToImageBody
from deployments.records import ImageProgress, ImageRequest, ImageResult

PATH = "/sdapi/v1"


class Slow(Replicas):
    """Waits before the second step of each image until `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()

    async def on_stream_images(self, request: ImageRequest) -> AsyncIterator[ImageProgress | ImageResult]:
        async for piece in super().on_stream_images(request):
            yield piece
            self.waiting.set()
            await self.gate.wait()


@pytest.fixture
async def webui(open_app: OpenApp) -> AsyncIterator[Iterator[webuiapi.WebUIApi]]:
    async with open_app() as app:
        with TestClient(app, base_url="http://test", raise_server_exceptions=False) as session:
            client = webuiapi.WebUIApi(baseurl=f"http://test{PATH}", sampler="Euler")
            client.session = session
            yield client


@pytest.fixture(scope="module")
def sd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Stable Diffusion's own schedule."""
    folder = tmp_path_factory.mktemp("sd")
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    diffusers.DDIMScheduler(**betas, clip_sample=False, set_alpha_to_one=False).save_pretrained(folder / "scheduler")
    return folder


def png(pixels: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


async def test_images_from_a_prompt(webui: Any, replicas: Replicas) -> None:
    found = await asyncio.to_thread(
        webui.txt2img,
        prompt="a <lora:bold:0.5> seven",
        negative_prompt="blurry",
        seed=5,
        batch_size=2,
        n_iter=1,
        steps=2,
        cfg_scale=3,
        width=24,
        height=16,
    )
    assert [(image.size, image.format) for image in found.images] == [((24, 16), "PNG")] * 2
    assert (found.info["seed"], found.info["all_seeds"], found.info["sd_model_name"]) == (5, [5, 6], "flux")
    assert found.parameters["prompt"] == "a <lora:bold:0.5> seven"
    first, second = replicas.requests
    assert (first.seed, second.seed, first.n) == (5, 6, 1)
    assert (first.prompt, first.negative_prompt) == ("a  seven", "blurry")
    assert (first.width, first.height, first.num_inference_steps, first.guidance_scale) == (24, 16, 2, 3)
    assert [(use.name, use.scale) for use in first.lora] == [("bold", 0.5)]
    assert first.scheduler == "EulerDiscreteScheduler"
    assert "Description" in found.images[0].text


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("words", "scale", "text_scale"),
    [
        ("<lora:bold>", 1.0, None),
        ("<lora:bold:>", 1.0, None),
        ("<lyco:bold:0.5>", 0.5, None),
        ("<lora:bold:0.8:0.25>", 0.25, 0.8),
        ("<lora:bold:0.8:0.8>", 0.8, None),
        ("<lora:bold:unet=0.5>", 0.5, 1.0),
        ("<lora:bold:te=0:unet=0.5>", 0.5, 0.0),
    ],
)
async def test_a_network_in_a_prompt(webui: Any, replicas: Replicas, words: str, scale: float, text_scale: Any) -> None:
    await asyncio.to_thread(webui.txt2img, prompt=f"a {words} seven", width=16, height=8)
    (request,) = replicas.requests
    assert request.prompt == "a  seven"
    assert [(use.name, use.scale, use.text_scale) for use in request.lora] == [("bold", scale, text_scale)]


async def test_the_last_layer_of_the_text_is_counted_from_one(webui: Any, replicas: Replicas) -> None:
    for last in (1, 2):
        settings = {"CLIP_stop_at_last_layers": last}
        await asyncio.to_thread(webui.txt2img, prompt="x", width=16, height=8, override_settings=settings)
    assert [request.clip_skip for request in replicas.requests] == [0, 1]


async def test_images_from_an_image_and_a_mask(webui: Any, replicas: Replicas) -> None:
    image = Image.fromarray(np.full((16, 16, 3), 200, np.uint8))
    mask = np.zeros((16, 16), np.uint8)
    mask[:, 8:] = 255
    made = []
    for inverted in (0, 1):
        found = await asyncio.to_thread(
            webui.img2img,
            images=[image],
            mask_blur=0,
            inpaint_full_res=False,
            inpainting_fill=1,
            mask_image=Image.fromarray(mask),
            prompt="x",
            inpainting_mask_invert=inverted,
            denoising_strength=0.5,
            width=16,
            height=16,
        )
        made.append(np.asarray(found.image))
    for pixels, is_painted in zip(made, (mask == 255, mask == 0), strict=True):
        assert (pixels[~is_painted] == 200).all()
        assert (pixels[is_painted] != 200).any()
    plain, inverted_ = replicas.requests
    assert (plain.strength, plain.init_image[0, 0, 0]) == (0.5, 200)
    np.testing.assert_array_equal(plain.mask_image >= 128, mask == 255)
    np.testing.assert_array_equal(inverted_.mask_image >= 128, mask == 0)


async def test_sides_are_rounded_down_to_whole_latents(webui: Any, replicas: Replicas) -> None:
    """The WebUI takes any size, and makes images of whole latents."""
    await asyncio.to_thread(webui.txt2img, prompt="x", width=23, height=8)
    image = Image.fromarray(np.full((21, 30, 3), 200, np.uint8))
    await asyncio.to_thread(webui.img2img, images=[image], prompt="x", width=None, height=None, denoising_strength=0.5)
    assert [(one.width, one.height) for one in replicas.requests] == [(16, 8), (24, 16)]
    assert replicas.requests[1].init_image.shape == (16, 24, 3)


async def test_an_image_in_another_size(webui: Any, replicas: Replicas) -> None:
    """A network that doubles, as the fakes' worker: it answers with an image of twice the size."""
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8))
    unchanged = await asyncio.to_thread(webui.extra_single_image, small)
    assert np.array_equal(np.asarray(unchanged.image), np.asarray(small))
    larger = await asyncio.to_thread(webui.extra_single_image, small, upscaler_1="Lanczos", upscaling_resize=2.5)
    expected = small.resize((30, 20), Image.Resampling.LANCZOS)
    assert np.array_equal(np.asarray(larger.image), np.asarray(expected))
    cut = await asyncio.to_thread(
        webui.extra_single_image, small, 1, upscaler_1="Lanczos", upscaling_resize_w=16, upscaling_resize_h=16
    )
    expected = small.resize((24, 16), Image.Resampling.LANCZOS).crop((4, 0, 20, 16))
    assert np.array_equal(np.asarray(cut.image), np.asarray(expected))


async def test_a_network_runs_until_the_image_is_large_enough(webui: Any, replicas: Replicas) -> None:
    replicas.states["x2"] = ModelRecord("x2", "ready", "upscaler", 1, "v", variant={"scale": 2})
    replicas.enlarges_by = 2
    small = Image.fromarray(np.full((8, 12, 3), 50, np.uint8))
    found = await asyncio.to_thread(webui.extra_single_image, small, upscaler_1="x2", upscaling_resize=3)
    assert found.image.size == (36, 24)
    assert [(one.model, one.init_image.shape) for one in replicas.requests] == [("x2", (8, 12, 3)), ("x2", (16, 24, 3))]


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, (32, 16)),
        ({"hr_scale": 1.5}, (24, 8)),
        ({"hr_resize_x": 40}, (40, 16)),
        ({"hr_resize_y": 24, "hr_sampler_name": "Use same sampler", "hr_scheduler": "Use same scheduler"}, (48, 24)),
        ({"hr_checkpoint_name": "Use same checkpoint", "hr_prompt": "", "hr_negative_prompt": ""}, (32, 16)),
    ],
)
async def test_the_second_pass_begins_at_the_enlarged_image(
    webui: Any, replicas: Replicas, fields: dict[str, Any], size: tuple[int, int]
) -> None:
    found = await asyncio.to_thread(
        webui.txt2img, prompt="x", seed=5, steps=4, width=16, height=8, enable_hr=True, denoising_strength=0.4,
        hr_second_pass_steps=6, **fields,
    )  # fmt: skip
    assert [image.size for image in found.images] == [size]
    first, second = replicas.requests
    assert (first.width, first.height, first.init_image, first.num_inference_steps) == (16, 8, None, 4)
    assert (second.width, second.height, second.init_image.shape) == (*size, (size[1], size[0], 3))
    assert (second.strength, second.num_inference_steps, second.seed, second.prompt) == (0.4, 6, 5, "x")
    assert (second.scheduler, second.scheduler_options) == (first.scheduler, first.scheduler_options)


@pytest.mark.parametrize("scheduler", [None, "Karras"])
async def test_the_second_pass_may_have_another_sampler(webui: Any, replicas: Replicas, scheduler: str | None) -> None:
    given = {"hr_sampler_name": "DPM++ 2M SDE", **({"hr_scheduler": scheduler} if scheduler else {})}
    await asyncio.to_thread(webui.txt2img, prompt="x", width=16, height=8, enable_hr=True, **given)
    first, second = replicas.requests
    automatic = {"timestep_spacing": "automatic"}
    assert (first.scheduler, first.scheduler_options) == ("EulerDiscreteScheduler", automatic)
    own = {"algorithm_type": "sde-dpmsolver++"}
    karras = {"use_karras_sigmas": True, "timestep_spacing": "linspace"} if scheduler else automatic
    assert (second.scheduler, second.scheduler_options) == ("DPMSolverMultistepScheduler", own | karras)


async def test_lists(webui: Any) -> None:
    found = await asyncio.to_thread(
        lambda: (
            webui.util_get_model_names(),
            webui.util_get_sampler_names(),
            webui.get_loras(),
            webui.get_schedulers(),
        )
    )
    models, samplers, loras, schedulers = found
    assert models == ["flux", "other-flux"]
    assert {"Automatic", "Euler a", "DPM++ 2M"} <= {*samplers}
    assert {lora["name"] for lora in loras} == {"bold", "thin"}
    names = "automatic uniform karras exponential sgm_uniform normal simple ddim beta"
    assert [one["name"] for one in schedulers] == names.split()
    assert [one["name"] for one in await asyncio.to_thread(webui.get_upscalers)] == ["None", "Lanczos"]


@pytest.mark.drawn(20)
@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("scheduler", [*SCHEDULERS, *(name.replace(" ", "_").lower() for name in SCHEDULERS)])
def test_what_is_listed_can_be_asked_for(sampler: str, scheduler: str, sd_folder: Path) -> None:
    """By name, or with the scheduler behind it, as older versions have it; but for what a class refuses by its name."""
    body = TextToImageBody(sampler_name=sampler, scheduler=scheduler)
    solver = body._fields("m")
    if scheduler in SCHEDULERS and not (scheduler == "Automatic" or f"{sampler} {scheduler}" in SAMPLERS):
        together = TextToImageBody(sampler_name=f"{sampler} {scheduler}")._fields("m")
        assert {key: together[key] for key in ("scheduler", "scheduler_options")} == {
            key: solver[key] for key in ("scheduler", "scheduler_options")
        }
    factory = solvers.SolverFactory(sd_folder, {"scheduler": ["diffusers", "DDIMScheduler"]})
    lacking = [
        name
        for name in solver["scheduler_options"]
        if name not in inspect.signature(type(factory.configured(solver["scheduler"], {}))).parameters
    ]
    with pytest.raises(EngineError, match=f"has no '{lacking[0]}' to choose") if lacking else nullcontext():
        factory.configured(solver["scheduler"], solver["scheduler_options"]).set_timesteps(10)
    is_spacing = scheduler.lower().replace("_", " ") in (
        "automatic",
        "uniform",
        "normal",
        "simple",
        "sgm uniform",
        "ddim",
    )
    assert not lacking or not is_spacing or sampler == "DPM++ 2S"


async def test_the_chosen_model_is_that_of_requests_without_one(webui: Any, replicas: Replicas) -> None:
    def work() -> list[Any]:
        before = webui.util_get_current_model()
        webui.util_set_model("other-flux")
        webui.txt2img(prompt="x", width=16, height=8)
        webui.txt2img(prompt="x", width=16, height=8, override_settings={"sd_model_checkpoint": "flux"})
        return [before, webui.util_get_current_model()]

    assert await asyncio.to_thread(work) == ["flux", "other-flux"]
    assert [request.model for request in replicas.requests] == ["other-flux", "flux"]


async def test_several_ingress_replicas_keep_no_choice(open_app: OpenApp) -> None:
    ingress = CONFIG.ingress.model_dump() | {"num_replicas": 2}
    async with open_app(ingress=ingress) as app, client_over(app) as http:
        answer = await http.post(f"{PATH}/options", json={"sd_model_checkpoint": "flux"})
        assert answer.status_code == 400
        assert "override_settings" in answer.json()["detail"]
        assert (await http.post(f"{PATH}/options", json={"CLIP_stop_at_last_layers": 2})).status_code == 200
        assert (await http.post(f"{PATH}/options", json={"CLIP_stop_at_last_layers": True})).status_code == 400


async def test_progress_and_interruption(open_http: Any) -> None:
    replicas = Slow()
    async with open_http(replicas) as http:
        idle = (await http.get(f"{PATH}/progress")).json()
        assert (idle["progress"], idle["state"]["job_count"]) == (0, 0)
        asked = asyncio.create_task(http.post(f"{PATH}/txt2img", json={"prompt": "x", "width": 16, "height": 8}))
        await replicas.waiting.wait()
        running = idle
        async with asyncio.timeout(10):
            while not running["progress"]:
                await asyncio.sleep(0)  # the answer comes without one
                running = (await http.get(f"{PATH}/progress")).json()
        assert running["progress"] == pytest.approx(0.25)  # a step of four
        assert (running["state"]["sampling_step"], running["state"]["sampling_steps"]) == (1, 4)
        assert running["eta_relative"] > 0
        await http.post(f"{PATH}/interrupt")
        replicas.gate.set()
        answer = await asked
        assert (answer.status_code, answer.json()["images"]) == (200, [])
        assert (await http.get(f"{PATH}/progress")).json() == idle


async def test_info_is_json(http: httpx.AsyncClient) -> None:
    answer = await http.post(f"{PATH}/txt2img", json={"prompt": None, "seed": -1})  # both as clients send them
    info = json.loads(answer.json()["info"])
    assert info["warnings"] == ["a note"]
    assert f"Seed: {info['seed']}" in info["infotexts"][0]


@pytest.mark.parametrize(
    "fields",
    [
        {"sampler_name": "DPM++ 2M", "scheduler": "Karras"},
        {"sampler_index": "DPM++ 2M Karras", "scheduler": "automatic"},
    ],
)
async def test_karras_is_an_option_of_the_scheduler(
    http: httpx.AsyncClient, replicas: Replicas, fields: dict[str, str]
) -> None:
    assert (await http.post(f"{PATH}/txt2img", json={"prompt": "x"} | fields)).status_code == 200
    (request,) = replicas.requests
    assert (request.scheduler, request.scheduler_options) == (
        "DPMSolverMultistepScheduler",
        {"use_karras_sigmas": True, "timestep_spacing": "linspace"},
    )


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("task", "fields", "text"),
    [
        ("txt2img", {"sampler_name": "Euler X"}, "Euler a"),
        ("txt2img", {"scheduler": "Turbo"}, "Automatic, Uniform, Karras"),
        ("txt2img", {"sampler_name": "Euler Turbo"}, "no sampler 'Euler Turbo'"),
        ("txt2img", {"sampler_name": "DPM adaptive"}, "'DPM adaptive': diffusers has none that computes it"),
        ("txt2img", {"enable_hr": True, "hr_checkpoint_name": "other"}, "hr_checkpoint_name: the second pass has"),
        ("txt2img", {"enable_hr": True, "hr_scheduler": "Turbo"}, "scheduler: 'Turbo' is not known"),
        ("txt2img", {"enable_hr": True, "hr_prompt": "y"}, "hr_prompt: the second pass has that of the first"),
        ("txt2img", {"enable_hr": True, "hr_upscaler": "R-ESRGAN 4x+"}, "(known: None, Lanczos)"),
        ("txt2img", {"enable_hr": True, "hr_scale": 8}, "size: "),
        ("txt2img", {"enable_hr": True, "denoising_strength": 0}, "strength"),
        ("img2img", {"init_images": [png(np.zeros((8, 8, 3), np.uint8))], "enable_hr": True}, "enable_hr"),
        ("extra-single-image", {"image": "eA=="}, "no PNG, JPEG or WebP"),
        ("extra-single-image", {"image": png(np.zeros((8, 8, 3), np.uint8)), "gfpgan_visibility": 1}, "gfpgan"),
        ("extra-single-image", {"image": png(np.zeros((8, 8, 3), np.uint8)), "upscaler_1": "flux"}, "no upscaler"),
        (
            "extra-single-image",
            {"image": png(np.zeros((1, 4000, 3), np.uint8)), "upscaler_1": "Lanczos", "resize_mode": 1},
            "at most 36000000 are allowed",
        ),
        ("txt2img", {"script_name": "x/y plot"}, "script_name"),
        ("txt2img", {"alwayson_scripts": {"ADetailer": {"args": [True]}}}, "alwayson_scripts"),
        ("txt2img", {"prompt": "<lora:bold:much>"}, "<lora:name:scale>"),
        ("txt2img", {"prompt": "<lora:bold:1:much>"}, "<lora:name:scale in text encoders:scale in the UNet>"),
        ("txt2img", {"prompt": "<lora:bold:1:1:8>"}, "is not <lora:name:scale>"),
        ("txt2img", {"prompt": "<lora:bold:dyn=8>"}, "is not <lora:name:scale>"),
        ("txt2img", {"prompt": "<hypernet:anime:1>"}, "'<hypernet:anime:1>': there are no hypernetworks here"),
        ("txt2img", {"prompt": "<lora:nobody:1>"}, "no adapter 'nobody'"),
        ("txt2img", {"n_iter": 5}, "at most 4"),
        ("txt2img", {"batch_size": 10**9, "n_iter": 10**9}, "at most 4"),
        ("txt2img", {"steps": 0}, "steps"),
        ("txt2img", {"width": 10_000}, "size"),
        ("txt2img", {"override_settings": {"sd_model_checkpoint": "chatty"}}, "does not make images"),
        ("img2img", {}, "init_images"),
        ("img2img", {"init_images": ["eA=="]}, "no PNG, JPEG or WebP"),
        ("img2img", {"init_images": [png(np.zeros((8, 8, 3), np.uint8))] * 2}, "init_images"),
        ("img2img", {"init_images": [png(np.zeros((8, 8, 3), np.uint8))], "denoising_strength": 0}, "denoising"),
    ],
)
async def test_refusals_name_the_field(http: httpx.AsyncClient, task: str, fields: dict[str, Any], text: str) -> None:
    answer = await http.post(f"{PATH}/{task}", json={"prompt": "x"} | fields)
    assert answer.status_code in (400, 404)
    assert text in answer.json()["detail"]


def told(answer: httpx.Response) -> list[str]:
    """The warnings of an answer, without that of the fakes' worker."""
    return [one for one in json.loads(answer.json()["info"])["warnings"] if one != "a note"]


@pytest.mark.parametrize("subseed", [5, -1])
async def test_one_seed_varies_towards_others(http: httpx.AsyncClient, replicas: Replicas, subseed: int) -> None:
    small = {"prompt": "x", "width": 16, "height": 16, "steps": 2, "batch_size": 3, "seed": 9}
    answer = await http.post(f"{PATH}/txt2img", json=small | {"subseed": subseed, "subseed_strength": 0.25})
    assert [one.seed for one in replicas.requests] == [9, 9, 9]
    variations = sorted((one.variation for one in replicas.requests), key=lambda one: one.seed)
    first = variations[0].seed
    assert subseed in (first, -1)
    assert [(one.seed, one.strength) for one in variations] == [(first + place, 0.25) for place in range(3)]
    info = json.loads(answer.json()["info"])
    assert (info["subseed"], info["all_subseeds"], info["subseed_strength"]) == (
        first,
        [first, first + 1, first + 2],
        0.25,
    )
    assert "Variation seed strength: 0.25" in info["infotexts"][0]
    plain = await http.post(f"{PATH}/txt2img", json=small | {"subseed": 5})
    assert [one.variation for one in replicas.requests[3:]] == [None] * 3
    assert json.loads(plain.json()["info"])["all_subseeds"] == []


async def test_what_has_no_effect_is_told(http: httpx.AsyncClient, replicas: Replicas) -> None:
    usual = {"styles": [], "tiling": False, "subseed": -1, "subseed_strength": 0, "eta": None, "s_noise": 1.0}
    usual |= {"do_not_save_samples": True, "override_settings": {"sd_vae": "Automatic"}, "refiner_checkpoint": None}
    small = {"prompt": "x", "width": 16, "height": 16, "steps": 2}
    answer = await http.post(f"{PATH}/txt2img", json=small | usual)
    assert told(answer) == []
    assert "X-Atelier-Warning" not in answer.headers
    vain = {"styles": ["ink"], "tiling": True, "seed_resize_from_h": 512, "eta": 0.3, "colour": "blue"}
    vain |= {"refiner_checkpoint": "sdxl-refiner", "override_settings": {"sd_vae": "other.safetensors"}}
    said = (
        "without effect here: styles, tiling, seed_resize_from_h, eta, colour, refiner_checkpoint, "
        "override_settings.sd_vae"
    )
    answer = await http.post(f"{PATH}/txt2img", json=small | vain)
    assert told(answer) == [said]
    assert answer.headers["X-Atelier-Warning"] == said
    image = png(np.full((16, 16, 3), 9, np.uint8))
    given = {"init_images": [image], "mask": image, "resize_mode": 3, "inpainting_fill": 2}
    answer = await http.post(f"{PATH}/img2img", json=small | given)
    assert told(answer) == [
        "resize_mode 3 had no effect: the image is resized, not its latents",
        "inpainting_fill 2 had no effect: the masked part is painted over as it is",
    ]
    many = {f"field{number}": 1 for number in range(30)}
    answer = await http.post(f"{PATH}/txt2img", json=small | many)
    assert told(answer)[0].endswith("field19 and 10 more")


async def test_unknown_names_and_paths_have_the_form_of_the_webui(http: httpx.AsyncClient) -> None:
    unknown = await http.post(f"{PATH}/options", json={"sd_model_checkpoint": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]) == (404, "model_not_found")
    assert (await http.get(f"{PATH}/nothing")).json().keys() == {"error", "detail", "body", "errors"}
