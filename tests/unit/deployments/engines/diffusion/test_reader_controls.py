"""ControlNets of models whose prompts a language model reads have the effect that they have in stock."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import (
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    ZImageControlNetModel,
    ZImageControlNetPipeline,
)
from kit.seeding import seeded_rng
from kit.tiny.pipelines import make
from unit.deployments.engines.diffusion.control_nets import stirred
from unit.deployments.engines.diffusion.reader_pairs import ReaderPair

from deployments.engines.records.protocol import ControlUse, DiffusionRequest
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase

KEYS = (
    *("patch_size", "in_channels", "out_channels", "attention_head_dim", "num_attention_heads"),
    *("joint_attention_dim", "axes_dims_rope"),
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ReaderPair:
    folder = tmp_path_factory.mktemp("pair")
    return ReaderPair(make("QwenImagePipeline", folder), folder)


def controlnet(qwen: ReaderPair, seed: int = 1, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = {name: qwen.ours.denoiser.config[name] for name in KEYS}
    return stirred(QwenImageControlNetModel(**config | {"num_layers": 1} | more), seed)


def asked(image: np.ndarray, **more: Any) -> DiffusionRequest:
    return DiffusionRequest(
        "r", height=64, width=64, num_inference_steps=3, seed=7, guidance_scale=1.0,
        control=(ControlUse("a", image, scale=0.8),), **more,
    )  # fmt: skip


def picture() -> np.ndarray:
    return seeded_rng().integers(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.drawn
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_one_equals_stock(qwen: ReaderPair, guidance: float) -> None:
    net, image = controlnet(qwen), picture()
    request = asked(image, true_cfg_scale=guidance, num_images=2)
    conditioning = qwen.conditioning(request, "a cat", "a rather dull dog")
    options = {"control_image": PIL.Image.fromarray(image), "controlnet_conditioning_scale": 0.8}
    stock = qwen.stock_run(
        request,
        "a cat",
        "a rather dull dog",
        lambda **parts: QwenImageControlNetPipeline(**parts, controlnet=net),
        **options,
    )
    plain, _ = qwen.stock_run(replace(request, control=()), "a cat", "a rather dull dog")
    state = qwen.ours.start_request(request, conditioning, {"a": net})
    qwen.assert_equal_to_stock(state, stock)
    assert (state.latents - plain).abs().max() > 0.01


def test_requests_share_forwards_and_get_what_they_get_alone(qwen: ReaderPair) -> None:
    net = controlnet(qwen)
    requests = [asked(picture()), replace(asked(picture(), true_cfg_scale=2.0), seed=9), asked(picture())]
    requests[2] = replace(requests[2], control=())

    def begun(request: DiffusionRequest) -> Any:
        return qwen.ours.start_request(request, qwen.conditioning(request, "a cat", "dull"), {"a": net})

    together, alone = [begun(one) for one in requests], [begun(one) for one in requests]
    while any(not state.done for state in together):
        qwen.ours.step(together)
    for state, other in zip(alone, together, strict=True):
        while not state.done:
            qwen.ours.step([state])
        assert torch.equal(state.latents, other.latents)


def test_it_is_checked_when_it_comes_in(qwen: ReaderPair, tmp_path: Path) -> None:
    parts = {part.name: part for part in read_checkpoint(qwen.folder).components}
    base = AdapterBase("base", "diffusion", "QwenImagePipeline", qwen.folder, parts, dtype="float32")
    controlnet(qwen).save_pretrained(tmp_path / "net")
    assert why_unservable(read_checkpoint(tmp_path / "net"), (base,)) is None
    controlnet(qwen, extra_condition_channels=4).save_pretrained(tmp_path / "paints")
    assert "reads 4 channels beside its image's" in (
        why_unservable(read_checkpoint(tmp_path / "paints"), (base,)) or ""
    )


Z_KEYS = (
    "dim",
    "n_heads",
    "n_kv_heads",
    "n_refiner_layers",
    "norm_eps",
    "qk_norm",
    "all_patch_size",
    "all_f_patch_size",
)
Z_KINDS: dict[str, dict[str, Any]] = {
    "first": {},
    "with refiners": {"add_control_noise_refiner": "control_noise_refiner", "control_refiner_layers_places": [0]},
    "layers twice": {"add_control_noise_refiner": "control_layers", "control_refiner_layers_places": [0]},
}


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> ReaderPair:
    folder = tmp_path_factory.mktemp("pair")
    return ReaderPair(make("ZImagePipeline", folder), folder)


def z_controlnet(pair: ReaderPair, seed: int = 1, more_channels: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = pair.ours.denoiser.config
    options = {"control_layers_places": [0], "control_in_dim": config.in_channels + more_channels, **more}
    return stirred(ZImageControlNetModel(**{key: config[key] for key in Z_KEYS}, **options), seed)


@pytest.mark.drawn
@pytest.mark.parametrize("kind", list(Z_KINDS))
def test_a_controlnet_of_z_image_equals_stock(z_image: ReaderPair, kind: str) -> None:
    net, image = z_controlnet(z_image, more_channels=3 * (kind != "first"), **Z_KINDS[kind]), picture()
    request = replace(asked(image, num_images=2), guidance_scale=2.0)
    conditioning = z_image.conditioning(request, "a cat", "a rather dull dog")
    own = copy.deepcopy(net)  # stock's pipeline gives it the transformer's layers
    stock = z_image.stock_run(
        request,
        "a cat",
        "a rather dull dog",
        lambda **parts: ZImageControlNetPipeline(**parts, controlnet=own),
        control_image=PIL.Image.fromarray(image),
        controlnet_conditioning_scale=0.8,
    )
    plain, _ = z_image.stock_run(replace(request, control=()), "a cat", "a rather dull dog")
    state = z_image.ours.start_request(request, conditioning, {"a": net})
    z_image.assert_equal_to_stock(state, stock)
    assert (state.latents - plain).abs().max() > 0.01
    assert net.state_dict().keys() == z_controlnet(z_image, **Z_KINDS[kind]).state_dict().keys()


def test_controlnets_of_z_image_share_forwards_and_are_checked(z_image: ReaderPair, tmp_path: Path) -> None:
    known = {"a": z_controlnet(z_image), "b": z_controlnet(z_image, seed=2, more_channels=1)}
    both = (ControlUse("a", picture(), scale=0.8), ControlUse("b", picture(), scale=0.3))
    requests = [asked(picture()), replace(asked(picture()), seed=9), replace(asked(picture()), control=both)]
    requests.append(replace(requests[0], control=()))

    def begun(request: DiffusionRequest) -> Any:
        return z_image.ours.start_request(request, z_image.conditioning(request, "a cat", "dull"), known)

    together, alone = [begun(one) for one in requests], [begun(one) for one in requests]
    while any(not state.done for state in together):
        z_image.ours.step(together)
    for state, other in zip(alone, together, strict=True):
        while not state.done:
            z_image.ours.step([state])
        assert torch.equal(state.latents, other.latents)
    parts = {part.name: part for part in read_checkpoint(z_image.folder).components}
    base = AdapterBase("base", "diffusion", "ZImagePipeline", z_image.folder, parts, dtype="float32")
    for name, more, said in (
        ("net", {}, ""),
        ("deep", {"control_layers_places": [0, 99]}, r"adds to the layers [0, 99], and the model has"),
    ):
        z_controlnet(z_image, **more).save_pretrained(tmp_path / name)
        found = why_unservable(read_checkpoint(tmp_path / name), (base,))
        assert said in (found or "")
        assert bool(found) == bool(said)
