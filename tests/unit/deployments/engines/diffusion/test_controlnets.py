"""ControlNets give the images of the stock pipelines, alone and several at once, and share forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, FluxControlNetModel, SD3ControlNetModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from deployments.engines.diffusion.families import FAMILIES as KNOWN
from deployments.engines.diffusion.rows import batch_key, parts_of
from deployments.engines.records.protocol import AdapterUse, ControlUse, EngineError
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase

STOCK = {
    "FluxPipeline": diffusers.FluxControlNetPipeline,
    "StableDiffusionXLPipeline": diffusers.StableDiffusionXLControlNetPipeline,
    "StableDiffusionPipeline": diffusers.StableDiffusionControlNetPipeline,
    "StableDiffusion3Pipeline": diffusers.StableDiffusion3ControlNetPipeline,
}
FAMILIES = ["flux", "sdxl", "stable_diffusion", "stable_diffusion_3"]
SD3_KEYS = (
    *("sample_size", "patch_size", "in_channels", "out_channels", "attention_head_dim", "num_attention_heads"),
    *("joint_attention_dim", "caption_projection_dim", "pooled_projection_dim", "pos_embed_max_size"),
    *("qk_norm", "dual_attention_layers"),
)


def random_image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def make_net(pair: Any, seed: int, **more: Any) -> torch.nn.Module:
    """A ControlNet whose residuals matter: stock's begin at zero."""
    torch.manual_seed(seed)
    denoiser = pair.ours.denoiser
    if pair.ours.family.class_name == "FluxPipeline":
        config = dict(denoiser.config)
        names = ("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim")
        options = {name: config[name] for name in (*names, "pooled_projection_dim", "axes_dims_rope")}
        net = FluxControlNetModel(**options, num_layers=1, num_single_layers=1, **{"guidance_embeds": True, **more})
    elif pair.ours.family.class_name == "StableDiffusion3Pipeline":
        net = SD3ControlNetModel(**{name: denoiser.config[name] for name in SD3_KEYS} | {"num_layers": 1} | more)
    else:
        # Stock makes the image's embedding by the pixels of a latent: here 2, which takes one halving.
        net = ControlNetModel.from_unet(denoiser, conditioning_embedding_out_channels=(4, 8))
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return net.eval()


@pytest.fixture(params=FAMILIES)
def controlled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "stable_diffusion_3":
        without_draws(monkeypatch)
    return request.getfixturevalue(request.param)


def without_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock draws what its VAE says of an image from torch's own stream, for each row anew: nobody draws here."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())


def stock_outputs(pair: Any, nets: list[Any], request: Any, conditioning: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Return the latents and the images of the stock pipeline."""
    cls = STOCK[pair.ours.family.class_name]
    components = {name: part for name, part in pair.stock.components.items() if "image" not in name}
    options: dict[str, Any] = {}
    if "safety_checker" in components:
        options = {"requires_safety_checker": False}
    if "XL" in cls.__name__:
        options = {"add_watermarker": False}
    pipeline = cls(**components, controlnet=nets if len(nets) > 1 else nets[0], **options)
    pipeline.set_progress_bar_config(disable=True)

    def several(values: list[Any]) -> Any:
        return values if len(nets) > 1 else values[0]

    images = several([Image.fromarray(use.image) for use in request.control])
    is_flux = pair.ours.family.class_name == "FluxPipeline"
    call = {"control_image": images, "true_cfg_scale": request.true_cfg_scale} if is_flux else {"image": images}
    if pair.ours.family.class_name == "StableDiffusion3Pipeline":
        call = {"control_image": images}
    latents: list[torch.Tensor] = []
    result = pipeline(
        **pair.stock_texts(request, conditioning),
        **call,
        callback_on_step_end=lambda _, step, time, tensors: latents.append(tensors["latents"]) or {},
        width=request.width,
        height=request.height,
        controlnet_conditioning_scale=several([use.scale for use in request.control]),
        control_guidance_start=several([use.start for use in request.control]),
        control_guidance_end=several([use.end for use in request.control]),
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pil",
    ).images
    return latents[-1], np.stack([np.asarray(image) for image in result])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_one_equals_stock(controlled, make_request, equals_stock, guidance):
    net = make_net(controlled, 1)
    request = make_request(
        control=(ControlUse("a", random_image(), scale=0.8),),
        guidance_scale=guidance,
        true_cfg_scale=guidance,
        num_images=2,
    )
    conditioning = controlled.conditioning(negative=True)
    stock = stock_outputs(controlled, [net], request, conditioning)
    ours = equals_stock(controlled.ours, request, conditioning, stock, {"a": net})
    plain = controlled.ours.generate(make_request(guidance_scale=guidance, true_cfg_scale=guidance), conditioning)
    assert np.abs(ours[0].astype(int) - plain[0].astype(int)).max() > 4


@pytest.mark.parametrize(
    "more",
    [{"force_zeros_for_pooled_projection": False}, {"joint_attention_dim": None, "use_pos_embed": False}],
    ids=["with a pooled text", "without text and places"],
)
def test_other_kinds_for_stable_diffusion_3_equal_stock(
    stable_diffusion_3, make_request, equals_stock, monkeypatch, more
):
    without_draws(monkeypatch)
    net = make_net(stable_diffusion_3, 1, **more)
    request = make_request(control=(ControlUse("a", random_image(), scale=0.8),), guidance_scale=3.0, num_images=1)
    conditioning = stable_diffusion_3.conditioning(negative=True)
    stock = stock_outputs(stable_diffusion_3, [net], request, conditioning)
    equals_stock(stable_diffusion_3.ours, request, conditioning, stock, {"a": net})


def test_an_image_for_stable_diffusion_3_is_drawn_as_stock_does_after_its_seed(
    stable_diffusion_3, make_request, equals_stock
):
    net = make_net(stable_diffusion_3, 1)
    request = make_request(control=(ControlUse("a", random_image(), scale=0.8),), guidance_scale=1.0, num_images=1)
    conditioning = stable_diffusion_3.conditioning()
    torch.manual_seed(request.seed)
    stock = stock_outputs(stable_diffusion_3, [net], request, conditioning)
    equals_stock(stable_diffusion_3.ours, request, conditioning, stock, {"a": net})


def test_one_for_stable_diffusion_3_is_checked_when_it_comes_in(stable_diffusion_3, flux, tmp_path):
    bases = {}
    for pair in (stable_diffusion_3, flux):
        parts = {part.name: part for part in read_checkpoint(pair.folder).components}
        name = pair.ours.family.class_name
        bases[name] = AdapterBase("base", "diffusion", name, pair.folder, parts, dtype="float32")

    def said(of: str, **more: Any) -> str:
        folder = tmp_path / f"{of} {' '.join(more)}"
        make_net(stable_diffusion_3, 1, **more).save_pretrained(folder)
        return why_unservable(read_checkpoint(folder), (bases[of],)) or ""

    assert said("StableDiffusion3Pipeline") == ""
    assert said("StableDiffusion3Pipeline", pos_embed_max_size=64) == ""
    assert "extra_conditioning_channels" in said("StableDiffusion3Pipeline", extra_conditioning_channels=1)
    assert "reads text of 8 numbers" in said("StableDiffusion3Pipeline", joint_attention_dim=8)
    assert "is a SD3ControlNetModel, and 'base' (FluxPipeline) takes a FluxControlNetModel" in said("FluxPipeline")


@pytest.mark.drawn(2)
def test_two_in_parts_of_the_steps_equal_stock(controlled, make_request, equals_stock):
    nets = [make_net(controlled, 1), make_net(controlled, 2)]
    request = make_request(
        control=(
            ControlUse("a", random_image(1), scale=0.7, end=0.5),
            ControlUse("b", random_image(2), scale=-0.4, start=0.25),
        ),
        num_inference_steps=4,
        guidance_scale=3.0,
    )
    conditioning = controlled.conditioning(negative=True)
    stock = stock_outputs(controlled, nets, request, conditioning)
    equals_stock(controlled.ours, request, conditioning, stock, dict(zip("ab", nets, strict=True)))


def test_flux_nets_that_read_pixels_equal_stock(make_flux_pair, make_request, equals_stock):
    pair = make_flux_pair(vae_levels=4)  # such a net halves an image three times, as Flux's VAE does
    net = make_net(pair, 3, conditioning_embedding_channels=4, patch_size=2, guidance_embeds=False)
    request = make_request(control=(ControlUse("a", random_image(), scale=0.8),), guidance_scale=3.5)
    conditioning = pair.conditioning()
    stock = stock_outputs(pair, [net], request, conditioning)
    equals_stock(pair.ours, request, conditioning, stock, {"a": net})


def test_a_control_and_an_image_equal_stock(stable_diffusion, make_request, equals_stock):
    net = make_net(stable_diffusion, 1)
    init = random_image(5)
    request = make_request(
        init_image=init, strength=0.6, num_inference_steps=5, control=(ControlUse("a", random_image(), end=0.7),)
    )
    conditioning = stable_diffusion.conditioning()
    components = {name: part for name, part in stable_diffusion.stock.components.items() if name != "image_encoder"}
    pipeline = diffusers.StableDiffusionControlNetImg2ImgPipeline(
        **components, controlnet=net, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    latents: list[torch.Tensor] = []
    stock = pipeline(
        **stable_diffusion.stock_texts(request, conditioning),
        callback_on_step_end=lambda _, step, time, tensors: latents.append(tensors["latents"]) or {},
        image=Image.fromarray(init),
        control_image=Image.fromarray(request.control[0].image),
        strength=0.6,
        control_guidance_end=0.7,
        controlnet_conditioning_scale=1.0,
        num_inference_steps=5,
        guidance_scale=1.0,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pil",
    ).images
    images = np.stack([np.asarray(image) for image in stock])
    equals_stock(stable_diffusion.ours, request, conditioning, (latents[-1], images), {"a": net})


@pytest.mark.drawn(2)
def test_requests_with_one_net_share_a_forward(controlled, make_request):
    net = make_net(controlled, 1)
    conditioning = controlled.conditioning()
    requests = [
        make_request(control=(ControlUse("a", random_image(1), scale=0.5),)),
        make_request(control=(ControlUse("a", random_image(2), scale=1.5),), seed=9),
        make_request(control=(ControlUse("a", random_image(2), start=0.9),)),
        make_request(),
    ]

    def finished(states: list[Any]) -> list[torch.Tensor]:
        while any(not state.done for state in states):
            controlled.ours.step(states)
        return [state.latents for state in states]

    states = [controlled.ours.start_request(request, conditioning, {"a": net}) for request in requests]
    keys = [batch_key(part) for part in parts_of(states)]
    assert keys[0] == keys[1]
    assert keys[2] != keys[0]  # it does not act yet, and costs nothing
    # Texts that are padded under a mask are not padded for a request with ControlNets, which take no mask.
    assert (keys[2] == keys[3]) is not controlled.ours.family.texts.masks
    for request, together in zip(requests, finished(states), strict=True):
        [alone] = finished([controlled.ours.start_request(request, conditioning, {"a": net})])
        assert torch.equal(together, alone)


def test_what_is_refused(sdxl, stable_diffusion, flux, make_request):
    net = make_net(sdxl, 1)
    use = ControlUse("a", random_image())
    cases = [
        (sdxl, (ControlUse("b", random_image()),), {"a": net}, r"'b' is no known ControlNet \(known: a\)"),
        (flux, (use,), {"a": net}, "'a' is a ControlNetModel, and FluxPipeline takes a FluxControlNetModel"),
        (stable_diffusion, (use,), {"a": net}, "it is of another family"),
        (sdxl, (use,), {"a": ControlNetModel.from_unet(sdxl.ours.denoiser)}, "reduces its image by 8, and .* 1/2"),
        (sdxl, (use,), {"a": make_net(sdxl, 1).half()}, "in torch.float16, and the model in torch.float32"),
        (sdxl, (ControlUse("a", random_image(), scale=float("nan")),), {"a": net}, "scale nan"),
        (sdxl, (ControlUse("a", random_image(), start=0.5, end=0.5),), {"a": net}, "expected 0 <= start < end <= 1"),
        (sdxl, (ControlUse("a", random_image()[:16]),), {"a": net}, "control: 32x16 pixels, expected the 32x32"),
    ]
    for pair, control, known, message in cases:
        with pytest.raises(EngineError, match=message):
            pair.ours.start_request(make_request(control=control), pair.conditioning(), known)
    with pytest.raises(EngineError, match=r"unknown adapter 'a' \(known: none\)"):
        sdxl.ours.start_request(make_request(adapters=(AdapterUse("a"),)), sdxl.conditioning(), {"a": net})


def test_a_family_says_whether_its_controls_may_be_encoded() -> None:
    for family in KNOWN.values():
        encoded = list[torch.Tensor]()

        def encode(images: torch.Tensor, *, encoded: list[Any] = encoded, **_: bool) -> torch.Tensor:
            encoded.append(images)
            return torch.zeros(1, 4, 8, 8)

        config = SimpleNamespace(force_zeros_for_pooled_projection=False, control_in_dim=4)
        net = SimpleNamespace(input_hint_block=None, config=config)
        family.adapters.control_inputs(net, torch.zeros(1, 3, 16, 16), encode)
        assert family.adapters.encodes_controls == bool(encoded), family.class_name
