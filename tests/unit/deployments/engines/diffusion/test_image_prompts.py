"""IP-Adapters give the images of diffusers' `load_ip_adapter`, plain, plus and full, and leave other rows alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from PIL import Image
from safetensors.torch import load_file, save_file
from unit.deployments.engines.diffusion.ip_adapter_files import Kind, opened, write_ip_adapter

from deployments.engines.diffusion.checkpoints import conditioning_of, restore_checkpoint, save_checkpoint
from deployments.engines.records.protocol import EngineError, ImagePromptUse
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.formats.ip_adapter import count_tokens
from weights.operations.externalize import externalize
from weights.operations.layouts import write_inline
from weights.records.errors import AdapterError, FormatError
from weights.storage.store import WeightStore

_OTHERS = ("transformer", "image_encoder", "feature_extractor")
KINDS: tuple[tuple[str, Kind], ...] = (("a", "plain"), ("b", "plus"))


def image_of(height: int, width: int) -> np.ndarray:
    return seeded_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(params=["sdxl", "stable_diffusion"])
def prompted(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def stock_outputs(pair: Any, folders: list[Path], request: Any, conditioning: Any) -> tuple[torch.Tensor, np.ndarray]:
    """Return the latents and the images of the stock pipeline, whose denoiser is a copy: adapters change it."""
    parts = {name: part for name, part in pair.stock.components.items() if "image" not in name and name != "unet"}
    options: dict[str, Any] = {"requires_safety_checker": False} if "safety_checker" in parts else {}
    options |= {"add_watermarker": False} if "text_encoder_2" in parts else {}
    pipeline = type(pair.stock)(**parts, unet=copy.deepcopy(pair.stock.unet), **options)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_ip_adapter(
        [str(folder) for folder in folders], subfolder="", weight_name=["ip-adapter.safetensors"] * len(folders)
    )
    pipeline.set_ip_adapter_scale([use.scale for use in request.image_prompts])
    latents: list[torch.Tensor] = []
    result = pipeline(
        **pair.stock_texts(request, conditioning),
        ip_adapter_image=[Image.fromarray(use.image) for use in request.image_prompts],
        callback_on_step_end=lambda _, step, time, tensors: latents.append(tensors["latents"]) or {},
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pil",
    ).images
    return latents[-1], np.stack([np.asarray(image) for image in result])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["plain", "plus", "full"])
def test_an_image_as_a_prompt_equals_stock(
    prompted: Any, make_request: Any, equals_stock: Any, tmp_path: Path, kind: Kind, guidance: float
) -> None:
    folder = write_ip_adapter(tmp_path / "a", prompted.ours.denoiser, kind)
    uses = (ImagePromptUse("a", image_of(40, 50), 0.7),)
    request = make_request(image_prompts=uses, guidance_scale=guidance, num_images=1)
    conditioning = prompted.conditioning(negative=True)
    stock = stock_outputs(prompted, [folder], request, conditioning)
    ours = equals_stock(prompted.ours, request, conditioning, stock, {"a": opened(folder)})
    plain = prompted.ours.generate(make_request(guidance_scale=guidance, num_images=1), conditioning)
    assert np.abs(ours[0].astype(int) - plain[0].astype(int)).max() > 4


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_an_image_as_a_prompt_to_flux_equals_stock(
    flux: Any, make_request: Any, equals_stock: Any, tmp_path: Path, guidance: float
) -> None:
    """Also beside a negative prompt, which in stock goes with a black image."""
    folders = [write_ip_adapter(tmp_path / name, flux.ours.denoiser, "flux") for name in "ab"]
    uses = (ImagePromptUse("a", image_of(40, 50), 0.7), ImagePromptUse("b", image_of(32, 32), 0.4))
    request = make_request(image_prompts=uses, guidance_scale=3.5, true_cfg_scale=guidance, num_images=1)
    conditioning = flux.conditioning(negative=True)
    parts = {name: part for name, part in flux.stock.components.items() if name not in _OTHERS}
    pipeline = type(flux.stock)(**parts, transformer=copy.deepcopy(flux.stock.transformer))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_ip_adapter(
        [str(folder) for folder in folders],
        weight_name=["ip-adapter.safetensors"] * 2,
        image_encoder_pretrained_model_name_or_path=str(folders[0] / "image_encoder"),
        image_encoder_dtype=torch.float32,
    )
    pipeline.set_ip_adapter_scale([[use.scale] for use in uses])
    latents: list[torch.Tensor] = []
    images = pipeline(
        **flux.stock_texts(request, conditioning),
        ip_adapter_image=[Image.fromarray(use.image) for use in uses],
        callback_on_step_end=lambda _, step, time, tensors: latents.append(tensors["latents"]) or {},
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=3.5,
        true_cfg_scale=guidance,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pil",
    ).images
    encoder = load_file(folders[0] / "image_encoder" / "model.safetensors")  # stock has one for all
    save_file(encoder, folders[1] / "image_encoder" / "model.safetensors")
    known = {name: opened(folder) for name, folder in zip("ab", folders, strict=True)}
    stock = latents[-1], np.stack([np.asarray(image) for image in images])
    ours = equals_stock(flux.ours, request, conditioning, stock, known)
    plain = make_request(guidance_scale=3.5, true_cfg_scale=guidance, num_images=1)
    assert np.abs(ours[0].astype(int) - flux.ours.generate(plain, conditioning)[0].astype(int)).max() > 4


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_an_image_as_a_prompt_to_stable_diffusion_3_equals_stock(
    stable_diffusion_3: Any, make_request: Any, equals_stock: Any, tmp_path: Path, guidance: float
) -> None:
    pair = stable_diffusion_3
    folder = write_ip_adapter(tmp_path / "a", pair.ours.denoiser, "sd3")
    use = ImagePromptUse("a", image_of(40, 50), 0.7)
    request = make_request(image_prompts=(use,), guidance_scale=guidance, num_images=2)
    conditioning = pair.conditioning(negative=True)
    prompter = opened(folder)
    parts = {name: part for name, part in pair.stock.components.items() if name not in _OTHERS}
    pipeline = type(pair.stock)(
        **parts,
        transformer=copy.deepcopy(pair.stock.transformer),
        image_encoder=prompter.encoder,
        feature_extractor=prompter.processor,
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_ip_adapter(str(folder), weight_name="ip-adapter.safetensors", image_encoder_folder=None)
    pipeline.set_ip_adapter_scale(use.scale)
    latents: list[torch.Tensor] = []
    images = pipeline(
        **pair.stock_texts(request, conditioning),
        ip_adapter_image=Image.fromarray(use.image),
        callback_on_step_end=lambda _, step, time, tensors: latents.append(tensors["latents"]) or {},
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_inference_steps,
        guidance_scale=guidance,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pil",
    ).images
    stock = latents[-1], np.stack([np.asarray(image) for image in images])
    ours = equals_stock(pair.ours, request, conditioning, stock, {"a": prompter})
    plain = pair.ours.generate(make_request(guidance_scale=guidance, num_images=1), conditioning)
    assert np.abs(ours[0].astype(int) - plain[0].astype(int)).max() > 4


def test_images_to_stable_diffusion_3_share_forwards_and_fit_it_alone(
    stable_diffusion_3: Any, sdxl: Any, make_request: Any, tmp_path: Path
) -> None:
    pipeline = stable_diffusion_3.ours
    folder = write_ip_adapter(tmp_path / "a", pipeline.denoiser, "sd3")
    known = {"a": opened(folder)}
    assert known["a"].num_tokens == 5
    assert why_unservable(read_checkpoint(folder)) is None
    asked = [
        make_request(num_images=1, seed=1, num_inference_steps=2),
        make_request(image_prompts=(ImagePromptUse("a", image_of(32, 32), 0.6),), num_images=2, seed=2),
        make_request(image_prompts=(ImagePromptUse("a", image_of(9, 9), -0.5),), num_images=1, seed=3),
    ]
    conditioning = stable_diffusion_3.conditioning()
    alone = [pipeline.generate(request, conditioning, adapters=known) for request in asked]
    states = [pipeline.start_request(request, conditioning, known) for request in asked]
    while not all(state.done for state in states):
        pipeline.step([state for state in states if not state.done])
    for together, own in zip(pipeline.decode(states), alone, strict=True):
        assert np.array_equal(together, own)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in pipeline.denoiser.modules())
    with pytest.raises(EngineError, match="is of Stable Diffusion 3, and the model has a UNet"):
        sdxl.ours.start_request(asked[1], sdxl.conditioning(), known)


def test_images_to_flux_share_forwards_and_other_rows_stay_the_same(
    flux: Any, make_request: Any, tmp_path: Path
) -> None:
    known = {"a": opened(write_ip_adapter(tmp_path / "a", flux.ours.denoiser, "flux"))}
    asked = [
        make_request(num_images=1, seed=1),
        make_request(image_prompts=(ImagePromptUse("a", image_of(32, 32), 0.6),), num_images=2, seed=2),
        make_request(image_prompts=(ImagePromptUse("a", image_of(9, 9), -0.5),), num_images=1, seed=3),
    ]
    conditioning = flux.conditioning()
    alone = [flux.ours.generate(request, conditioning, adapters=known) for request in asked]
    states = [flux.ours.start_request(request, conditioning, known) for request in asked]
    while not states[0].done:
        flux.ours.step(states)
    for together, own in zip(flux.ours.decode(states), alone, strict=True):
        assert np.array_equal(together, own)
    assert not any(layer._forward_hooks for layer in flux.ours.denoiser.modules())


@pytest.mark.parametrize("kind", ["plain", "plus", "full"])
def test_the_tokens_of_an_image_are_known_before_there_is_one(sdxl: Any, tmp_path: Path, kind: Kind) -> None:
    """By the adapter as it is built, and by the shapes that its manifest has."""
    folder = write_ip_adapter(tmp_path / "a", sdxl.ours.denoiser, kind)
    prompter, (component,) = opened(folder), read_checkpoint(folder).components
    (tokens,) = prompter.tokens_of(image_of(9, 12), with_negative=False)
    stored = {name: ref.shape for name, ref in component.tensors.items()}
    assert prompter.num_tokens == count_tokens(stored) == tokens.shape[1]


@pytest.mark.drawn
def test_several_images_of_two_adapters_share_a_forward_and_other_rows_stay_the_same(
    prompted: Any, make_request: Any, tmp_path: Path
) -> None:
    pipeline, conditioning = prompted.ours, prompted.conditioning(negative=True)
    known = {}
    for name, kind in KINDS:
        known[name] = opened(write_ip_adapter(tmp_path / name, pipeline.denoiser, kind))
    asked = [
        make_request(guidance_scale=3.0, num_images=1, seed=1),
        make_request(
            image_prompts=(ImagePromptUse("a", image_of(32, 32), 0.6),), guidance_scale=3.0, num_images=2, seed=2
        ),
        make_request(
            image_prompts=(ImagePromptUse("b", image_of(64, 30)), ImagePromptUse("a", image_of(9, 9), -0.5)),
            guidance_scale=2.0, num_images=1, seed=3,
        ),
        make_request(
            image_prompts=(ImagePromptUse("a", image_of(9, 9), 0.0),), guidance_scale=3.0, num_images=1, seed=1
        ),
    ]  # fmt: skip
    alone = [pipeline.generate(request, conditioning, adapters=known) for request in asked]
    states = [pipeline.start_request(request, conditioning, known) for request in asked]
    while not states[0].done:
        pipeline.step(states)
    for together, own in zip(pipeline.decode(states), alone, strict=True):
        assert np.array_equal(together, own)
    assert np.array_equal(alone[0], alone[3])  # a strength of 0
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in pipeline.denoiser.modules())


def test_another_process_goes_on_after_a_step(stable_diffusion: Any, make_request: Any, tmp_path: Path) -> None:
    pipeline, conditioning = stable_diffusion.ours, stable_diffusion.conditioning(negative=True)
    known = {"a": opened(write_ip_adapter(tmp_path / "a", pipeline.denoiser))}
    uses = (ImagePromptUse("a", image_of(8, 8)),)
    request = make_request(image_prompts=uses, guidance_scale=3.0, num_images=1)
    begun = pipeline.start_request(request, conditioning, known)
    pipeline.step([begun])
    checkpoint = save_checkpoint(begun, conditioning)
    assert checkpoint is not None
    restored = pipeline.start_request(request, conditioning_of(checkpoint), known)
    restore_checkpoint(restored, checkpoint)
    while not restored.done:
        pipeline.step([restored])
    assert np.array_equal(pipeline.decode([restored])[0], pipeline.generate(request, conditioning, adapters=known))


def test_what_does_not_fit_is_refused(stable_diffusion: Any, flux: Any, make_request: Any, tmp_path: Path) -> None:
    pipeline, conditioning = stable_diffusion.ours, stable_diffusion.conditioning(negative=True)
    folder = write_ip_adapter(tmp_path / "a", pipeline.denoiser)
    request = make_request(image_prompts=(ImagePromptUse("a", image_of(8, 8)),), num_images=1)
    prompter = opened(folder)
    with pytest.raises(EngineError, match=r"ip_adapter: 'a' is no known IP-Adapter \(known: b\)"):
        pipeline.start_request(request, conditioning, {"b": prompter})
    with pytest.raises(EngineError, match="is for a UNet, and the model is one of Flux"):
        flux.ours.start_request(request, flux.conditioning(), {"a": prompter})
    tensors = load_file(folder / "ip-adapter.safetensors")
    shorter = {name: one for name, one in tensors.items() if not name.startswith("ip_adapter.1.")}
    save_file(shorter, folder / "ip-adapter.safetensors")
    with pytest.raises(EngineError, match=r"has \d+ layers, and the model \d+: it is for another one"):
        pipeline.start_request(request, conditioning, {"a": opened(folder)})
    wide = tensors | {"ip_adapter.1.to_k_ip.weight": torch.zeros(3, tensors["image_proj.norm.weight"].shape[0])}
    save_file(wide, folder / "ip-adapter.safetensors")
    with pytest.raises(
        EngineError, match=r"'a' has .*1\.to_k_ip.weight of shape \[3, \d+\], and the model \[\d+, \d+\]"
    ):
        pipeline.start_request(request, conditioning, {"a": opened(folder)})
    other = tensors | {"image_proj.proj.weight": torch.zeros(tensors["image_proj.proj.weight"].shape[0], 7)}
    save_file(other, folder / "ip-adapter.safetensors")
    with pytest.raises(
        (AdapterError, EngineError), match="reads vectors of 7 numbers, and the image_encoder beside it"
    ):
        opened(folder)


def test_a_folder_becomes_one_component_and_is_written_back(stable_diffusion: Any, tmp_path: Path) -> None:
    folder = write_ip_adapter(tmp_path / "a", stable_diffusion.ours.denoiser, "plus")
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.kind, checkpoint.class_name, why_unservable(checkpoint)) == ("ip_adapter", "IPAdapter", None)
    store = WeightStore(tmp_path / "store")
    stored = externalize(store, "a", folder)
    write_inline(store, "a", tmp_path / "written")
    again = externalize(store, "again", tmp_path / "written")
    assert [one.module_key for one in again.components.values()] == [o.module_key for o in stored.components.values()]
    assert stored.components["ip_adapter"].config_hash


def test_files_that_are_no_adapter_are_refused(stable_diffusion: Any, flux: Any, tmp_path: Path) -> None:
    folder = write_ip_adapter(tmp_path / "a", stable_diffusion.ours.denoiser)
    file = folder / "ip-adapter.safetensors"
    tensors = load_file(file)

    def words_of(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, file)
        with pytest.raises((AdapterError, FormatError)) as caught:
            read_checkpoint(folder)
        return str(caught.value)

    assert "no IP-Adapter: expected tensors image_proj" in words_of({"w": torch.zeros(1)})
    faces = {name: one for name, one in tensors.items() if not name.startswith("image_proj.")}
    first, norm = {"image_proj.proj.0.weight": torch.zeros(2, 2)}, {"image_proj.norm.weight": torch.zeros(2)}
    assert "of a form that is not known; of Stable Diffusion 1 and 2 and SDXL the plain, plus," in words_of(
        faces | first
    )
    assert "'image_proj.proj.0.bias' is missing" in words_of(
        faces | first | {"image_proj.proj.3.weight": torch.zeros(2)}
    )
    face_lora = {"ip_adapter.0.to_q_lora.down.weight": torch.zeros(1)}
    for face in (first | norm, {"image_proj.perceiver_resampler.proj_in.weight": torch.zeros(2, 2)}):
        assert "a FaceID adapter, which reads a face as insightface" in words_of(faces | face | face_lora)
        with pytest.raises(AdapterError, match="a FaceID adapter"):
            read_checkpoint(file)
    by_time = {"image_proj.time_embedding.linear_1.weight": torch.zeros(2, 2)}
    assert "'image_proj.latents' is missing" in words_of(tensors | by_time)
    xlabs = "double_blocks.0.processor.ip_adapter_double_stream_k_proj.weight"
    of_flux = {"ip_adapter_proj_model.proj.weight": torch.zeros(8, 2), xlabs: torch.zeros(2, 2)}
    assert "tensor 'image_proj.norm.bias' is missing" in words_of(of_flux)
    of_flux = load_file(write_ip_adapter(tmp_path / "f", flux.ours.denoiser, "flux") / "ip-adapter.safetensors")
    first = "ip_adapter_proj_model.proj.bias"
    assert "'image_proj.proj.bias' has shape [3], expected [48]" in words_of(of_flux | {first: torch.zeros(3)})
    other = xlabs.replace("weight", "bias")
    assert "'ip_adapter.0.to_k_ip.bias' has shape [3], expected [32]" in words_of(of_flux | {other: torch.zeros(3)})
    alone = tmp_path / "alone" / "ip_adapter.safetensors"  # XLabs' folder has no encoder
    alone.parent.mkdir()
    save_file(of_flux, alone)
    with pytest.raises(FormatError, match=r"image_encoder: no safetensors weights beside config\.json"):
        read_checkpoint(alone.parent)
    save_file(tensors, alone)
    with pytest.raises(FormatError, match=r"image_encoder: no safetensors weights beside config\.json"):
        read_checkpoint(alone.parent)
    lacking = {name: one for name, one in tensors.items() if name != "ip_adapter.1.to_v_ip.weight"}
    assert "tensor 'ip_adapter.1.to_v_ip.weight' is missing" in words_of(lacking)
    assert "tensor 'ip_adapter.1.to_k_lora.down.weight' is not of a plain IP-Adapter" in words_of(
        tensors | {"ip_adapter.1.to_k_lora.down.weight": torch.zeros(1)}
    )
    assert "tensor 'image_proj.proj.bias' has shape [3], expected" in words_of(
        tensors | {"image_proj.proj.bias": torch.zeros(3)}
    )
    save_file(tensors, file)
    save_file(tensors, folder / "other.safetensors")
    with pytest.raises(FormatError, match="2 IP-Adapters beside one image_encoder"):
        read_checkpoint(folder)
    (folder / "other.safetensors").unlink()
    (folder / "image_encoder" / "model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"image_encoder: no safetensors weights beside config\.json"):
        read_checkpoint(folder)
