"""Pipelines in one file against the folders that they were made of, and against diffusers' `from_single_file`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.quantizers.bfl.utils import dequantize_nvfp4, quantize_nvfp4
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel
from unit.weights.comparing import same

from deployments.engines.diffusion.pipeline import settings_hash
from deployments.engines.diffusion.solvers import SolverFactory
from infra.bench.original_names import open_clip, sd3, unet_of_ldm, vae_of_ldm
from weights.formats.checkpoint import read_checkpoint
from weights.formats.pipeline_parts import pipeline_variant
from weights.loading.loader import load_from_store
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import externalize, unpacked_types
from weights.operations.repair import repair, verify
from weights.records.errors import FormatError, SourceRefused, StoreError
from weights.storage.store import WeightStore

Tensors = dict[str, torch.Tensor]


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
    )


def tiny_unet(**more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        **more,
    )


def tiny_clip(width: int, class_: type = CLIPTextModel) -> Any:
    config = CLIPTextConfig(
        vocab_size=99,
        hidden_size=width,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=width,
        max_position_embeddings=77,
    )
    return class_(config)


def write_folder(folder: Path, class_name: str, parts: Mapping[str, Any]) -> Path:
    """A pipeline's folder in half precision, as those on hubs are, with a solver and a tokenizer."""
    index: dict[str, Any] = {"_class_name": class_name, "scheduler": ["diffusers", "PNDMScheduler"]}
    for name, part in parts.items():
        index[name] = [type(part).__module__.split(".")[0], type(part).__name__]
        part.half().save_pretrained(folder / name)
    for name in ("scheduler", "tokenizer"):
        (folder / name).mkdir()
        (folder / name / f"{name}_config.json").write_text("{}")
    index["tokenizer"] = ["transformers", "CLIPTokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def without_weights(folder: Path) -> Path:
    bare = folder.with_name(f"{folder.name}-configs")
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    return bare


def weights_of(folder: Path, name: str) -> Tensors:
    (file,) = (folder / name).glob("*.safetensors")
    return load_file(file)


def sd15(tmp_path: Path) -> tuple[Path, Path]:
    """A folder, and the same model as one file."""
    folder = write_folder(
        tmp_path / "sd15",
        "StableDiffusionPipeline",
        {"unet": tiny_unet(), "vae": tiny_vae(), "text_encoder": tiny_clip(32)},
    )
    text = weights_of(folder, "text_encoder")
    prefix = "cond_stage_model.transformer.text_model."
    tensors = (
        unet_of_ldm(weights_of(folder, "unet"), layers_per_block=2)
        | vae_of_ldm(weights_of(folder, "vae"), num_blocks=2)
        | {prefix + key.removeprefix("text_model."): value for key, value in text.items()}
        | {prefix + "embeddings.position_ids": torch.arange(77)[None], "betas": torch.rand(5)}
        | {"model_ema.decay": torch.rand(())}
    )
    save_file(_contiguous(tensors), tmp_path / "all-in-one.safetensors")
    return folder, tmp_path / "all-in-one.safetensors"


def sdxl(tmp_path: Path, width: int = 24) -> tuple[Path, Path]:
    unet = tiny_unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        use_linear_projection=True,
        transformer_layers_per_block=(2, 1),
    )
    parts = {
        "unet": unet,
        "vae": tiny_vae(),
        "text_encoder": tiny_clip(width),
        "text_encoder_2": tiny_clip(32, CLIPTextModelWithProjection),
    }
    folder = write_folder(tmp_path / "sdxl", "StableDiffusionXLPipeline", parts)
    prefix = "conditioner.embedders.0.transformer.text_model."
    text = weights_of(folder, "text_encoder")
    tensors = (
        unet_of_ldm(weights_of(folder, "unet"), layers_per_block=2)
        | vae_of_ldm(weights_of(folder, "vae"), num_blocks=2)
        | {prefix + key.removeprefix("text_model."): value for key, value in text.items()}
        | open_clip(weights_of(folder, "text_encoder_2"), "conditioner.embedders.1.model.")
    )
    save_file(_contiguous(tensors), tmp_path / "xl.safetensors")
    return folder, tmp_path / "xl.safetensors"


def sd3_medium(tmp_path: Path) -> tuple[Path, Path]:
    """A folder, and its transformer, VAE and T5 as one file: both CLIPs are to come from the base."""
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    t5 = T5EncoderModel(T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4))
    clips = {name: tiny_clip(32, CLIPTextModelWithProjection) for name in ("text_encoder", "text_encoder_2")}
    parts = {"transformer": transformer, "vae": tiny_vae(), **clips, "text_encoder_3": t5}
    folder = write_folder(tmp_path / "sd3", "StableDiffusion3Pipeline", parts)
    tensors = sd3(weights_of(folder, "transformer"), num_layers=2) | vae_of_ldm(weights_of(folder, "vae"), num_blocks=2)
    text = weights_of(folder, "text_encoder_3")
    tensors |= {f"text_encoders.t5xxl.transformer.{key}": value for key, value in text.items()}
    save_file(_contiguous(tensors), tmp_path / "sd3.safetensors")
    return folder, tmp_path / "sd3.safetensors"


def _contiguous(tensors: Tensors) -> Tensors:
    return {key: tensor.contiguous().clone() for key, tensor in tensors.items()}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("make", "like"), [(sd15, "folder"), (sdxl, "model"), (partial(sdxl, width=32), "model"), (sd3_medium, "model")]
)
def test_a_single_file_is_the_folder_that_it_was_made_of_and_costs_no_more_bytes(
    make: Any, like: str, store: WeightStore, tmp_path: Path
) -> None:
    folder, file = make(tmp_path)
    first = externalize(store, "folder", folder)
    base = open_base("folder" if like == "model" else folder, store)
    second = externalize(store, "file", file, like=base)
    assert set(second.extents) <= set(first.extents)
    whole, single = load_from_store(store.path, "folder"), load_from_store(store.path, "file")
    assert whole.keys() == single.keys()
    for name, component in whole.items():
        assert same(single[name], component), name
        assert second.components[name].module_key == first.components[name].module_key
    told = pipeline_variant(store.skeleton(second))
    assert told == pipeline_variant(folder), "so its defaults are those of the folder"
    assert told["sample_height"] == 8
    assert verify(store, "file", deep=True).damages == ()
    assert externalize(store, "file", file, like=base) == second


def quantized(tensors: Tensors, form: str) -> tuple[Tensors, Tensors]:
    """Return the denoiser's matrices in 8 bits with what a form has beside them, and the values that they have so."""
    found, values = dict(tensors), {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        is_matrix = name.startswith(("model.diffusion_model.", "text_encoders.")) and layer != name and tensor.ndim > 1
        if not is_matrix or (form == "nvfp4" and (tensor.ndim != 2 or tensor.shape[1] % 16)):
            continue
        if form == "nvfp4":
            found[name], found[f"{layer}.weight_scale"], found[f"{layer}.weight_scale_2"] = quantize_nvfp4(tensor)
            values[name] = dequantize_nvfp4(*(found[f"{name}{end}"] for end in ("", "_scale", "_scale_2"))).half()
            continue
        if form.startswith("plain"):
            kind = torch.float8_e5m2 if form.endswith("e5m2") else torch.float8_e4m3fn
            found[name] = tensor.to(kind)
            values[name] = found[name].half()
            continue
        rows = tensor.float().flatten(1).abs().amax(1, keepdim=True)
        scale = rows / 448 if form == "rows" else (rows.max() / (127 if form == "int8" else 448)).reshape(())
        wide = tensor.float() / scale.reshape(-1, *[1] * (tensor.ndim - 1))
        found[name] = wide.round().to(torch.int8) if form == "int8" else wide.to(torch.float8_e4m3fn)
        found[f"{layer}.{'scale_weight' if form == 'scale_weight' else 'weight_scale'}"] = scale
        found[f"{layer}.input_scale"] = torch.tensor(1.0)
        values[name] = (found[name].float() * scale.reshape(-1, *[1] * (tensor.ndim - 1))).half()
        if form in ("marked", "int8"):
            said = b'{"format": "int8_tensorwise"}' if form == "int8" else b'{"format": "float8_e4m3fn"}'
            found[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    if form == "scale_weight":
        found["model.diffusion_model.scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return found, tensors | values


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("make", "form"),
    [(sd15, form) for form in ("plain e5m2", "weight_scale", "rows", "int8", "nvfp4")]
    + [(sd3_medium, form) for form in ("plain e4m3", "scale_weight", "marked", "nvfp4")],
)
def test_matrices_in_low_precision_have_the_values_that_their_scales_say(make: Any, form: str, tmp_path: Path) -> None:
    folder, file = make(tmp_path)
    found, values = quantized(load_file(file), form)
    parts = []
    for name, tensors in (("short", found), ("wide", values)):
        save_file(_contiguous(tensors), tmp_path / f"{name}.safetensors")
        read = read_checkpoint(tmp_path / f"{name}.safetensors", like=open_base(folder, None))
        parts.append({f"{part.name}.{key}": one for part in read.components for key, one in part.tensors.items()})
    short, wide = parts
    assert short.keys() == wide.keys()
    for name, tensor in wide.items():
        if tensor.dtype == "F16":
            assert (short[name].dtype, short[name].shape) == ("F16", tensor.shape)
            assert bytes(short[name].read()) == bytes(tensor.read()), name


@pytest.mark.drawn
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_folder_in_8_bits_has_the_same_values(kind: torch.dtype, store: WeightStore, tmp_path: Path) -> None:
    folder, _ = sd15(tmp_path)
    (file,) = (folder / "unet").glob("*.safetensors")
    short = {name: tensor.to(kind) for name, tensor in load_file(file).items()}
    save_file(short, file)
    externalize(store, "short", folder)
    found = load_from_store(store.path, "short")["unet"]
    for name, tensor in short.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), tensor.float()), name
    (told,) = unpacked_types(read_checkpoint(folder))
    assert told == f"unpacked {sum(2 * one.numel() for name, one in short.items() if name.endswith('.weight'))}"


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["auto", "auto without F16", "float32"])
def test_double_precision_is_stored_in_single(dtype: str, store: WeightStore, tmp_path: Path) -> None:
    folder, file = sd15(tmp_path)
    made = {}
    for name, kind in (("single", torch.float32), ("double", torch.float64)):
        tensors = {key: one.to(kind) if one.is_floating_point() else one for key, one in load_file(file).items()}
        save_file(tensors, tmp_path / f"{name}.safetensors")
        like = open_base(without_weights(folder) if not made else folder.with_name("sd15-configs"), store)
        made[name] = externalize(store, name, tmp_path / f"{name}.safetensors", like=like, dtype=dtype)
    parts = [{name: part.module_key for name, part in manifest.components.items()} for manifest in made.values()]
    assert parts[0] == parts[1]
    assert not set(made["double"].extents) - set(made["single"].extents)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("names", "metadata", "expected"),
    [
        ((), {}, {}),
        (("v_pred",), {}, {"prediction_type": "v_prediction"}),
        (("v_pred", "ztsnr"), {}, {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
        ((), {"modelspec.prediction_type": "v"}, {"prediction_type": "v_prediction"}),
        ((), {"modelspec.prediction_type": "epsilon"}, {}),
    ],
)
@pytest.mark.parametrize("make", [sd15, sdxl])
def test_a_file_says_that_its_unet_predicts_velocities(
    make: Any,
    names: tuple[str, ...],
    metadata: dict[str, str],
    expected: dict[str, Any],
    store: WeightStore,
    tmp_path: Path,
) -> None:
    folder, file = make(tmp_path)
    save_file(load_file(file) | {name: torch.empty(0) for name in names}, file, metadata=metadata)
    manifest = externalize(store, "file", file, like=open_base(without_weights(folder), store))
    skeleton = store.skeleton(manifest)
    said = json.loads((skeleton / "scheduler" / "scheduler_config.json").read_text())
    assert said == expected | ({"timestep_spacing": "trailing"} if "ztsnr" in names else {})
    if not names:
        return
    solver = SolverFactory(skeleton, json.loads((skeleton / "model_index.json").read_text()))
    chosen = solver.configured("EulerDiscreteScheduler", {}).config
    assert {name: chosen[name] for name in expected} == expected
    assert (
        solver.configured("EulerDiscreteScheduler", {"prediction_type": "epsilon"}).config.prediction_type == "epsilon"
    )


@pytest.mark.drawn
@pytest.mark.parametrize("config", [{}, {"clip_sample": True, "skip_prk_steps": False}], ids=["silent", "written"])
def test_a_file_has_the_solver_and_the_size_of_its_base(
    config: dict[str, Any], store: WeightStore, tmp_path: Path
) -> None:
    """Settings that the pipelines of 2022 leave unsaid are mended by the folder's, which are the same then."""
    folder, file = sd15(tmp_path)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config | {"_diffusers_version": "0.6.0"}))
    unet = folder / "unet" / "config.json"
    unet.write_text(json.dumps(json.loads(unet.read_text()) | {"sample_size": 32, "_diffusers_version": "0.6.0"}))
    skeleton = store.skeleton(externalize(store, "file", file, like=open_base(folder, store)))
    assert pipeline_variant(skeleton) == pipeline_variant(folder)
    assert pipeline_variant(skeleton)["sample_width"] == 64
    assert settings_hash(skeleton) == settings_hash(folder)


def test_configs_alone_are_enough_for_a_file_that_has_everything(store: WeightStore, tmp_path: Path) -> None:
    folder, file = sd15(tmp_path)
    externalize(store, "file", file, like=open_base(without_weights(folder), store))
    found = load_from_store(store.path, "file")
    for name in found:
        assert same(found[name], weights_of(folder, name)), name


def test_names_are_those_that_diffusers_gives_them(tmp_path: Path) -> None:
    folder, file = sd15(tmp_path)
    checkpoint = read_checkpoint(file, like=open_base(without_weights(folder), None))
    parts = {part.name: part for part in checkpoint.components}
    for name, class_ in (("unet", UNet2DConditionModel), ("vae", AutoencoderKL)):
        stock = class_.from_single_file(str(file), config=str(folder), subfolder=name, torch_dtype=torch.float16)
        for key, tensor in stock.state_dict().items():
            data = bytearray(parts[name].tensors[key].read())
            assert torch.equal(torch.frombuffer(data, dtype=torch.float16).view(tensor.shape), tensor), key


def test_what_a_file_has_replaces_what_its_base_has(store: WeightStore, tmp_path: Path) -> None:
    """A VAE alone is a file as well: everything else is the base's."""
    folder, _ = sd15(tmp_path)
    other = tiny_vae().half().state_dict()
    save_file(_contiguous(vae_of_ldm(other, 2, prefix="")), tmp_path / "vae.safetensors")
    externalize(store, "base", folder)
    externalize(store, "mine", tmp_path / "vae.safetensors", like=open_base("base", store))
    found = load_from_store(store.path, "mine")
    assert same(found["vae"], other)
    assert same(found["unet"], weights_of(folder, "unet"))


def test_one_component_of_a_file_is_a_model_of_its_own(store: WeightStore, tmp_path: Path) -> None:
    folder, file = sd15(tmp_path)
    manifest = externalize(store, "clip", file, component="text_encoder", like=open_base(folder, store))
    assert (manifest.kind, list(manifest.components)) == ("embedding", ["text_encoder"])


def test_a_damaged_extent_is_repaired_from_the_single_file(store: WeightStore, tmp_path: Path) -> None:
    folder, file = sdxl(tmp_path)
    manifest = externalize(store, "file", file, like=open_base(without_weights(folder), store))
    for extent in {extent.pack: extent for extent in manifest.extents.values()}.values():
        data = bytearray((store.packs / extent.pack).read_bytes())
        data[extent.offset] ^= 1
        (store.packs / extent.pack).write_bytes(data)
    assert verify(store, "file", deep=True).damages
    repair(store)
    assert verify(store, "file", deep=True).damages == ()
    assert same(load_from_store(store.path, "file")["unet"], weights_of(folder, "unet"))


def test_what_is_not_like_its_base_is_refused_in_words(store: WeightStore, tmp_path: Path) -> None:
    folder, file = sd15(tmp_path)
    tensors = load_file(file)
    bare = open_base(without_weights(folder), store)

    def refusal(change: Mapping[str, torch.Tensor | None], base: Any = bare) -> str:
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(changed, tmp_path / "changed.safetensors")
        with pytest.raises(FormatError) as caught:
            externalize(store, "changed", tmp_path / "changed.safetensors", like=base)
        return str(caught.value)

    lost = "model.diffusion_model.out.0.weight"
    assert "its unet lacks 1 of" in refusal({lost: None})
    assert "conv_norm_out.weight" in refusal({lost: None})
    assert "conv_norm_out.weight has shape [3], that of" in refusal({lost: torch.rand(3)})
    without_vae = {key: None for key in tensors if key.startswith("first_stage_model")}
    assert f"has no vae, and neither has '{bare.name}'" in refusal(without_vae)
    weight = "model.diffusion_model.time_embed.0"
    assert "is the scale of a weight in F16, expected one of 8 bits" in refusal(
        {f"{weight}.scale_weight": torch.rand(1)}
    )
    short = torch.zeros(1, dtype=torch.float8_e4m3fn)
    assert "belongs to no weight" in refusal({f"{weight}.weight_scale_2": torch.rand(1), "scaled_fp8": short})
    marked = torch.frombuffer(bytearray(b'{"format": "mxfp6"}'), dtype=torch.uint8)
    assert "is in the format 'mxfp6', expected float8_e4m3fn" in refusal({f"{weight}.comfy_quant": marked})
    save_file({"a": torch.rand(3)}, tmp_path / "changed.safetensors")
    with pytest.raises(FormatError, match=r"its unet|none of its 1 tensors"):
        externalize(store, "changed", tmp_path / "changed.safetensors", like=open_base(folder, store))
    with pytest.raises(FormatError, match="a folder in the layout of diffusers; `like` is for a single"):
        externalize(store, "changed", folder, like=bare)
    assert store.find_manifest("changed") is None


def test_a_tensor_that_diffusers_misses_is_named(tmp_path: Path) -> None:
    save_file({"model.diffusion_model.out.2.weight": torch.rand(3)}, tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match=r"so it is hardly like that model \(it has no 'label_emb\..*'\)$"):
        read_checkpoint(tmp_path / "x.safetensors", like=open_base(sdxl(tmp_path)[0], None))


def test_what_is_no_base_is_refused(store: WeightStore, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no pipeline's folder \(no model_index.json\)"):
        open_base(tmp_path, store)
    with pytest.raises(StoreError, match="nothing"):
        open_base("nothing", store)
    folder, _ = sd15(tmp_path)
    with pytest.raises(SourceRefused):
        open_base(folder, store, [tmp_path / "elsewhere"])
    externalize(store, "clip", folder, component="text_encoder")
    with pytest.raises(FormatError, match="of kind 'embedding', expected a diffusion pipeline"):
        open_base("clip", store)
