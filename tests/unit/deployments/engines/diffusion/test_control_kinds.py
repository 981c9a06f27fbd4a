"""Unions of ControlNets and T2I-Adapters give the images of the stock pipelines, and share forwards."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from kit.tiny.parts import random_vae, unet
from PIL import Image
from safetensors.torch import save_file
from unit.deployments.engines.diffusion.control_nets import control_xs, controlnet, flux_union, t2i_adapter, union

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.families.unet_controls import adapter_features, why_unlike_adapter
from deployments.engines.diffusion.rows import batch_key, parts_of
from deployments.engines.records.protocol import ControlUse, EngineError
from weights.formats.control_files import read_control_file
from weights.operations.base_pipeline import open_base


def image_of(seed: int = 0, side: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def outputs(cls: Any, pair: Any, beside: dict[str, Any], request: Any, conditioning: Any, **call: Any) -> Any:
    """Return the latents and the images of a stock pipeline with more parts than `pair.stock` has."""
    takes = inspect.signature(cls.__init__).parameters
    parts = {name: part for name, part in pair.stock.components.items() if name in takes}
    options = {"requires_safety_checker": False, "add_watermarker": False}
    pipeline = cls(**parts, **beside, **{name: value for name, value in options.items() if name in takes})
    pipeline.set_progress_bar_config(disable=True)
    latents: list[torch.Tensor] = []
    if "callback_on_step_end" in inspect.signature(cls.__call__).parameters:
        call["callback_on_step_end"] = lambda _, step, time, tensors: latents.append(tensors["latents"]) or {}
    else:
        call |= {"callback": lambda step, time, tensor: latents.append(tensor), "callback_steps": 1}
    images = pipeline(
        **pair.stock_texts(request, conditioning),
        **call,
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pil",
    ).images
    return latents[-1], np.stack([np.asarray(image) for image in images])


def changes_the_image(pair: Any, ours: np.ndarray, request: Any, conditioning: Any) -> bool:
    plain = pair.ours.generate(request, conditioning)
    return bool(np.abs(ours[0].astype(int) - plain[0].astype(int)).max() > 4)


def in_turns(pair: Any, requests: list[Any], known: dict[str, Any], conditioning: Any) -> None:
    """Check that requests have the same latents together and alone."""

    def finished(chosen: list[Any]) -> list[torch.Tensor]:
        states = [pair.ours.start_request(request, conditioning, known) for request in chosen]
        while any(not state.done for state in states):
            pair.ours.step(states)
        return [state.latents for state in states]

    for request, together in zip(requests, finished(requests), strict=True):
        [alone] = finished([request])
        assert torch.equal(together, alone)


@pytest.mark.drawn
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_union_equals_stock(sdxl: Any, make_request: Any, equals_stock: Any, guidance: float) -> None:
    net = union(sdxl.ours.denoiser)
    request = make_request(
        control=(ControlUse("a", image_of(), 0.8, end=0.7, mode=2),), guidance_scale=guidance, num_images=2
    )
    conditioning = sdxl.conditioning(negative=True)
    stock = outputs(
        diffusers.StableDiffusionXLControlNetUnionPipeline,
        sdxl,
        {"controlnet": net},
        request,
        conditioning,
        control_image=[Image.fromarray(request.control[0].image)],
        control_mode=[2],
        controlnet_conditioning_scale=0.8,
        control_guidance_end=0.7,
    )
    ours = equals_stock(sdxl.ours, request, conditioning, stock, {"a": net})
    assert changes_the_image(sdxl, ours, make_request(guidance_scale=guidance, num_images=2), conditioning)


def test_two_modes_of_a_union_equal_stocks_of_two_unions(sdxl: Any, make_request: Any, equals_stock: Any) -> None:
    net = union(sdxl.ours.denoiser)
    uses = (ControlUse("a", image_of(1), 0.7, mode=0), ControlUse("a", image_of(2), 0.9, mode=1))
    request = make_request(control=uses, guidance_scale=2.0, num_images=1)
    conditioning = sdxl.conditioning(negative=True)
    stock = outputs(
        diffusers.StableDiffusionXLControlNetUnionPipeline,
        sdxl,
        {"controlnet": [net, net]},
        request,
        conditioning,
        control_image=[Image.fromarray(use.image) for use in uses],
        control_mode=[0, 1],
        controlnet_conditioning_scale=[0.7, 0.9],
        control_guidance_start=[0.0, 0.0],
        control_guidance_end=[1.0, 1.0],
    )
    equals_stock(sdxl.ours, request, conditioning, stock, {"a": net})


@pytest.mark.parametrize("num_single", [0, 1])
def test_a_union_of_flux_equals_stock(flux: Any, make_request: Any, equals_stock: Any, num_single: int) -> None:
    net = flux_union(flux.ours.denoiser, num_single_layers=num_single)
    request = make_request(control=(ControlUse("a", image_of(), 0.8, mode=1),), guidance_scale=3.5, num_images=1)
    conditioning = flux.conditioning()
    stock = outputs(
        diffusers.FluxControlNetPipeline,
        flux,
        {"controlnet": net},
        request,
        conditioning,
        control_image=Image.fromarray(request.control[0].image),
        control_mode=1,
        controlnet_conditioning_scale=0.8,
    )
    equals_stock(flux.ours, request, conditioning, stock, {"a": net})


def two_layered(pair: Any, folder: Path) -> Any:
    """Return a pipeline whose UNet has two layers in each block, as a ControlNet-XS has them."""
    from unit.deployments.engines.diffusion.conftest import Pair, load_ours

    torch.manual_seed(0)
    config = {key: one for key, one in dict(pair.ours.denoiser.config).items() if not key.startswith("_")}
    model = diffusers.UNet2DConditionModel(**config | {"layers_per_block": 2}).eval()
    parts = {name: part for name, part in pair.stock.components.items() if name != "unet"}
    takes = inspect.signature(type(pair.stock).__init__).parameters
    options = {"requires_safety_checker": False} if "requires_safety_checker" in takes else {}
    stock = type(pair.stock)(**parts, unet=model, **options)
    stock.set_progress_bar_config(disable=True)
    stock.save_pretrained(folder)
    return Pair(stock, load_ours(folder, type(stock).__name__, "unet"), folder, pair.conditioning)


XS_PIPELINES = {
    "stable_diffusion": diffusers.StableDiffusionControlNetXSPipeline,
    "sdxl": diffusers.StableDiffusionXLControlNetXSPipeline,
}
XS_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own times": {"learn_time_embedding": True, "time_embedding_mix": 0.7, "conditioning_channel_order": "bgr"},
}


@pytest.mark.drawn(over="kind")
@pytest.mark.parametrize("kind", list(XS_KINDS))
@pytest.mark.parametrize("family", list(XS_PIPELINES))
def test_a_controlnet_xs_equals_stock(
    request: pytest.FixtureRequest, make_request: Any, equals_stock: Any, tmp_path: Path, family: str, kind: str
) -> None:
    pair = two_layered(request.getfixturevalue(family), tmp_path)
    net = control_xs(pair.ours.denoiser, **XS_KINDS[kind])
    asked = make_request(
        control=(ControlUse("a", image_of(), 0.8, start=0.2, end=0.8),),
        guidance_scale=3.0,
        num_inference_steps=5,
        num_images=2,
    )
    conditioning = pair.conditioning(negative=True)
    stock = outputs(
        XS_PIPELINES[family],
        pair,
        {"controlnet": net},
        asked,
        conditioning,
        image=Image.fromarray(asked.control[0].image),
        controlnet_conditioning_scale=0.8,
        control_guidance_start=0.2,
        control_guidance_end=0.8,
    )
    ours = equals_stock(pair.ours, asked, conditioning, stock, {"a": net})
    plain = make_request(guidance_scale=3.0, num_inference_steps=5, num_images=2)
    assert changes_the_image(pair, ours, plain, conditioning)


def test_requests_with_and_without_a_controlnet_xs_share_turns(sdxl: Any, make_request: Any, tmp_path: Path) -> None:
    pair = two_layered(sdxl, tmp_path)
    # Products of 8 numbers and fewer take no kernel of ours, whose rows are alike in any batch.
    known = {
        "x": control_xs(pair.ours.denoiser, size_ratio=1.0, learn_time_embedding=True),
        "c": controlnet(pair.ours.denoiser),
    }
    requests = [
        make_request(control=(ControlUse("x", image_of(1), 0.8),), guidance_scale=2.0),
        make_request(control=(ControlUse("x", image_of(2), 0.3),), seed=7),
        make_request(control=(ControlUse("c", image_of(3)), ControlUse("x", image_of(2), 0.3))),
        make_request(control=(ControlUse("c", image_of(3)),)),
        make_request(),
    ]
    in_turns(pair, requests, known, pair.conditioning(negative=True))
    twice = make_request(control=(ControlUse("x", image_of(1)), ControlUse("x", image_of(2))))
    with pytest.raises(EngineError, match="more than one ControlNet-XS"):
        pair.ours.start_request(twice, pair.conditioning(), known)
    other = control_xs(pair.ours.denoiser)
    with pytest.raises(EngineError, match=r"is for a UNet with layers_per_block 2, and the model has 1"):
        sdxl.ours.start_request(make_request(control=(ControlUse("x", image_of()),)), sdxl.conditioning(), {"x": other})


def deep_stable_diffusion(pair: Any, folder: Path) -> Any:
    """Three blocks, of which a light T2I-Adapter makes the last two of one width."""
    from unit.deployments.engines.diffusion.conftest import Pair, load_ours

    torch.manual_seed(0)
    model = unet(
        block_out_channels=(8, 16, 16),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12,
    ).eval()
    parts = {name: part for name, part in pair.stock.components.items() if name not in ("unet", "vae")}
    vae = random_vae(shift_factor=None)
    stock = diffusers.StableDiffusionPipeline(**parts, unet=model, vae=vae, requires_safety_checker=False)
    stock.set_progress_bar_config(disable=True)
    stock.save_pretrained(folder)
    return Pair(stock, load_ours(folder, "StableDiffusionPipeline", "unet"), folder, pair.conditioning)


ADAPTERS = {
    "full": ("full_adapter", (8, 16), {}),
    "gray": ("full_adapter", (8, 16), {"in_channels": 1}),
    "light": ("light_adapter", (8, 16), {}),
    "xl": ("full_adapter_xl", (8, 16), {}),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", list(ADAPTERS))
def test_a_t2i_adapter_equals_stock(
    sdxl: Any, stable_diffusion: Any, make_request: Any, equals_stock: Any, tmp_path: Path, name: str
) -> None:
    kind, channels, more = ADAPTERS[name]
    adapter = t2i_adapter(kind, channels, **more)
    pair = {"xl": sdxl}.get(name, stable_diffusion)
    if name == "light":
        pair = deep_stable_diffusion(stable_diffusion, tmp_path)
    cls = diffusers.StableDiffusionXLAdapterPipeline if name == "xl" else diffusers.StableDiffusionAdapterPipeline
    end = 0.6 if name == "xl" else 1.0
    request = make_request(
        control=(ControlUse("a", image_of(), 0.9, end=end),), guidance_scale=3.0, num_inference_steps=5, num_images=2
    )
    conditioning = pair.conditioning(negative=True)
    given = Image.fromarray(request.control[0].image).convert("L" if name == "gray" else "RGB")
    call = {"adapter_conditioning_factor": end} if name == "xl" else {}
    stock = outputs(
        cls, pair, {"adapter": adapter}, request, conditioning, image=given, adapter_conditioning_scale=0.9, **call
    )
    ours = equals_stock(pair.ours, request, conditioning, stock, {"a": adapter})
    plain = make_request(guidance_scale=3.0, num_inference_steps=5, num_images=2)
    assert changes_the_image(pair, ours, plain, conditioning)


def test_two_t2i_adapters_equal_stock(stable_diffusion: Any, make_request: Any, equals_stock: Any) -> None:
    known = {name: t2i_adapter("full_adapter", (8, 16), seed) for seed, name in enumerate("ab")}
    uses = (ControlUse("a", image_of(1), 0.7), ControlUse("b", image_of(2), 0.4))
    request = make_request(control=uses, guidance_scale=3.0, num_images=1)
    conditioning = stable_diffusion.conditioning(negative=True)
    stock = outputs(
        diffusers.StableDiffusionAdapterPipeline,
        stable_diffusion,
        {"adapter": list(known.values())},
        request,
        conditioning,
        image=[Image.fromarray(use.image) for use in uses],
        adapter_conditioning_scale=[0.7, 0.4],
    )
    equals_stock(stable_diffusion.ours, request, conditioning, stock, known)


def test_requests_of_other_modes_and_images_share_a_forward(sdxl: Any, flux: Any, make_request: Any) -> None:
    for pair, net in ((sdxl, union(sdxl.ours.denoiser)), (flux, flux_union(flux.ours.denoiser))):
        requests = [
            make_request(control=(ControlUse("a", image_of(mode), 1.2, mode=mode),), seed=mode, num_images=1)
            for mode in range(3)
        ]
        states = [pair.ours.start_request(one, pair.conditioning(), {"a": net}) for one in requests]
        assert len({batch_key(part) for part in parts_of(states)}) == 1
        in_turns(pair, [*requests, make_request(num_images=1)], {"a": net}, pair.conditioning())


def test_t2i_adapters_and_controlnets_share_forwards(sdxl: Any, make_request: Any) -> None:
    known = {"t": t2i_adapter("full_adapter_xl", (8, 16)), "c": controlnet(sdxl.ours.denoiser)}
    requests = [
        make_request(control=(ControlUse("t", image_of(1), 0.8),), guidance_scale=2.0),
        make_request(control=(ControlUse("t", image_of(2), 0.3),), seed=7),
        make_request(control=(ControlUse("t", image_of(2)), ControlUse("c", image_of(3)))),
        make_request(control=(ControlUse("c", image_of(3)),)),
        make_request(),
    ]
    in_turns(sdxl, requests, known, sdxl.conditioning(negative=True))


def test_what_a_mode_and_an_adapter_have_to_be(sdxl: Any, stable_diffusion: Any, flux: Any, make_request: Any) -> None:
    nets = {
        "u": union(sdxl.ours.denoiser),
        "c": controlnet(sdxl.ours.denoiser),
        "xl": t2i_adapter("full_adapter_xl", (8, 16)),
        "full": t2i_adapter("full_adapter", (8, 16)),
        "two": t2i_adapter("full_adapter", (8, 16), in_channels=2),
    }
    cases = [
        (sdxl, ControlUse("u", image_of()), "'u' is a union of 3 ControlNets, asked without a mode: expected one of 0"),
        (sdxl, ControlUse("u", image_of(), mode=3), "asked with mode 3: expected one of 0 to 2"),
        (sdxl, ControlUse("c", image_of(), mode=1), "'c' is no union of ControlNets, and has no mode 1"),
        (sdxl, ControlUse("full", image_of()), "8 channels per 2 pixels, 16 channels per 4 pixels, and the model"),
        (stable_diffusion, ControlUse("xl", image_of()), "makes features of 8 channels per 4 pixels"),
        (stable_diffusion, ControlUse("two", image_of()), "reads images of 2 channels"),
        (flux, ControlUse("xl", image_of()), "is a T2IAdapter, and FluxPipeline takes a FluxControlNetModel"),
    ]
    for pair, use, message in cases:
        with pytest.raises(EngineError, match=message):
            pair.ours.start_request(make_request(control=(use,)), pair.conditioning(), nets)


def test_a_t2i_adapter_says_which_sides_it_reads() -> None:
    adapter = t2i_adapter("full_adapter_xl", (8, 16), downscale_factor=16)
    with pytest.raises(EngineError, match="reads sides of a multiple of 16, got 40x32"):
        adapter_features(adapter, torch.zeros(1, 3, 32, 40))
    num_rows: list[int] = []
    adapter.register_forward_pre_hook(lambda _, inputs: num_rows.append(len(inputs[0])))
    assert [tuple(one.shape) for one in adapter_features(adapter, torch.zeros(3, 3, 32, 48))] == [
        (3, 8, 2, 3),
        (3, 16, 2, 3),
    ]
    assert num_rows == [1]  # once for all


def read_back(tensors: dict[str, torch.Tensor], folder: Path, base: Path) -> torch.nn.Module:
    """Return the module that a single file becomes, for a pipeline in a folder."""
    folder.mkdir()
    save_file({name: one.contiguous().clone() for name, one in tensors.items()}, folder / "control.safetensors")
    checkpoint = read_control_file(folder / "control.safetensors", open_base(base, None))
    (part,) = checkpoint.components
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    read = {
        name: torch.frombuffer(bytearray(one.read()), dtype=torch.float32).view(one.shape)
        for name, one in part.tensors.items()
    }
    return build_module(part.library, part.class_name, folder, read)


def of_original_code(adapter: Any, num_blocks: int = 2) -> dict[str, torch.Tensor]:
    """A T2I-Adapter in the names of TencentARC's code: blocks in one row, or in groups for a light one."""
    is_light = adapter.config.adapter_type == "light_adapter"
    found = {}
    for key, one in adapter.state_dict().items():
        name = key.removeprefix("adapter.")
        match = re.match(r"body\.(\d+)\.(?:resnets\.(\d+)\.)?(.+)", name)
        if match and is_light:
            name = name.replace(".resnets.", ".body.")
        elif match:
            name = f"body.{num_blocks * int(match[1]) + int(match[2] or 0)}.{match[3]}"
        found[name] = one
    return found


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["full", "gray", "light"])
@pytest.mark.parametrize("is_original", [True, False])
def test_a_t2i_adapter_of_stable_diffusion_is_read_from_one_file(
    stable_diffusion: Any, tmp_path: Path, name: str, is_original: bool
) -> None:
    kind, channels, more = ADAPTERS[name]
    adapter = t2i_adapter(kind, channels, **more)
    pair = deep_stable_diffusion(stable_diffusion, tmp_path / "pair") if name == "light" else stable_diffusion
    tensors = of_original_code(adapter) if is_original else adapter.state_dict()
    read: Any = read_back(tensors, tmp_path / "read", pair.folder)
    keys = ("adapter_type", "channels", "in_channels", "num_res_blocks", "downscale_factor")
    assert {key: read.config[key] for key in keys} == {key: adapter.config[key] for key in keys}
    image = torch.rand(1, adapter.config.in_channels, 32, 32)
    for ours, stock in zip(read(image), adapter(image), strict=True):
        assert torch.equal(ours, stock)


@pytest.mark.drawn
@pytest.mark.parametrize(("family", "make"), [("stable_diffusion", controlnet), ("sdxl", controlnet), ("sdxl", union)])
def test_a_controlnet_in_one_file_is_read_by_the_config_of_its_base(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, make: Any
) -> None:
    pair = request.getfixturevalue(family)
    net = make(pair.ours.denoiser)
    read: Any = read_back(net.state_dict(), tmp_path / "read", pair.folder)
    assert type(read) is type(net)
    assert {key: value for key, value in read.config.items() if not key.startswith("_")}.keys() == {
        key for key in net.config if not key.startswith("_")
    }
    for key, value in net.config.items():
        if not key.startswith("_") and key != "num_attention_heads":
            assert np.all(np.asarray(read.config[key]) == np.asarray(value)), key  # one number may stand for a list
    for key, one in net.state_dict().items():
        assert torch.equal(read.state_dict()[key], one)


def test_published_t2i_adapters_fit_their_published_unets_alone() -> None:
    """By the configs of TencentARC's adapters and of the UNets that they were made for."""
    of_sd = {
        "block_out_channels": [320, 640, 1280, 1280],
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    }
    of_xl = {
        "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    }
    full = {"channels": [320, 640, 1280, 1280], "downscale_factor": 8, "adapter_type": "full_adapter"}
    light = {"channels": [320, 640, 1280], "downscale_factor": 8, "adapter_type": "light_adapter"}
    xl = {"channels": [320, 640, 1280, 1280], "downscale_factor": 16, "adapter_type": "full_adapter_xl"}
    fits = {"full": (full, of_sd), "light": (light, of_sd), "xl": (xl, of_xl)}
    for config, unet_config in fits.values():
        assert why_unlike_adapter(config, unet_config, 8) is None
    for config, unet_config in ((full, of_xl), (light, of_xl), (xl, of_sd)):
        assert "makes features of 320 channels per" in str(why_unlike_adapter(config, unet_config, 8))
