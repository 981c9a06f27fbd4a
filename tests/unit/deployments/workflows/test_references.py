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
