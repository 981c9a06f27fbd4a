"""The trained demo models, from prompt to image, against stock diffusers on the same files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.records.protocol import AdapterUse, ControlUse, DiffusionRequest
from deployments.engines.text.encoder import TextEncoder, load_text_encoder
from weights.operations.adapters import LoraAdapter, load_adapter

MODELS = Path(__file__).parents[5] / "infra" / "demo" / "models"
FLUX = {"guidance_scale": 1.0, "true_cfg_scale": 3.0}
SDXL = {"guidance_scale": 4.0}
TEXT_LENGTH = 16


@dataclass
class Demo:
    """A demo model in stock and in the engine, in float32."""

    stock: Any
    ours: DenoisePipeline
    encoders: dict[str, TextEncoder]

    def stock_images(self, request: DiffusionRequest, prompt: str, negative: str | None) -> np.ndarray:
        options: dict[str, Any] = {}
        if type(self.stock).__name__ == "FluxPipeline":
            options = {"true_cfg_scale": request.true_cfg_scale, "max_sequence_length": TEXT_LENGTH}
        images = self.stock(
            prompt,
            negative_prompt=negative,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            num_images_per_prompt=request.num_images,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            **options,
        ).images
        return np.stack([np.asarray(image) for image in images])

    def our_images(
        self,
        request: DiffusionRequest,
        prompt: str,
        negative: str | None,
        adapters: dict[str, LoraAdapter | torch.nn.Module] | None = None,
    ) -> np.ndarray:
        family, index = self.ours.family, self.ours.model_index
        use_negative = family.guidance.uses_negative(request, negative is not None)
        plan = family.texts.plan(index, prompt, negative, max_sequence_length=TEXT_LENGTH, use_negative=use_negative)
        outputs = {}
        for item in plan:
            encoder = self.encoders[item.component]
            [outputs[item]] = encoder.encode(encoder.tokenize([item.text], item.max_length))
        conditioning = family.texts.assemble(index, outputs, use_negative=use_negative)
        return self.ours.generate(request, conditioning, adapters=adapters)


def load_demo(name: str) -> Demo:
    folder = MODELS / name
    index = json.loads((folder / "model_index.json").read_text())
    stock = getattr(diffusers, index["_class_name"]).from_pretrained(folder, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    modules, encoders = {}, {}
    for component in ("transformer", "unet", "vae", "text_encoder", "text_encoder_2"):
        if component not in index:
            continue
        library, class_name = index[component]
        tensors = {}
        for file in (folder / component).glob("*.safetensors"):
            tensors |= {key: tensor.float() for key, tensor in load_file(file).items()}
        arguments = (folder / component, library, class_name)
        if library == "diffusers":
            modules[component] = build_module(library, class_name, folder / component, tensors)
        else:
            tokenizer_folder = folder / component.replace("text_encoder", "tokenizer")
            encoders[component] = load_text_encoder(*arguments, tokenizer_folder, tensors)
    return Demo(stock, create_pipeline(index["_class_name"], folder, modules), encoders)


@pytest.fixture(scope="module")
def demos():
    loaded: dict[str, Demo] = {}

    def load(name: str) -> Demo:
        if name not in loaded:
            loaded[name] = load_demo(name)
        return loaded[name]

    return load


def request(**changes: Any) -> DiffusionRequest:
    values = {"request_id": "r", "width": 32, "height": 32, "num_inference_steps": 4, "guidance_scale": 1.0}
    return DiffusionRequest(**{**values, "seed": 11, "num_images": 2, **changes})


def assert_same_image(ours: np.ndarray, stock: np.ndarray) -> None:
    assert ours.shape == stock.shape
    assert np.abs(ours.astype(int) - stock.astype(int)).max() <= 1


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "guidance"),
    [("digits-flux", FLUX), ("digits-flux-inverted", FLUX), ("digits-sdxl", SDXL)],
)
@pytest.mark.parametrize("negative", [None, "a handwritten eight"])
def test_a_demo_model_equals_stock(demos, name, guidance, negative):
    demo, job = demos(name), request(**guidance)
    prompt = "a handwritten seven"
    ours = demo.our_images(job, prompt, negative)
    assert ours.std() > 10
    assert_same_image(ours, demo.stock_images(job, prompt, negative))


@pytest.mark.drawn
@pytest.mark.parametrize("scale", [0.6, 1.0])
def test_the_bold_lora_equals_stock(demos, scale):
    demo, prompt = demos("digits-flux"), "a handwritten seven"
    bold = load_adapter(MODELS / "bold")
    demo.stock.load_lora_weights(MODELS / "bold", adapter_name="bold")
    try:
        demo.stock.set_adapters("bold", scale)
        job = request(adapters=(AdapterUse("bold", scale),))
        ours = demo.our_images(job, prompt, None, {"bold": bold})
        assert_same_image(ours, demo.stock_images(job, prompt, None))
        assert np.abs(ours.astype(int) - demo.our_images(request(), prompt, None).astype(int)).max() > 4
    finally:
        demo.stock.unload_lora_weights()


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_the_outline_controlnet_equals_stock(demos, scale):
    demo, prompt = demos("digits-flux"), "a handwritten digit"
    net = diffusers.FluxControlNetModel.from_pretrained(MODELS / "outline", torch_dtype=torch.float32)
    outline = Image.new("RGB", (32, 32), "white")
    ImageDraw.Draw(outline).ellipse((9, 4, 23, 28), outline="black")
    ImageDraw.Draw(outline).ellipse((15, 10, 17, 22), outline="black")
    job = request(control=(ControlUse("outline", np.asarray(outline), scale=scale),), num_images=1)
    ours = demo.our_images(job, prompt, None, {"outline": net})
    stock = diffusers.FluxControlNetPipeline(**demo.stock.components, controlnet=net)
    stock.set_progress_bar_config(disable=True)
    image = stock(
        prompt,
        control_image=outline,
        controlnet_conditioning_scale=scale,
        width=job.width,
        height=job.height,
        num_inference_steps=job.num_inference_steps,
        max_sequence_length=TEXT_LENGTH,
        generator=torch.Generator("cpu").manual_seed(job.seed),
    ).images[0]
    assert_same_image(ours, np.asarray(image)[None])
    inside = ours[0, :, :, 0][np.s_[6:26], 11:13]  # of the ring of a zero
    assert scale < 1 or inside.mean() < 80
