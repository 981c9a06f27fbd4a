"""Pipelines whose prompts a language model reads, twice: as stock has them, and as replicas build them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from safetensors.torch import load_file

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.families import family_of
from deployments.engines.diffusion.families.texts import EncodeItem
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.records.protocol import DiffusionRequest
from deployments.engines.text.encoder import TextEncoder, load_text_encoder
from deployments.modules.encoders import PipelineProcessors

Image = npt.NDArray[np.uint8]


def create_ours(class_name: str, folder: Path) -> DenoisePipeline:
    """Return the denoise loop over the parts of a folder."""
    modules = {}
    for name in ("transformer", "vae"):
        tensors = load_file(folder / name / "diffusion_pytorch_model.safetensors")
        modules[name] = build_module("diffusers", None, folder / name, tensors)
    return create_pipeline(class_name, folder, modules)


class ReaderPair:
    """The same pipeline twice: stock's object, which was saved as `folder`, and the parts that replicas build of it."""

    def __init__(self, stock: Any, folder: Path) -> None:
        self.class_name, self.stock, self.folder = type(stock).__name__, stock, folder
        self.family = family_of(self.class_name)
        self.ours = create_ours(self.class_name, folder)
        encoder, tokenizer = folder / "text_encoder", folder / "tokenizer"
        name, tensors = type(stock.text_encoder).__name__, load_file(encoder / "model.safetensors")
        self.encoder: TextEncoder = load_text_encoder(encoder, "transformers", name, tokenizer, tensors)
        self.readers = PipelineProcessors()

    def conditioning(
        self, request: DiffusionRequest, prompt: str, negative: str | None, **options: Any
    ) -> dict[str, torch.Tensor]:
        guides = self.family.guidance.uses_negative(request, negative is not None)
        plan = self.family.texts.plan({}, prompt, negative, use_negative=guides, **options)
        outputs = dict(zip(plan, self.encode(plan, request.references), strict=True))
        return self.family.texts.assemble({}, outputs, use_negative=guides)

    def encode(self, plan: Sequence[EncodeItem], references: Sequence[Image] = ()) -> list[dict[str, torch.Tensor]]:
        seen = [self.family.references.seen(image) for image in references]
        images = self.readers.read(self.folder, self.encoder.module.config, seen) if seen else ()
        texts = [self.encoder.tokenize([item.text], item.max_length, form=item.form, images=images)[0] for item in plan]
        return self.encoder.encode(texts)

    def stock_run(
        self, request: DiffusionRequest, prompt: str, negative: str | None, class_: Any = None, **options: Any
    ) -> tuple[torch.Tensor, Image]:
        """Return the latents and the images that stock makes of a request, by a class over the same parts."""
        latents = []

        def note(_: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            latents.append(tensors["latents"])
            return {}

        stock = self.stock if class_ is None else class_(**self.stock.components)
        stock.set_progress_bar_config(disable=True)
        if "true_cfg_scale" in (takes := inspect.signature(stock.__call__).parameters):
            options["true_cfg_scale"] = request.true_cfg_scale
        else:
            options["guidance_scale"] = request.guidance_scale
        if "negative_prompt" in takes:
            options["negative_prompt"] = negative
        if request.references:
            images = [PIL.Image.fromarray(image) for image in request.references]
            options["image"] = images if self.family.references.most > 1 else images[0]
        made = stock(
            prompt=prompt,
            height=request.height,
            width=request.width,
            num_inference_steps=request.num_inference_steps,
            num_images_per_prompt=request.num_images,
            generator=torch.Generator().manual_seed(request.seed),
            callback_on_step_end=note,
            **options,
        ).images
        return latents[-1], np.stack([np.asarray(image) for image in made])

    def assert_equal_to_stock(self, state: Any, stock: tuple[torch.Tensor, Image]) -> None:
        """Run a request to its end, and compare it with what stock made of it."""
        while not state.done:
            self.ours.step([state])
        latents, images = stock
        assert (state.latents - latents).abs().max() <= 3e-5 * max(1.0, float(latents.abs().max()))
        (decoded,) = self.ours.decode([state])
        assert isinstance(decoded, np.ndarray), decoded
        assert decoded.shape == images.shape
        assert np.abs(decoded.astype(int) - images.astype(int)).max() <= 1
