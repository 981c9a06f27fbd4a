"""Samplers in the place of the scheduler of a pipeline that diffusers runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.tiny.classes import CASES, assembled
from kit.tiny.clips import wan
from kit.tiny.further import FURTHER_CASES
from kit.tiny.pipelines import PIPELINES, make, saved
from kit.tiny.seeing import SEEING_CASES
from unit.deployments.engines.stock.test_stock_pipelines import PROMPT, load, one_thread, run, split

from configs.options import Sampler
from deployments.engines.records.protocol import EngineError, StockRequest
from deployments.engines.stock.engine import StockEngine
from deployments.workflows.stock_models import STOCK_CLASSES, stock_text

__all__ = ["one_thread"]

ALL = CASES | FURTHER_CASES
FLOWS = ("OvisImagePipeline", "HiDreamImagePipeline")


def request_of(class_name: str, sampler: Sampler, scale: float, **changes: Any) -> StockRequest:
    options = split(class_name, dict(ALL[class_name].options))
    fields = options["fields"] | {
        "num_inference_steps": sampler.num_steps,
        "guidance_scale": scale,
        "negative_prompt": "a dog",
    }
    return replace(StockRequest("r", 3, PROMPT, sampler=sampler, fields=fields, extra=options["extra"]), **changes)


@pytest.mark.parametrize("class_name", [FLOWS[0], pytest.param(FLOWS[1], marks=pytest.mark.long)])
def test_a_sampler_over_a_schedulers_levels_makes_diffusers_image(class_name: str, tmp_path: Path) -> None:
    case = ALL[class_name]
    stock = saved(lambda: assembled(class_name, **case.parts()), tmp_path)
    engine, found = StockEngine(load(tmp_path)), []
    for scale in (1.0, 3.0):
        made = stock(
            prompt=PROMPT,
            **dict(case.options) | {"negative_prompt": "a dog", "guidance_scale": scale},
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(3),
            output_type="np",
        ).images
        levels = tuple(float(sigma) for sigma in stock.scheduler.sigmas)
        request = request_of(class_name, Sampler(name="euler", sigmas=levels), scale)
        found.append(run(engine, replace(request, request_id=f"r{scale}"))[0].images)
        expected = (made * 255).round()
        assert found[-1].shape == expected.shape
        assert np.abs(found[-1] - expected).max() <= 1
    assert (found[0] != found[1]).any() or class_name == "OvisImagePipeline"  # so small, it reads no text
    other = run(engine, request_of(class_name, Sampler(name="dpmpp_2m", sigmas=levels), 3.0))[0]
    twice = run(engine, request_of(class_name, Sampler(name="heun", sigmas=levels), 3.0))[0]
    assert (other.images != found[1]).any()
    assert (twice.images != found[1]).any()
    for changes, shown in [
        ({"sigmas": (0.9, 0.5, 0.0)}, "begins at noise alone"),
        ({"sigmas": (1.0, 0.5)}, "hands over no latents"),
        ({"cfg": 2.0}, "by guidance_scale"),
        *([({"name": "lcm"}, "not in patches")] if class_name == "OvisImagePipeline" else []),
    ]:
        asked = Sampler.model_validate({"name": "euler", "sigmas": levels, **changes})
        with pytest.raises(EngineError, match=shown):
            run(engine, request_of(class_name, asked, 3.0))
    with pytest.raises(EngineError, match="in place of scheduler_options"):
        run(engine, replace(request, scheduler_options={"shift": 2.0}))


@pytest.mark.parametrize(
    "class_name",
    [
        *("Krea2Pipeline", "Lumina2Pipeline"),
        *(pytest.param(one, marks=pytest.mark.long) for one in ("ErnieImagePipeline", "QwenImage21Pipeline")),
    ],
)
def test_the_parameters_of_a_workflow_guide_plainly(class_name: str, tmp_path: Path) -> None:
    """The judge is the formula over what the model gave in diffusers' own run, whose image is that of the engine."""
    rule, cases = STOCK_CLASSES[class_name], ALL | SEEING_CASES
    text, extra = stock_text(f"a painter{rule.parted}{PROMPT}" if rule.parted else PROMPT, rule)
    if class_name in PIPELINES:
        stock = make(class_name, tmp_path)
        sizes = {"height": 32, "width": 32}
    else:
        stock = saved(lambda: assembled(class_name, **cases[class_name].parts()), tmp_path)
        sizes = {name: cases[class_name].options[name] for name in ("height", "width")}
    given: list[torch.Tensor] = []
    guided: list[torch.Tensor] = []
    stock.transformer.register_forward_hook(lambda module, args, output: given.append(output[0]))
    step = stock.scheduler.step

    def watched(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        guided.append(output.clone())
        return step(output, *args, **kwargs)

    stock.scheduler.step = watched
    fields = sizes | {"negative_prompt": "a dog", "num_inference_steps": 2} | rule.scales(3.0, 0.0)
    generator = torch.Generator().manual_seed(3)
    made = stock(prompt=text, **fields, **extra, generator=generator, output_type="np").images
    sign = -1 if class_name == "Lumina2Pipeline" else 1
    for number, found in enumerate(guided):
        if class_name == "ErnieImagePipeline":
            without, with_prompt = given[number].chunk(2)
        else:
            with_prompt, without = (one[:, -found.shape[1] :] for one in given[2 * number : 2 * number + 2])
        assert (with_prompt != without).any()
        torch.testing.assert_close(sign * found, without + 3 * (with_prompt - without), rtol=1e-4, atol=1e-5)
    levels = tuple(float(sigma) for sigma in stock.scheduler.sigmas)
    sampler = Sampler(name="euler", sigmas=levels)
    engine = StockEngine(load(tmp_path))
    images = run(engine, StockRequest("r", 3, text, sampler=sampler, fields=fields, extra=extra))[0].images
    assert images.shape == made.shape  # with the transparency of Qwen-Image 2.1
    assert np.abs(images - (made * 255).round()).max() <= 1


def test_guidance_of_a_patched_model_is_normed_by_its_prompts_own_forward(tmp_path: Path) -> None:
    """The judge is the formula over a loop of diffusers' own modules: lengths are those over the channels."""
    name, scale, strength = "LongCatImagePipeline", 3.0, 0.9
    case = SEEING_CASES[name]
    stock = saved(lambda: assembled(name, **case.parts()), tmp_path)
    given: list[torch.Tensor] = []
    stock.transformer.register_forward_hook(lambda module, args, output: given.append(output[0]))
    number = iter(range(2))

    def normed(output: torch.Tensor, timestep: Any, x: torch.Tensor, **_: Any) -> Any:
        here = next(number)
        level, following = stock.scheduler.sigmas[here : here + 2]
        with_prompt, without = given[-2:]
        clean, bound = (x - level * one for one in (without + scale * (with_prompt - without), with_prompt))
        channels = [one.unflatten(-1, (-1, 4)).norm(dim=2, keepdim=True) for one in (clean, bound)]
        lengths = (channels[1] / (channels[0] + 1e-8)).clamp(0, 1).expand(-1, -1, clean.shape[-1] // 4, -1)
        found = clean * lengths.flatten(2) * strength
        return (x + (x - found) / level * (following - level),)

    stock.scheduler.step = normed
    options = dict(case.options) | {"guidance_scale": scale, "negative_prompt": "a dog", "enable_cfg_renorm": False}
    generator = torch.Generator().manual_seed(3)
    made = stock(prompt=PROMPT, **options, num_inference_steps=2, generator=generator, output_type="np").images
    levels = tuple(float(sigma) for sigma in stock.scheduler.sigmas)
    rule = STOCK_CLASSES[name]
    split_options = split(name, options)
    fields = split_options["fields"] | {"num_inference_steps": 2} | rule.scales(scale, 0.0)
    sampler = Sampler(name="euler", sigmas=levels, cfg_norm=strength)
    request = StockRequest("r", 3, PROMPT, sampler=sampler, fields=fields, extra=dict(rule.options))
    engine = StockEngine(load(tmp_path))
    images = run(engine, request)[0].images
    assert np.abs(images - (made * 255).round()).max() <= 1
    plain = replace(request, request_id="plain", sampler=Sampler(name="euler", sigmas=levels))
    assert (run(engine, plain)[0].images != images).any()


def test_noise_of_steps_is_drawn_from_the_seed_that_follows(tmp_path: Path) -> None:
    case = ALL["HiDreamImagePipeline"]
    stock = saved(lambda: assembled("HiDreamImagePipeline", **case.parts()), tmp_path)
    engine = StockEngine(load(tmp_path))
    stock.scheduler = diffusers.FlowMatchLCMScheduler.from_config(stock.scheduler.config)
    torch.manual_seed(4)  # its steps draw from the global stream
    made = stock(
        prompt=PROMPT,
        **dict(case.options) | {"guidance_scale": 1.0},
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    ).images
    levels = tuple(float(sigma) for sigma in stock.scheduler.sigmas)
    sampler = Sampler(name="lcm", sigmas=levels, noise_seed=3)
    found = run(engine, request_of("HiDreamImagePipeline", sampler, 1.0))[0].images
    assert np.abs(found - (made * 255).round()).max() <= 1


def test_a_model_whose_noise_is_added_takes_no_sampler(tmp_path: Path) -> None:
    name = "StableDiffusionPAGPipeline"
    make(name, tmp_path)
    options = split(name, PIPELINES[name][1])
    request = StockRequest("r", 3, PROMPT, **options, sampler=Sampler(name="euler", sigmas=(14.6, 1.0, 0.0)))
    with pytest.raises(EngineError, match="no flow"):
        run(StockEngine(load(tmp_path)), request)


def wan_of_two() -> Any:
    """Return a tiny Wan 2.2: another denoiser for little noise."""
    pipeline, second = wan(), wan().transformer
    pipeline.register_modules(transformer_2=second)
    pipeline.register_to_config(boundary_ratio=0.9)
    return pipeline


def test_the_second_of_two_denoisers_runs_from_a_step_on(tmp_path: Path) -> None:
    stock = saved(wan_of_two, tmp_path)
    engine, found = StockEngine(load(tmp_path)), {}
    size: dict[str, Any] = {"height": 16, "width": 32, "max_sequence_length": 16}
    for boundary, second_from in ((2.0, 0), (0.8, 2), (0.0, 4)):
        stock.register_to_config(boundary_ratio=boundary)
        generator = torch.Generator().manual_seed(3)
        options: dict[str, Any] = {"guidance_scale": 3.0, "guidance_scale_2": 2.0, "num_frames": 5}
        made = stock(PROMPT, num_inference_steps=4, generator=generator, output_type="np", **size, **options)
        levels = tuple(float(sigma) for sigma in stock.scheduler.sigmas)
        assert int((stock.scheduler.timesteps / 1000 >= boundary).sum()) == second_from
        request = StockRequest(
            f"r{second_from}",
            3,
            PROMPT,
            fields={**size, "num_inference_steps": 4, "guidance_scale": 3.0},
            extra={"num_frames": 5, "guidance_scale_2": 2.0},
            sampler=Sampler(name="euler", sigmas=levels),
            second_from=second_from,
        )
        found[second_from] = run(engine, request)[0].images
        assert np.abs(found[second_from] - (made.frames[0] * 255).round()).max() <= 1
    assert len(found) == 3
    assert len({frames.tobytes() for frames in found.values()}) == 3
    with pytest.raises(EngineError, match="a step of a sampler"):
        run(engine, replace(request, sampler=None))


def test_a_model_with_one_denoiser_has_no_step_of_a_second(tmp_path: Path) -> None:
    saved(wan, tmp_path)
    engine, sampler = StockEngine(load(tmp_path)), Sampler(name="euler", sigmas=(1.0, 0.5, 0.0))
    fields = {"height": 16, "width": 32, "max_sequence_length": 16, "num_inference_steps": 2, "guidance_scale": 1.0}
    request = StockRequest("r", 3, PROMPT, fields=fields, extra={"num_frames": 1}, sampler=sampler, second_from=2)
    assert run(engine, request)[0].images.shape == (1, 16, 32, 3)
    with pytest.raises(EngineError, match="has one denoiser"):
        run(engine, replace(request, request_id="s", second_from=1))
