"""Nodes of videos: a workflow's samplers become one request, what a pipeline would do otherwise is refused by name."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest
from kit.seeding import seeded_rng
from kit.workflows import FakeBackend, Told, png_file, workflow_of

from deployments.engines.records.clip_files import encode_video
from deployments.records import ClipRequest
from deployments.workflows.backend import Folder, ModelFacts
from deployments.workflows.checking import check
from deployments.workflows.evaluation import Evaluation
from deployments.workflows.records import Link, Workflow
from deployments.workflows.running import NodeFailed, run
from deployments.workflows.schedules import flow_levels, ltxv, schedule
from deployments.workflows.table import KINDS
from deployments.workflows.values import Latent, Video

CLASSES = {
    "wan": "WanPipeline",
    "wan-i2v": "WanImageToVideoPipeline",
    "wan-vace": "WanVACEPipeline",
    "hunyuan": "HunyuanVideoPipeline",
    "ltx": "LTXPipeline",
    "flux": "FluxPipeline",
}
FILES = ("t5", "vae", "clip_vision", "quick", "quick-high-noise")
STEPS = {"steps": 4, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
SIZE = {"width": 32, "height": 16, "length": 7, "batch_size": 1}
SHOWN = [{"filename": "film_00001_.mp4", "subfolder": "", "type": "output"}]


class Films(FakeBackend):
    """Each model has a file of its id, and Wan's a file of each of its denoisers, too."""

    def __init__(self, inputs: Mapping[str, bytes] | None = None) -> None:
        super().__init__(inputs)
        self.found = {name: (name,) for name in CLASSES}
        self.found |= {f"wan_{noise}_noise": ("wan", "wan-i2v") for noise in ("high", "low")}

    def files(self, folder: Folder) -> Sequence[str]:
        return [*self.found] if folder == "diffusion_models" else FILES

    def models_of(self, folder: Folder, name: str) -> Sequence[str]:
        if folder in ("loras", "upscale_models"):
            return (name,)
        return tuple(CLASSES) if folder != "diffusion_models" else self.found.get(name, ())

    def facts(self, model: str) -> ModelFacts:
        return ModelFacts(CLASSES[model])


def film(model: str = "wan", **nodes: Any) -> Workflow:
    """Return a video from noise by one sampler, with other or further nodes."""
    prompts = {"positive": ("cat", 0), "negative": ("dog", 0)}
    plain: dict[str, Any] = {
        "unet": ("UNETLoader", {"unet_name": model, "weight_dtype": "default"}),
        "clip": ("CLIPLoader", {"clip_name": "t5", "type": "wan"}),
        "vae": ("VAELoader", {"vae_name": "vae"}),
        "cat": ("CLIPTextEncode", {"text": "a cat", "clip": ("clip", 0)}),
        "dog": ("CLIPTextEncode", {"text": "a dog", "clip": ("clip", 0)}),
        "shift": ("ModelSamplingSD3", {"model": ("unet", 0), "shift": 5.0}),
        "empty": ("EmptyHunyuanLatentVideo", SIZE),
        "sample": (
            "KSampler",
            {
                "model": ("shift", 0),
                "seed": 2**64 - 1,
                **STEPS,
                **prompts,
                "latent_image": ("empty", 0),
                "denoise": 1.0,
            },
        ),
        "decode": ("VAEDecode", {"samples": ("sample", 0), "vae": ("vae", 0)}),
        "video": ("CreateVideo", {"images": ("decode", 0), "fps": 16.0}),
        "save": ("SaveVideo", {"video": ("video", 0), "filename_prefix": "film", "format": "auto", "codec": "auto"}),
    }
    return workflow_of(**plain | nodes)


def scene(kind: str, *, sampler: str = "sample", **inputs: Any) -> dict[str, Any]:
    """Return a node of pictures, and the sampler that takes what it gives."""
    parts = {"positive": ("cat", 0), "negative": ("dog", 0), "vae": ("vae", 0)}
    node = (kind, {**parts, **SIZE, **inputs})
    sampled = {**STEPS, "positive": ("scene", 0), "negative": ("scene", 1), "latent_image": ("scene", 2)}
    return {"scene": node, sampler: ("KSampler", {"model": ("shift", 0), "seed": 7, "denoise": 1.0, **sampled})}


def two(**changes: Any) -> dict[str, Any]:
    """Return two samplers, of a file for much noise and one for little; `first_` and `second_` change one of them."""
    shared = {**STEPS, "positive": ("cat", 0), "negative": ("dog", 0)}
    first = {"add_noise": "enable", "noise_seed": 7, "start_at_step": 0, "end_at_step": 1}
    second = {"add_noise": "disable", "noise_seed": 0, "start_at_step": 1, "end_at_step": 10_000}
    first |= {"model": ("shift", 0), "latent_image": ("empty", 0), "return_with_leftover_noise": "enable"}
    second |= {"model": ("shift_2", 0), "latent_image": ("begin", 0), "return_with_leftover_noise": "disable"}
    first |= {name.removeprefix("first_"): value for name, value in changes.items() if name.startswith("first_")}
    second |= {name.removeprefix("second_"): value for name, value in changes.items() if name.startswith("second_")}
    return {
        "unet": ("UNETLoader", {"unet_name": "wan_high_noise", "weight_dtype": "default"}),
        "unet_2": ("UNETLoader", {"unet_name": "wan_low_noise", "weight_dtype": "default"}),
        "shift_2": ("ModelSamplingSD3", {"model": ("unet_2", 0), "shift": 5.0}),
        "begin": ("KSamplerAdvanced", shared | first),
        "sample": ("KSamplerAdvanced", shared | second),
    }


async def asked(workflow: Workflow, inputs: Mapping[str, bytes] | None = None) -> ClipRequest:
    backend = Films(inputs)
    assert check(workflow, backend).errors == ()
    assert (await run(workflow, backend, Told()))["save"] == {"images": SHOWN, "animated": [True]}
    [request] = backend.asked
    assert isinstance(request, ClipRequest)
    return request


def refusal(workflow: Workflow) -> str:
    [error] = check(workflow, Films()).errors
    return str(error)


def decode(file: bytes) -> np.ndarray:
    with av.open(io.BytesIO(file)) as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


LEVELS = schedule("simple", flow_levels(5.0, 1000), 4)


async def test_a_sampler_of_a_video_is_one_request_and_one_file() -> None:
    backend, workflow = Films(), film()
    assert check(workflow, backend).errors == ()
    shown = await run(workflow, backend, Told())
    [request] = backend.asked
    assert (request.model, request.prompt, request.negative_prompt) == ("wan", "a cat", "a dog")
    assert (request.width, request.height, request.num_frames, request.guidance_scale) == (32, 16, 5, 3.0)
    assert request.sampler is not None
    assert (request.sampler.name, request.sampler.sigmas) == ("euler", LEVELS)
    assert (request.sampler.noise_seed, request.sampler.cfg, request.second_from) == (2**64 - 1, 1.0, None)
    assert shown == {"save": {"images": SHOWN, "animated": [True]}}
    with av.open(io.BytesIO(backend.files_saved[0])) as file:
        stream = file.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
        assert (len(frames), frames[0].shape, stream.average_rate) == (5, (16, 32, 3), 16)


async def test_two_samplers_of_two_denoisers_are_one_request() -> None:
    loras = {
        "lora": ("LoraLoaderModelOnly", {"model": ("unet", 0), "lora_name": "quick-high-noise", "strength_model": 0.5}),
        "shift": ("ModelSamplingSD3", {"model": ("lora", 0), "shift": 5.0}),
    }
    request = await asked(film(**two(second_cfg=2.0), **loras))
    assert request.sampler is not None
    assert (request.sampler.sigmas, request.sampler.noise_seed) == (LEVELS, 7)
    assert (request.second_from, request.guidance_scale, request.extra) == (1, 3.0, {"guidance_scale_2": 2.0})
    assert [(use.name, use.scale, use.text_scale) for use in request.lora] == [("quick-high-noise", 0.5, 0.0)]
    for file, step in (("wan_high_noise", 4), ("wan_low_noise", 0)):  # one sampler runs one denoiser
        assert (await asked(film(file))).second_from == step


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"second_add_noise": "enable"}, "node sample, KSamplerAdvanced.*another level of noise"),
        ({"second_start_at_step": 2}, "another level of noise than the first one ends at"),
        ({"second_steps": 5}, "another level of noise"),
        ({"second_sampler_name": "heun", "first_sampler_name": "heun"}, "both one of euler, ddim"),
        ({"second_sampler_name": "ddim"}, "both one of euler, ddim"),
        ({"second_positive": ("dog", 0)}, "the same prompts"),
        ({"second_negative": ("cat", 0)}, "the same prompts"),
        ({"first_cfg": 1.0}, "not guided later"),
        ({"second_model": ("shift", 0)}, "a file of high noise and one of low noise"),
        ({"first_add_noise": "disable"}, "node begin, KSamplerAdvanced.*from noise alone"),
    ],
)
def test_two_samplers_that_are_no_one_call_are_refused(changes: dict[str, Any], shown: str) -> None:
    with pytest.raises(AssertionError, match=shown):
        raise AssertionError(refusal(film(**two(**changes))))


def test_noise_that_is_left_is_only_sampled_further() -> None:
    nodes = two() | {"decode": ("VAEDecode", {"samples": ("begin", 0), "vae": ("vae", 0)})}
    assert "node decode, VAEDecode, input 'samples': noise is left in these latents" in refusal(film(**nodes))
    named = {"lora": ("LoraLoaderModelOnly", {"model": ("unet_2", 0), "lora_name": "quick", "strength_model": 1.0})}
    named["shift_2"] = ("ModelSamplingSD3", {"model": ("lora", 0), "shift": 5.0})
    assert "'quick' says by its id for which denoiser" in refusal(film(**two() | named))


async def test_pictures_come_in_the_size_of_the_video() -> None:
    pixels = seeded_rng().integers(0, 256, (2, 16, 48, 3), np.uint8)
    inputs = {"start": png_file(pixels[0]), "end": png_file(pixels[1])}
    loads: dict[str, Any] = {name: ("LoadImage", {"image": name}) for name in inputs}
    vision = {
        "see": ("CLIPVisionLoader", {"clip_name": "clip_vision"}),
        "seen": ("CLIPVisionEncode", {"clip_vision": ("see", 0), "image": ("start", 0), "crop": "none"}),
    }
    pictures = {"start_image": ("start", 0), "end_image": ("end", 0), "clip_vision_start_image": ("seen", 0)}
    nodes = loads | vision | scene("WanFirstLastFrameToVideo", **pictures)
    request = await asked(film("wan_high_noise", **nodes), inputs)
    assert request.model == "wan-i2v"  # the class of that file that begins at a picture
    assert set(request.images) == {"image", "last_image"}
    for name, expected in (("image", pixels[0]), ("last_image", pixels[1])):
        assert (request.images[name] == expected[:, 8:40]).all()  # the middle, as wide as the video is
    other = vision | {"seen": ("CLIPVisionEncode", {"clip_vision": ("see", 0), "image": ("other", 0), "crop": "none"})}
    backend = Films({**inputs, "end": png_file(pixels[1])})
    nodes["scene"][1].pop("end_image")
    with pytest.raises(NodeFailed, match="the image encoder reads another image"):
        await run(film("wan-i2v", **nodes | other | {"other": ("LoadImage", {"image": "end"})}), backend, Told())


async def test_a_control_video_has_all_frames_and_its_reference_is_trimmed() -> None:
    frames = seeded_rng().integers(0, 256, (3, 16, 32, 3), np.uint8)
    nodes: dict[str, Any] = {
        "load": ("LoadVideo", {"file": "dance.mp4"}),
        "parts": ("GetVideoComponents", {"video": ("load", 0)}),
        "half": ("SolidMask", {"value": 1.0, "width": 32, "height": 16}),
        "face": ("LoadImage", {"image": "face"}),
        "trim": ("TrimVideoLatent", {"samples": ("sample", 0), "trim_amount": ("scene", 3)}),
        "decode": ("VAEDecode", {"samples": ("trim", 0), "vae": ("vae", 0)}),
        "video": ("CreateVideo", {"images": ("decode", 0), "fps": ("parts", 2)}),
    }
    pictures = {"control_video": ("parts", 0), "control_masks": ("half", 0), "reference_image": ("face", 0)}
    nodes |= scene("WanVaceToVideo", strength=0.5, **pictures)
    backend = Films({"face": png_file(frames[0])})
    backend.videos["dance.mp4"] = (frames, 8.0)
    assert check(film("wan-vace", **nodes), backend).errors == ()
    await run(film("wan-vace", **nodes), backend, Told())
    [request] = backend.asked
    video, masks = np.stack(request.images["video"]), np.stack(request.images["mask"])
    assert (video[:3] == frames).all()
    assert (video[3:] == 128).all()  # gray, where the control video has ended
    assert masks.shape == video.shape == (5, 16, 32, 3)
    assert (masks == 255).all()
    assert (request.images["reference_images"][0] == frames[0]).all()
    assert request.extra == {"conditioning_scale": 0.5}
    with av.open(io.BytesIO(backend.files_saved[0])) as file:
        assert file.streams.video[0].average_rate == 8
    nodes["decode"] = ("VAEDecode", {"samples": ("sample", 0), "vae": ("vae", 0)})
    assert "trim them, by TrimVideoLatent" in refusal(film("wan-vace", **nodes))


async def test_hunyuan_and_ltx_are_asked_with_what_they_read() -> None:
    guided = {
        "guide": ("FluxGuidance", {"conditioning": ("cat", 0), "guidance": 7.0}),
        "noise": ("RandomNoise", {"noise_seed": 3}),
        "pick": ("KSamplerSelect", {"sampler_name": "euler"}),
        "levels": ("BasicScheduler", {"model": ("unet", 0), "scheduler": "simple", "steps": 4, "denoise": 1.0}),
        "guider": ("BasicGuider", {"model": ("shift", 0), "conditioning": ("guide", 0)}),
        "sample": (
            "SamplerCustomAdvanced",
            {
                **{"noise": ("noise", 0), "guider": ("guider", 0), "sampler": ("pick", 0), "sigmas": ("levels", 0)},
                "latent_image": ("empty", 0),
            },
        ),
    }
    request = await asked(film("hunyuan", **guided))
    assert (request.guidance_scale, request.true_cfg_scale, request.negative_prompt) == (7.0, 1.0, None)
    assert request.sampler is not None
    assert request.sampler.sigmas == schedule("simple", flow_levels(7.0, 1000), 4)
    rated = {
        "empty": ("EmptyLTXVLatentVideo", {"width": 64, "height": 32, "length": 12, "batch_size": 1}),
        "rate": ("LTXVConditioning", {"positive": ("cat", 0), "negative": ("dog", 0), "frame_rate": 30.0}),
        "levels": (
            "LTXVScheduler",
            {
                **{"steps": 3, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1},
                "latent": ("empty", 0),
            },
        ),
        "pick": guided["pick"],
        "sample": (
            "SamplerCustom",
            {
                **{"model": ("unet", 0), "add_noise": True, "noise_seed": 3, "cfg": 3.0, "positive": ("rate", 0)},
                **{"negative": ("rate", 1), "sampler": ("pick", 0), "sigmas": ("levels", 0)},
                "latent_image": ("empty", 0),
            },
        ),
    }
    request = await asked(film("ltx", **rated))
    assert (request.fps, request.num_frames, request.guidance_scale) == (30.0, 9, 3.0)
    assert request.sampler is not None
    # Two by one places, twice: e^mu / (e^mu + 1/t - 1), stretched so that the last level is 0.1.
    grown = math.exp((4 - 1024) * (2.05 - 0.95) / 3072 + 0.95)
    plain = [grown / (grown + 1 / t - 1) for t in (1, 2 / 3, 1 / 3)]
    expected = [1 - (1 - one) * 0.9 / (1 - plain[-1]) for one in plain]
    assert request.sampler.sigmas == pytest.approx([*expected, 0.0])
    assert ltxv(2, 1024, (0.0, 1.0), None) == pytest.approx((1.0, 0.5, 0.0))


@pytest.mark.parametrize(
    ("model", "nodes", "shown"),
    [
        ("wan", {"empty": ("EmptyLatentImage", {"width": 32, "height": 16, "batch_size": 1})}, "latent of a video"),
        ("flux", {}, "node sample, KSampler, input 'latent_image': the latent of a video, and a FluxPipeline makes"),
        ("wan", {"empty": ("EmptyHunyuanLatentVideo", SIZE | {"batch_size": 2})}, "one whole video"),
        ("wan", {"empty": ("EmptyHunyuanLatentVideo", SIZE | {"width": 40})}, "multiples of 16"),
        ("ltx", {}, "sides of a LTXPipeline are multiples of 32"),
        ("wan-i2v", {}, "WanImageToVideoPipeline begins at a picture"),
        ("wan-i2v", scene("WanImageToVideo"), "link a start image"),
        ("wan", scene("WanVaceToVideo", strength=1.0), "a WanPipeline reads no pictures"),
        ("wan", {"dog": ("ConditioningZeroOut", {"conditioning": ("cat", 0)})}, "reads a text as it is"),
        ("wan", {"cat": ("CLIPTextEncode", {"text": "a (cat)", "clip": ("clip", 0)})}, "weights in prompts"),
        (
            "wan",
            {"save": ("SaveVideo", {"video": ("video", 0), "filename_prefix": "a", "codec": "h264"})},
            "h264: videos are saved in VP9",
        ),
    ],
)
def test_what_a_pipeline_would_do_otherwise_is_refused(model: str, nodes: dict[str, Any], shown: str) -> None:
    assert shown in str(check(film(model, **nodes), Films()).errors[0])


def test_samplers_that_draw_noise_are_refused() -> None:
    node = film().nodes["sample"]
    inputs = {**node.inputs, "sampler_name": "euler_ancestral"}
    workflow = Workflow({**film().nodes, "sample": replace(node, inputs=inputs)})
    assert "euler_ancestral draws noise in its steps" in refusal(workflow)


def test_latents_of_a_video_are_not_changed() -> None:
    node = film().nodes["sample"]
    changed = {"samples": ("empty", 0), "upscale_method": "bilinear", "scale_by": 2.0}
    nodes = workflow_of(larger=("LatentUpscaleBy", changed)).nodes
    larger = replace(node, inputs={**node.inputs, "latent_image": Link("larger", 0)})
    assert "sampled and decoded only" in refusal(Workflow({**film().nodes, **nodes, "sample": larger}))


async def test_frames_are_images_of_other_nodes_and_animations() -> None:
    frames = seeded_rng().integers(0, 256, (5, 16, 32, 3), np.uint8)
    picks = {"image": ("parts", 0), "batch_index": 2, "length": 1}
    workflow = workflow_of(
        load=("LoadVideo", {"file": "in.webm"}),
        parts=("GetVideoComponents", {"video": ("load", 0)}),
        one=("ImageFromBatch", picks),
        show=("SaveImage", {"images": ("one", 0), "filename_prefix": "one"}),
        webp=(
            "SaveAnimatedWEBP",
            {
                **{"images": ("parts", 0), "filename_prefix": "a", "fps": 10.0, "lossless": True, "quality": 80},
                "method": "default",
            },
        ),
        png=(
            "SaveAnimatedPNG",
            {"images": ("parts", 0), "filename_prefix": "b", "fps": 10.0, "compress_level": 1},
        ),
        webm=("SaveWEBM", {"images": ("parts", 0), "filename_prefix": "c", "codec": "vp9", "fps": 12.0, "crf": 40.0}),
    )
    backend = Films()
    backend.videos["in.webm"] = (frames, 24.0)
    assert check(workflow, backend).errors == ()
    shown = await run(workflow, backend, Told())
    assert (backend.saved[0][2] == frames[2]).all()
    assert [shown[name]["animated"] for name in ("webp", "png", "webm")] == [[True]] * 3
    for file in backend.files_saved[:2]:
        with PIL.Image.open(io.BytesIO(file)) as animation:
            assert animation.n_frames == 5  # type: ignore[attr-defined]
            animation.seek(3)
            assert (np.asarray(animation.convert("RGB")) == frames[3]).all()
            assert animation.info["duration"] == 100
    assert (decode(backend.files_saved[2]) == decode(encode_video(frames, 12.0, "webm", 40.0))).all()
    assert (decode(backend.files_saved[2]) != decode(encode_video(frames, 12.0, "webm", 10.0))).any()
    sound = {"images": ("parts", 0), "fps": 10.0, "audio": ("parts", 1)}
    nodes = {**workflow.nodes, **workflow_of(film=("CreateVideo", sound)).nodes}
    nodes |= workflow_of(save=("SaveVideo", {"video": ("film", 0), "filename_prefix": "d"})).nodes
    assert "without sound" in str(check(Workflow(nodes), backend).errors[0])


def test_frames_that_nodes_hand_on_are_counted_once() -> None:
    frames, video = np.zeros((4, 8, 8, 3), np.uint8), Latent()
    workflow = film()
    walk = Evaluation(workflow, KINDS, Films(), ["save"], max_bytes=frames.nbytes + 100)
    walk.give("sample", (video.changed(decoded=frames),))
    walk.give("decode", (frames,))
    walk.give("video", (Video(frames, 8.0),))
    with pytest.raises(MemoryError):
        walk.give("empty", (frames.copy(),))
