"""Images beside a prompt: to the request of an editing model, or refused by the side of the sampler that has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng
from kit.workflows import FakeBackend, Told, png_file, workflow_of

from deployments.records import ImageRequest
from deployments.workflows.backend import ModelFacts, Report
from deployments.workflows.checking import check
from deployments.workflows.running import run

PLUS = "QwenImageEditPlusPipeline"


class Editor(FakeBackend):
    """A model that edits, and keeps what it was asked."""

    def __init__(self, inputs: dict[str, bytes], class_name: str = PLUS, **variant: bool) -> None:
        super().__init__(inputs, class_name)
        self.variant = variant

    def facts(self, model: str) -> ModelFacts:
        return ModelFacts(self.class_name, self.variant)

    async def image(self, request: ImageRequest, report: Report) -> np.ndarray:
        self.asked.append(request)
        return np.zeros((request.n, 16, 8, 8), np.float32)


def editing(cfg: float = 1.0, **changes: Any) -> dict[str, Any]:
    nodes: dict[str, Any] = {
        "model": ("UNETLoader", {"unet_name": "unet.safetensors", "weight_dtype": "default"}),
        "clip": ("CLIPLoader", {"clip_name": "clip_l.safetensors", "type": "qwen_image"}),
        "vae": ("VAELoader", {"vae_name": "ae.safetensors"}),
        "one": ("LoadImage", {"image": "one.png"}),
        "two": ("LoadImage", {"image": "two.png"}),
    }
    seen = {"clip": ("clip", 0), "vae": ("vae", 0), "image1": ("one", 0), "image2": ("two", 0)}
    nodes["positive"] = ("TextEncodeQwenImageEditPlus", {"prompt": "a hat", **seen})
    nodes["negative"] = ("TextEncodeQwenImageEditPlus", {"prompt": "", **seen})
    nodes["empty"] = ("EmptySD3LatentImage", {"width": 64, "height": 64, "batch_size": 1})
    sampler = {"seed": 1, "steps": 2, "cfg": cfg, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    links = {
        "model": ("model", 0),
        "positive": ("positive", 0),
        "negative": ("negative", 0),
        "latent_image": ("empty", 0),
    }
    nodes["sample"] = ("KSampler", {**sampler, **links})
    nodes["decode"] = ("VAEDecode", {"samples": ("sample", 0), "vae": ("vae", 0)})
    nodes["save"] = ("SaveImage", {"images": ("decode", 0), "filename_prefix": "x"})
    for name, given in changes.items():
        kind, inputs = nodes.get(name, (given[0], {}))
        kept = {key: value for key, value in (inputs | given[1]).items() if value is not None}
        nodes[name] = (given[0] or kind, kept)
    return nodes


@pytest.fixture
def pictures() -> dict[str, np.ndarray]:
    rng = seeded_rng()
    return {name: rng.integers(0, 256, (24, 32, 3), dtype=np.uint8) for name in ("one", "two")}


@pytest.mark.parametrize("cfg", [1.0, 4.0])
async def test_images_of_a_prompt_go_to_the_request(pictures: dict[str, np.ndarray], cfg: float) -> None:
    backend = Editor({f"{name}.png": png_file(pixels) for name, pixels in pictures.items()})
    workflow = workflow_of(**editing(cfg))
    assert check(workflow, backend).errors == ()
    await run(workflow, backend, Told())
    (request,) = backend.asked
    assert [
        np.array_equal(found, pictures[name]) for found, name in zip(request.references, ("one", "two"), strict=True)
    ] == [
        True,
        True,
    ]
    assert (request.prompt, request.negative_prompt) == ("a hat", None if cfg == 1 else " ")


def referring(cfg: float, **changes: Any) -> dict[str, Any]:
    """Return a workflow whose prompts read two encoded images beside the latents."""
    nodes = editing(cfg)
    for side, text in (("positive", "a hat"), ("negative", "")):
        nodes[side] = ("CLIPTextEncode", {"clip": ("clip", 0), "text": text})
        nodes[f"{side}_1"] = ("ReferenceLatent", {"conditioning": (side, 0), "latent": ("encode_1", 0)})
        nodes[f"{side}_2"] = ("ReferenceLatent", {"conditioning": (f"{side}_1", 0), "latent": ("encode_2", 0)})
        nodes["sample"][1][side] = (f"{side}_2", 0)
    for place, name in ((1, "one"), (2, "two")):
        nodes[f"encode_{place}"] = ("VAEEncode", {"pixels": (name, 0), "vae": ("vae", 0)})
    nodes["sample"][1].update(changes)
    return nodes


@pytest.mark.parametrize("cfg", [1.0, 4.0])
async def test_latents_are_read_beside_a_prompt_by_models_that_take_them(
    pictures: dict[str, np.ndarray], cfg: float
) -> None:
    backend = Editor({f"{name}.png": png_file(pixels) for name, pixels in pictures.items()}, "Flux2KleinPipeline")
    workflow = workflow_of(**referring(cfg))
    assert check(workflow, backend).errors == ()
    await run(workflow, backend, Told())
    (request,) = backend.asked
    assert request.references == ()
    for found, name in zip(request.reference_latents, ("one", "two"), strict=True):
        pixels = pictures[name][None].astype(np.float32) / 255
        np.testing.assert_allclose(found, await backend.encode("flux", pixels), rtol=1e-6)


def test_latents_beside_one_prompt_alone_or_of_another_model_are_refused() -> None:
    (error,) = check(workflow_of(**referring(4.0, negative=("negative_1", 0))), Editor({}, "Flux2Pipeline")).errors
    assert (error.input, error.message) == ("negative", "both prompts are read beside the same images")
    (error,) = check(workflow_of(**referring(1.0)), Editor({}, "FluxPipeline")).errors
    assert (error.input, "not read by a FluxPipeline" in error.message) == ("positive", True)


REFUSED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("not read by a FluxPipeline", {}, "positive", {"class_name": "FluxPipeline"}),
    ("its prompt has none", {"positive": ("", {"image1": None, "image2": None})}, "positive", {}),
    ("VAE reads the images, too", {"positive": ("", {"vae": None})}, "positive", {}),
    ("beside the same images", {"negative": ("", {"image2": None})}, "negative", {}),
    ("2 images: a QwenImageEditPipeline reads 1", {}, "positive", {"class_name": "QwenImageEditPipeline"}),
    (
        "by the method index",
        {
            "method": (
                "FluxKontextMultiReferenceLatentMethod",
                {"conditioning": ("positive", 0), "reference_latents_method": "index_timestep_zero"},
            ),
            "sample": ("", {"positive": ("method", 0)}),
        },
        "positive",
        {},
    ),
]


@pytest.mark.parametrize(("words", "changes", "side", "model"), REFUSED)
def test_images_that_a_request_cannot_have_are_refused(
    words: str, changes: dict[str, Any], side: str, model: dict[str, Any]
) -> None:
    (error,) = check(workflow_of(**editing(4.0, **changes)), Editor({}, **model)).errors
    assert (error.node, error.input) == ("sample", side)
    assert words in error.message


def test_the_method_of_the_checkpoint_is_honoured() -> None:
    changes = REFUSED[-1][1]
    assert check(workflow_of(**editing(1.0, **changes)), Editor({}, zero_cond_t=True)).errors == ()
