"""The parts of `infra.bench peers` on images: a UNet's step, a whole image, and steps that are extrapolated.

UNet, VAE and text encoder are Stable Diffusion 1.5's by their configs, with random weights in bfloat16 on all sides;
accuracy is beside float32. Extrapolated steps are those of the demo's Flux.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import diffusers
import numpy as np
import torch

from configs.options import Acceleration
from deployments.engines.diffusion.pipeline import DenoisePipeline, create_pipeline
from deployments.engines.diffusion.state import DenoiseState
from deployments.engines.records.protocol import DiffusionRequest
from infra.bench.peers.openvino import compiled_model
from infra.bench.peers.settings import OURS, PeersSettings, Took, clocked, rows_of

MODELS: Final = Path(__file__).parents[2] / "demo/models"
UNET: Final[Mapping[str, Any]] = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
SCHEDULER: Final[Mapping[str, Any]] = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "skip_prk_steps": True,
    "steps_offset": 1,
}
_VAE: Final[Mapping[str, Any]] = {  # of the smallest kind: a step's timing has no decode
    "block_out_channels": (32,) * 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 4,
}
GUIDANCE: Final = 7.5
_NUM_TOKENS: Final = 77
_STEPS: Final = 20
_RULES: Final[Mapping[str, Acceleration | None]] = {
    "all steps": None,
    "interval 2": Acceleration(interval=2, order=1, warmup=3),
    "interval 3": Acceleration(interval=3, order=1, warmup=3),
}
_DIGITS: Final = ("three", "five", "eight")


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of one call of a denoiser, and its output."""

    arguments: tuple[torch.Tensor, ...]
    output: torch.Tensor


def measure_unet(settings: PeersSettings, folder: Path) -> list[dict[str, Any]]:
    """Measure a step with guidance, which is one forward of two rows, at each size."""
    exact = diffusers.UNet2DConditionModel(**{**UNET, **settings.denoiser}).eval().requires_grad_(False)
    for weight in exact.parameters():
        weight.copy_(weight.bfloat16())
    stock = copy.deepcopy(exact).bfloat16()
    ours = _pipeline(stock, folder)
    rows = []
    for side_px in settings.sides_px:
        call = _call_of(ours, side_px)
        compiled = compiled_model(settings.judges, partial(_converted, exact, call), "bf16")
        rows += _measure_step(settings, side_px, ours, call, {"diffusers": stock}, exact, compiled)
        del compiled
    return rows


def _measure_step(
    settings: PeersSettings,
    side_px: int,
    ours: DenoisePipeline,
    call: _Call,
    stock: Mapping[str, Any],
    exact: Any,
    compiled: Any,
) -> list[dict[str, Any]]:
    wide = tuple(one.float() if one.is_floating_point() else one for one in call.arguments)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(_noise, unet, call.arguments) for name, unet in stock.items()
    }
    if compiled is not None:
        given = [one.numpy() for one in wide]
        ways["OpenVINO"] = lambda: torch.from_numpy(compiled(given)[0].copy())
    with torch.no_grad():
        expected = exact(*wide, return_dict=False)[0]
        outputs = {OURS: call.output} | {name: run() for name, run in ways.items()}
        times: dict[str, list[Took]] = {OURS: [], **{name: [] for name in ways}}
        for seed in range(settings.slow_rounds):
            state = _start(ours, side_px, seed)
            times[OURS].append(clocked(partial(ours.step, [state]))[1])
            for name, run in ways.items():
                times[name].append(clocked(run)[1])
    beside = {name: f"1 - cosine {1 - _cosine(found, expected):.1e}" for name, found in outputs.items()}
    return rows_of(f"UNet at {side_px} px, with guidance", times, beside)


def _noise(unet: Any, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = unet(*arguments, return_dict=False)[0]
    return found


def _pipeline(stock: Any, folder: Path) -> DenoisePipeline:
    """Return our pipeline around the weights of a UNet, in a module of its own."""
    with torch.device("meta"):
        own = diffusers.UNet2DConditionModel(**stock.config)
    own.load_state_dict(stock.state_dict(), assign=True)
    diffusers.PNDMScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text('{"scheduler": ["diffusers", "PNDMScheduler"]}')
    vae = diffusers.AutoencoderKL(**_VAE).eval().bfloat16()
    modules = {"unet": own.eval().requires_grad_(False), "vae": vae}
    return create_pipeline("StableDiffusionPipeline", folder, modules)


def _start(pipeline: DenoisePipeline, side_px: int, seed: int) -> DenoiseState:
    width = pipeline.denoiser.config.cross_attention_dim
    generator = torch.Generator().manual_seed(seed)
    names = ("prompt_embeds", "negative_prompt_embeds")
    text = {name: torch.randn(1, _NUM_TOKENS, width, generator=generator).bfloat16() for name in names}
    request = DiffusionRequest(str(seed), side_px, side_px, 4, GUIDANCE, seed)
    return pipeline.start_request(request, text)


def _call_of(pipeline: DenoisePipeline, side_px: int) -> _Call:
    """Return the call of the denoiser in our first step at a size."""
    seen: list[_Call] = []

    def note(module: Any, arguments: Any, given: Mapping[str, Any], output: Any) -> None:
        latents, timesteps = arguments
        seen.append(_Call((latents, timesteps, given["encoder_hidden_states"]), output[0]))

    hook = pipeline.denoiser.register_forward_hook(note, with_kwargs=True)
    try:
        pipeline.step([_start(pipeline, side_px, 0)])
    finally:
        hook.remove()
    return seen[0]


def _converted(exact: Any, call: _Call, openvino: Any) -> Any:
    given = tuple(one.float() if one.is_floating_point() else one for one in call.arguments)
    shapes = [tuple(one.shape) for one in given]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer
        return openvino.convert_model(PlainUNet(exact), example_input=given, input=shapes)


class PlainUNet(torch.nn.Module):
    """A denoiser whose output is one tensor, for tracing."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self._unet = unet

    def forward(self, latents: torch.Tensor, timesteps: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        noise: torch.Tensor = self._unet(latents, timesteps, encoder_hidden_states=prompts, return_dict=False)[0]
        return noise


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


def measure_steps(settings: PeersSettings) -> list[dict[str, Any]]:
    """Measure the demo's Flux by 20 steps, and with steps extrapolated: ours, and diffusers' TaylorSeer (lite)."""
    stock = diffusers.FluxPipeline.from_pretrained(MODELS / "digits-flux", dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    modules = {name: copy.deepcopy(getattr(stock, name)) for name in ("transformer", "vae")}
    ours = create_pipeline("FluxPipeline", MODELS / "digits-flux", modules)
    times: dict[str, dict[str, list[Took]]] = {way: {OURS: [], "diffusers": []} for way in _RULES}
    errors: dict[str, dict[str, list[float]]] = {way: {OURS: [], "diffusers": []} for way in _RULES}
    rounds = [(digit, seed) for seed in range(settings.rounds) for digit in _DIGITS]
    for round_, (digit, seed) in enumerate([rounds[0], *rounds]):  # the first one warms up
        text = _encoded(stock, f"a handwritten {digit}")
        whole: dict[str, Any] = {}
        for way, rule in _RULES.items():
            images = {
                OURS: clocked(partial(_our_image, ours, text, seed, rule)),
                "diffusers": clocked(partial(_stock_image, stock, text, seed, rule)),
            }
            for side, (image, took) in images.items():
                error = float(np.square(image - whole.setdefault(side, image)).mean())
                times[way][side] += [took] if round_ else []
                errors[way][side] += [error] if round_ else []
    return [row for rows in _speeds(times, errors) for row in rows]


def _speeds(
    times: Mapping[str, Mapping[str, Sequence[Took]]], errors: Mapping[str, Mapping[str, Sequence[float]]]
) -> Iterator[list[dict[str, Any]]]:
    whole = {side: statistics.median(one.cpu_s for one in took) for side, took in times["all steps"].items()}
    for way, by_side in times.items():
        rows = rows_of(f"{_STEPS} steps, {way}", by_side)
        for row in rows if way != "all steps" else []:
            speed = whole[row["side"]] * 1e3 / row["cpu_ms"]
            found = errors[way][row["side"]]
            psnr = statistics.mean(10 * math.log10(1 / max(error, 1e-12)) for error in found)
            row["beside"] = f"{speed:.2f} x its own speed at {psnr:.1f} dB"
        yield rows


def _encoded(stock: Any, prompt: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        prompt_embeds, pooled, _ = stock.encode_prompt(prompt, prompt_2=None, max_sequence_length=16)
    return {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled}


def _our_image(
    pipeline: DenoisePipeline, text: Mapping[str, torch.Tensor], seed: int, rule: Acceleration | None
) -> Any:
    """Return an image from 0 to 1."""
    request = DiffusionRequest(str(seed), 32, 32, _STEPS, 3.5, seed, acceleration=rule)
    state = pipeline.start_request(request, text)
    while not state.done:
        pipeline.step([state])
    (image,) = pipeline.decode([state])
    return np.asarray(image, np.float32) / 255


def _stock_image(stock: Any, text: Mapping[str, torch.Tensor], seed: int, rule: Acceleration | None) -> Any:
    if rule is not None:
        config = diffusers.TaylorSeerCacheConfig(
            cache_interval=rule.interval,
            disable_cache_before_step=rule.warmup,
            max_order=rule.order,
            taylor_factors_dtype=torch.float32,
            use_lite_mode=True,
        )
        stock.transformer.enable_cache(config)
    try:
        found = stock(
            **text,
            height=32,
            width=32,
            num_inference_steps=_STEPS,
            guidance_scale=3.5,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images
    finally:
        if rule is not None:
            stock.transformer.disable_cache()
    return np.round(np.asarray(found, np.float32) * 255) / 255
