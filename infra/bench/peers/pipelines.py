"""The part of `infra.bench peers` on whole images, from a prompt to pixels: ours, diffusers, OpenVINO GenAI.

Text encoder, UNet and VAE are Stable Diffusion 1.5's by their configs, with random weights in bfloat16 on all sides.
Noise, solver and token ids are equal; images are compared with those of diffusers in float32.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import diffusers
import numpy as np
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.records.protocol import LAST, DiffusionRequest
from deployments.engines.text.forwards import clip_layer_name, encoder_family_of
from infra.bench.peers.denoisers import GUIDANCE, SCHEDULER, UNET, PlainUNet
from infra.bench.peers.openvino import ONE_THREAD, openvino_module
from infra.bench.peers.settings import OURS, PeersSettings, Took, clocked, rows_of

_TEXT_ENCODER: Final[Mapping[str, Any]] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_VAE: Final[Mapping[str, Any]] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 512,
}
_STEPS: Final = 4
_PROMPT: Final = "an old stone bridge over a river in autumn"
_Image = Callable[[int], Any]  # of a seed: uint8 (H, W, 3)


def measure_image(settings: PeersSettings, folder: Path) -> list[dict[str, Any]]:
    """Make images of few steps with guidance."""
    side_px = settings.sides_px[0]
    exact = _make_stock(settings)
    stock = diffusers.StableDiffusionPipeline(
        **{name: _in_bfloat16(part) for name, part in exact.components.items()}, requires_safety_checker=False
    )
    stock.set_progress_bar_config(disable=True)
    ways: dict[str, _Image] = {
        OURS: _our_way(stock, side_px, folder),
        "diffusers": partial(_stock_image, stock, side_px),
    }
    if genai := openvino_module(settings.judges, "openvino_genai"):
        _write_for_genai(exact, settings, side_px, folder / "genai")
        ways["OpenVINO GenAI"] = _genai_way(genai, side_px, folder / "genai")
    expected = _stock_image(exact, side_px, 0)
    del exact
    beside = {side: f"{_psnr(run(0), expected):.1f} dB" for side, run in ways.items()}  # warms up
    times: dict[str, list[Took]] = {side: [] for side in ways}
    for seed in range(1, settings.slowest_rounds + 1):
        for side, run in ways.items():
            times[side].append(clocked(partial(run, seed))[1])
    return rows_of(f"{_STEPS} steps at {side_px} px", times, beside)


def _make_stock(settings: PeersSettings) -> Any:
    """Return the pipeline in float32, whose weights are bfloat16's."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    text_config = CLIPTextConfig(**{**_TEXT_ENCODER, **settings.text_encoder})
    parts = {
        "text_encoder": CLIPTextModel(text_config),
        "unet": diffusers.UNet2DConditionModel(**{**UNET, **settings.denoiser}),
        "vae": diffusers.AutoencoderKL(**{**_VAE, **settings.vae}),
    }
    for part in parts.values():
        part.eval().requires_grad_(False)
        for weight in part.parameters():
            weight.copy_(weight.bfloat16())
    found = diffusers.StableDiffusionPipeline(
        **parts,
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77),
        scheduler=diffusers.PNDMScheduler(**SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    found.set_progress_bar_config(disable=True)
    return found


def _in_bfloat16(part: Any) -> Any:
    return copy.deepcopy(part).bfloat16() if isinstance(part, torch.nn.Module) else part


def _stock_image(stock: Any, side_px: int, seed: int) -> Any:
    (image,) = stock(
        _PROMPT,
        height=side_px,
        width=side_px,
        num_inference_steps=_STEPS,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return np.round(np.asarray(image, np.float32) * 255).astype(np.uint8)


def _our_way(stock: Any, side_px: int, folder: Path) -> _Image:
    """Return our way around the weights of stock, whose modules stay as they are."""
    modules = {name: _sharing(getattr(stock, name)) for name in ("unet", "vae", "text_encoder")}
    encoder = modules.pop("text_encoder")
    make_batch_invariant(encoder)
    stock.scheduler.save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text('{"scheduler": ["diffusers", "PNDMScheduler"]}')
    return partial(
        _our_image, create_pipeline("StableDiffusionPipeline", folder, modules), encoder, stock.tokenizer, side_px
    )


def _sharing(module: Any) -> Any:
    """Return a module of the same class around the same tensors."""
    kept = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, dict(kept))


def _our_image(pipeline: DenoisePipeline, encoder: Any, tokenizer: Any, side_px: int, seed: int) -> Any:
    family, text = encoder_family_of("CLIPTextModel"), {}
    for name, prompt in (("prompt_embeds", _PROMPT), ("negative_prompt_embeds", "")):
        ids = tokenizer(prompt, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found = family.run(encoder, ids, torch.ones_like(ids), None, (LAST,))
        text[name] = found[clip_layer_name(LAST)]
    state = pipeline.start_request(DiffusionRequest(str(seed), side_px, side_px, _STEPS, GUIDANCE, seed), text)
    while not state.done:
        pipeline.step([state])
    (images,) = pipeline.decode([state])
    if isinstance(images, Exception):
        raise images
    return np.asarray(images)[0]


def _genai_way(genai: Any, side_px: int, folder: Path) -> _Image:
    pipeline = genai.Text2ImagePipeline(str(folder))
    pipeline.reshape(1, side_px, side_px, GUIDANCE)
    pipeline.compile("CPU", **ONE_THREAD, INFERENCE_PRECISION_HINT="bf16")

    def run(seed: int) -> Any:
        found = pipeline.generate(
            _PROMPT,
            height=side_px,
            width=side_px,
            num_inference_steps=_STEPS,
            guidance_scale=GUIDANCE,
            generator=genai.TorchGenerator(seed),
        )
        return np.array(found.data)[0]

    return run


def _write_for_genai(stock: Any, settings: PeersSettings, side_px: int, folder: Path) -> None:
    """Write the folder of OpenVINO's own form that its image pipeline reads."""
    openvino: Any = openvino_module(settings.judges)
    convert_tokenizer = openvino_module(settings.judges, "openvino_tokenizers").convert_tokenizer
    latents_px = side_px // 2 ** (len(stock.vae.config.block_out_channels) - 1)
    ids = torch.zeros(1, 77, dtype=torch.long)
    latents = torch.randn(2, 4, latents_px, latents_px)
    states = torch.randn(2, 77, stock.unet.config.cross_attention_dim)
    made = {
        "text_encoder": (_PlainClip(stock.text_encoder), (ids,), ["input_ids"], "last_hidden_state"),
        "unet": (
            PlainUNet(stock.unet),
            (latents, torch.tensor([1]), states),
            ["sample", "timestep", "encoder_hidden_states"],
            "out_sample",
        ),
        "vae_decoder": (_PlainVae(stock.vae), (latents[:1],), ["latent_sample"], "sample"),
    }
    for name, (module, given, inputs, output) in made.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tracer
            model = openvino.convert_model(module, example_input=given)
        for place, input_name in enumerate(inputs):
            model.input(place).set_names({input_name})
        model.output(0).set_names({output})
        (folder / name).mkdir(parents=True)
        openvino.save_model(model, folder / name / "openvino_model.xml")
        part = stock.vae if name == "vae_decoder" else getattr(stock, name)
        config = part.config.to_dict() if name == "text_encoder" else dict(part.config)
        (folder / name / "config.json").write_text(json.dumps(config, default=str))
    openvino.save_model(convert_tokenizer(stock.tokenizer), folder / "tokenizer/openvino_tokenizer.xml")
    (folder / "tokenizer/tokenizer_config.json").write_text('{"pad_token_id": 1, "model_max_length": 77}')
    stock.scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))


class _PlainClip(torch.nn.Module):
    """A text encoder whose output is one tensor, for tracing."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self._clip = clip

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self._clip(input_ids).last_hidden_state
        return vectors


class _PlainVae(torch.nn.Module):
    """A VAE's decoder whose output is one tensor, for tracing."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self._vae = vae

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        pixels: torch.Tensor = self._vae.decode(latents, return_dict=False)[0]
        return pixels


def _psnr(image: Any, expected: Any) -> float:
    error = float(np.square(image.astype(np.float32) - expected.astype(np.float32)).mean())
    return 10 * math.log10(255**2 / max(error, 1e-9))
