"""Every layout in which ControlNets and T2I-Adapters are published answers a request as diffusers does, or is refused
by its kind when it is registered.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.seeding import seeded_random
from PIL import Image
from safetensors.torch import load_file, save_file

from configs.cluster import ClusterConfig
from deployments.local import LocalModels
from deployments.records import ControlNetUse, ImageRequest
from deployments.records.errors import ServiceError
from infra.bench.original_names import unet_of_ldm

pytestmark = pytest.mark.slow  # imports diffusers

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"
SDXL, FLUX = "digits-sdxl", "digits-flux"
HINTS = (4, 8, 8)  # the demo's latents have sides of four pixels
Tensors = dict[str, torch.Tensor]


class Written(NamedTuple):
    """A source that a request names, and the object of diffusers that makes the same."""

    path: Path
    judge: Any
    base: str = SDXL
    mode: int | None = None


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(MODELS / SDXL / "unet", torch_dtype=torch.float32)


def stirred(net: Any) -> Any:
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return net.eval()


def plain_net() -> Any:
    from diffusers import ControlNetModel

    return stirred(ControlNetModel.from_unet(unet(), conditioning_embedding_out_channels=HINTS))


def original(state: Mapping[str, torch.Tensor]) -> Tensors:
    """A ControlNet in the names of its original code."""
    own = {key: one for key, one in state.items() if not key.startswith("controlnet_")}
    found = {
        key.removeprefix("model.diffusion_model."): one for key, one in unet_of_ldm(own, layers_per_block=1).items()
    }
    for key, one in state.items():
        module, _, leaf = key.rpartition(".")
        if module.startswith("controlnet_down_blocks."):
            found[f"zero_convs.{module.rpartition('.')[2]}.0.{leaf}"] = one
        elif module == "controlnet_mid_block":
            found[f"middle_block_out.0.{leaf}"] = one
        elif module.startswith("controlnet_cond_embedding."):
            names = ["conv_in", *(f"blocks.{place}" for place in range(2 * len(HINTS) - 2)), "conv_out"]
            place = names.index(module.removeprefix("controlnet_cond_embedding."))
            found[f"input_hint_block.{2 * place}.{leaf}"] = one
    return found


def saved(tensors: Tensors, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: one.contiguous().clone() for key, one in tensors.items()}, folder / "control.safetensors")
    return folder / "control.safetensors"


def in_diffusers_names(folder: Path) -> Written:
    net = plain_net()
    return Written(saved(net.state_dict(), folder), net)


def in_original_names(folder: Path) -> Written:
    net = plain_net()
    return Written(saved(original(net.state_dict()), folder), net)


def in_a_whole_models_names(folder: Path) -> Written:
    net = plain_net()
    named = {f"control_model.{key}": one for key, one in original(net.state_dict()).items()}
    return Written(saved(named, folder), net)


def with_differences(folder: Path) -> Written:
    """Write the differences from the base, and a word that says so."""
    net, own = plain_net(), unet().state_dict()
    added = {key: 0.05 * torch.randn_like(one) if key in own else one for key, one in net.state_dict().items()}
    net.load_state_dict({key: own[key] + one if key in own else one for key, one in added.items()})
    return Written(saved({**original(added), "difference": torch.zeros(1)}, folder), net)


def control_lora(folder: Path) -> Written:
    """Low-rank halves of matrices and convolutions, whole copies of some tensors, nothing of others."""
    net, own = plain_net(), unet().state_dict()
    state = dict(net.state_dict())
    whole = original(state)
    names = {key: new for key in state if key in own for new in original({key: state[key]})}
    kept = {key: one for key, one in whole.items() if key not in names.values()}
    for key, new in names.items():
        if new.endswith(".weight") and own[key].ndim > 1:
            down = 0.1 * torch.randn(2, *own[key].shape[1:])
            up = 0.1 * torch.randn(own[key].shape[0], 2, *[1] * (own[key].ndim - 2))
            module = new.removesuffix(".weight")
            kept |= {f"{module}.up": up, f"{module}.down": down}
            state[key] = own[key] + (up.flatten(1) @ down.flatten(1)).reshape(own[key].shape)
        elif "norm" in key:
            kept[new] = state[key] = own[key] + 0.1
    net.load_state_dict(state)
    return Written(saved({**kept, "lora_controlnet": torch.zeros(0)}, folder), net)


def union_net() -> Any:
    import inspect

    from diffusers import ControlNetUnionModel

    config = dict(unet().config)
    keys = set(inspect.signature(ControlNetUnionModel.__init__).parameters)
    sizes = {"num_trans_channel": 48, "num_proj_channel": 48, "num_control_type": 8}
    own = {key: value for key, value in config.items() if key in keys}
    return stirred(ControlNetUnionModel(**own, **sizes, conditioning_embedding_out_channels=HINTS))


def union_file(folder: Path) -> Written:
    net = union_net()
    return Written(saved(net.state_dict(), folder), net, mode=7)


def union_folder(folder: Path) -> Written:
    net = union_net()
    net.save_pretrained(folder)
    return Written(folder, net, mode=0)


def adapter_net(**more: Any) -> Any:
    from diffusers import T2IAdapter

    net = T2IAdapter(channels=[48, 80], adapter_type="full_adapter_xl", downscale_factor=8, **more)
    return stirred(net)


def t2i_folder(folder: Path) -> Written:
    net = adapter_net(num_res_blocks=1)
    net.save_pretrained(folder)
    return Written(folder, net)


def t2i_file(folder: Path) -> Written:
    """Blocks in one row, without `adapter.` in front: SDXL's have a last group for the middle."""
    net = adapter_net(num_res_blocks=2)
    named = Tensors()
    for key, one in net.state_dict().items():
        match = re.match(r"adapter\.body\.(\d+)\.(?:resnets\.(\d+)\.)?(.+)", key)
        number = match and 2 * int(match[1]) + int(match[2] or 0)
        named[f"body.{number}.{match[3]}" if match else key.removeprefix("adapter.")] = one
    return Written(saved(named, folder), net)


def flux_net(num_mode: int | None = None) -> Any:
    from diffusers import FluxControlNetModel

    config = json.loads((MODELS / FLUX / "transformer" / "config.json").read_text())
    keys = ("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "axes_dims_rope")
    own = {key: config[key] for key in (*keys, "pooled_projection_dim")}
    return stirred(FluxControlNetModel(**own, num_layers=2, num_single_layers=1, num_mode=num_mode))


def flux_file(folder: Path) -> Written:
    net = flux_net()
    return Written(saved(net.state_dict(), folder), net, FLUX)


def flux_union_file(folder: Path) -> Written:
    net = flux_net(num_mode=5)
    return Written(saved(net.state_dict(), folder), net, FLUX, mode=4)


WRITERS: Mapping[str, Callable[[Path], Written]] = {
    writer.__name__: writer
    for writer in (
        *(in_diffusers_names, in_original_names, in_a_whole_models_names, with_differences, control_lora),
        *(union_file, union_folder, t2i_folder, t2i_file, flux_file, flux_union_file),
    )
}


def models_of(written: Written, store: Path) -> LocalModels:
    config = {
        "store": {"path": str(store)},
        "models": [{"id": written.base, "path": str(MODELS / written.base), "dtype": "float32"}],
        "adapters": [{"id": "control", "path": str(written.path), "base": [written.base]}],
    }
    return LocalModels(ClusterConfig.model_validate(config))


def expected_of(written: Written, image: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    import diffusers

    kind = type(written.judge).__name__
    cls, part, name = {
        "ControlNetModel": (diffusers.StableDiffusionXLControlNetPipeline, "controlnet", "image"),
        "ControlNetUnionModel": (diffusers.StableDiffusionXLControlNetUnionPipeline, "controlnet", "control_image"),
        "T2IAdapter": (diffusers.StableDiffusionXLAdapterPipeline, "adapter", "image"),
        "FluxControlNetModel": (diffusers.FluxControlNetPipeline, "controlnet", "control_image"),
    }[kind]
    more = {} if written.base == FLUX else {"add_watermarker": False}
    stock = cls.from_pretrained(MODELS / written.base, dtype=torch.float32, **{part: written.judge}, **more)
    stock.set_progress_bar_config(disable=True)
    scale = {"adapter": "adapter_conditioning_scale"}.get(part, "controlnet_conditioning_scale")
    call: dict[str, Any] = {name: Image.fromarray(image), scale: 0.8}
    if written.mode is not None:
        call["control_mode"] = written.mode
    generator = torch.Generator().manual_seed(1)
    [found] = stock(**options, **call, generator=generator, output_type="np").images
    return np.asarray((found * 255).round())


@pytest.mark.drawn
@pytest.mark.parametrize("name", list(WRITERS))
def test_what_is_registered_answers_as_diffusers_does(tmp_path: Path, name: str) -> None:
    written = WRITERS[name](tmp_path / "source")
    models = models_of(written, tmp_path / "store")
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    options = {"prompt": "a handwritten five", "num_inference_steps": 3, "width": 32, "height": 32}
    options["guidance_scale"] = 3.0
    if written.base == FLUX:
        options["max_sequence_length"] = 32
    use = ControlNetUse(name="control", image=image, scale=0.8, mode=written.mode)
    [found] = models.generate(ImageRequest(model=written.base, seed=1, control=(use,), **options)).images
    expected = expected_of(written, image, options)
    assert np.abs(found - expected).max() <= 1
    [plain] = models.generate(ImageRequest(model=written.base, seed=1, **options)).images
    assert np.abs(found.astype(int) - plain).max() > 4


def test_the_original_names_are_those_that_diffusers_translates(tmp_path: Path) -> None:
    """With as many layers that read the image as the published ones have."""
    from diffusers import ControlNetModel
    from diffusers.loaders.single_file_utils import convert_controlnet_checkpoint

    from weights.formats.control_files import read_control_file
    from weights.operations.base_pipeline import open_base

    named = _original_with_eight(ControlNetModel.from_unet(unet()).state_dict())
    translated = convert_controlnet_checkpoint(dict(named), {"layers_per_block": 1})
    (part,) = read_control_file(saved(named, tmp_path), open_base(MODELS / SDXL, None)).components
    expected = {key: one for key, one in translated.items() if one is not None}
    assert part.tensors.keys() >= expected.keys()
    for key, one in expected.items():
        assert bytes(part.tensors[key].read()) == one.contiguous().numpy().tobytes()


def _original_with_eight(state: Mapping[str, torch.Tensor]) -> Tensors:
    own = {key: one for key, one in state.items() if not key.startswith("controlnet_cond_embedding.")}
    names = ["conv_in", *(f"blocks.{place}" for place in range(6)), "conv_out"]
    return original(own) | {
        f"input_hint_block.{2 * place}.{leaf}": state[f"controlnet_cond_embedding.{name}.{leaf}"]
        for place, name in enumerate(names)
        for leaf in ("weight", "bias")
    }


REFUSED = {
    "lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.down.0.weight": "a ControlNet-LLLite",
    "mid_convs.0.0.weight": "a ControlNeXt",
    "control_all_x_embedder.2-1.weight": "a ControlNet of Z-Image",
    "control_img_in.weight": "a ControlNet of Qwen-Image",
    "controlnet_blocks.0.linear.weight": "a ControlNet of Flux in MistoLine's layout",
    "pos_embed_input.proj.weight": "a ControlNet of Stable Diffusion 3",
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_kind_that_is_not_read_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    file = saved({name: torch.zeros(4, 4), "other.weight": torch.zeros(4, 4)}, tmp_path)
    with pytest.raises(ServiceError, match=f"{REFUSED[name]}.*not served; in one file are read: ControlNets of"):
        models_of(Written(file, None), tmp_path / "store")


def test_a_controlnet_xs_in_one_file_says_what_it_lacks(tmp_path: Path) -> None:
    file = saved({"control_to_base_for_conv_in.weight": torch.zeros(4, 4)}, tmp_path)
    with pytest.raises(ServiceError, match=r"a ControlNet-XS without its config\.json, .* put it into a folder beside"):
        models_of(Written(file, None), tmp_path / "store")


def test_a_controlnet_xs_in_a_folder_answers_as_diffusers_does(tmp_path: Path) -> None:
    """Its UNet has two layers in each block, and the demo's one."""
    import diffusers

    base = tmp_path / "base"
    shutil.copytree(MODELS / SDXL, base)
    config = {key: one for key, one in unet().config.items() if not key.startswith("_")}
    model = diffusers.UNet2DConditionModel(**config | {"layers_per_block": 2}).eval()
    model.save_pretrained(base / "unet")
    net = diffusers.ControlNetXSAdapter.from_unet(
        model, size_ratio=0.5, conditioning_embedding_out_channels=HINTS, num_attention_heads=[2, 2]
    )
    stirred(net).save_pretrained(tmp_path / "net")
    models = LocalModels(
        ClusterConfig.model_validate(
            {
                "store": {"path": str(tmp_path / "store")},
                "models": [{"id": "deep", "path": str(base), "dtype": "float32"}],
                "adapters": [{"id": "control", "path": str(tmp_path / "net"), "base": ["deep"]}],
            }
        )
    )
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    options: dict[str, Any] = {"prompt": "a five", "num_inference_steps": 3, "width": 32, "height": 32}
    options["guidance_scale"] = 3.0
    use = ControlNetUse(name="control", image=image, scale=0.8)
    [found] = models.generate(ImageRequest(model="deep", seed=1, control=(use,), **options)).images
    stock = diffusers.StableDiffusionXLControlNetXSPipeline.from_pretrained(
        base, dtype=torch.float32, controlnet=net, add_watermarker=False
    )
    stock.set_progress_bar_config(disable=True)
    call = {"image": Image.fromarray(image), "controlnet_conditioning_scale": 0.8, "output_type": "np"}
    [expected] = stock(**options, **call, generator=torch.Generator().manual_seed(1)).images
    assert np.abs(found - (expected * 255).round()).max() <= 1
    [plain] = models.generate(ImageRequest(model="deep", seed=1, **options)).images
    assert np.abs(found.astype(int) - plain).max() > 4


def test_a_control_is_refused_where_its_tensors_do_not_fit(tmp_path: Path) -> None:
    state = original(plain_net().state_dict())
    cases: list[tuple[Tensors, str, str]] = [
        ({key: one for key, one in state.items() if "zero_convs.2" not in key}, SDXL, "2 tensors missing|missing for"),
        ({**state, "zero_convs.0.0.more": torch.zeros(1)}, SDXL, "has no place for"),
        ({**state, "odd.weight": torch.zeros(1)}, SDXL, "'odd.weight' is none of a ControlNet's"),
        (state, FLUX, "a ControlNet of Stable Diffusion or SDXL, and .* has no unet"),
        ({**state, "input_blocks.0.0.weight": torch.zeros(4)}, SDXL, "tensor 'conv_in.weight' has shape"),
        ({**state, "lora_controlnet": torch.zeros(0), "time_embed.0.up": torch.zeros(3, 2)}, SDXL, "lacks a half of"),
        (flux_net().state_dict(), SDXL, "a ControlNet of Flux, and .* has no transformer"),
        (adapter_net(in_channels=2).state_dict(), SDXL, "a T2I-Adapter that reads 128 numbers of a patch"),
    ]
    for place, (tensors, base, message) in enumerate(cases):
        file = saved(tensors, tmp_path / str(place))
        with pytest.raises(ServiceError, match=message):
            models_of(Written(file, None, base), tmp_path / "store")


def test_a_control_in_one_file_is_no_model_and_says_what_it_is(tmp_path: Path) -> None:
    from weights.formats.checkpoint import read_checkpoint
    from weights.records.errors import FormatError

    for writer, what in ((in_original_names, "a ControlNet of Stable Diffusion or SDXL"), (t2i_file, "a T2I-Adapter")):
        path = writer(tmp_path / writer.__name__).path
        with pytest.raises(FormatError, match=f"{what} in one file, without a config: .* register it as an adapter"):
            read_checkpoint(path)


def test_folders_of_other_controls_are_refused_by_their_classes(tmp_path: Path) -> None:
    for class_name in ("SparseControlNetModel", "HunyuanDiT2DControlNetModel", "SanaControlNetModel"):
        folder = tmp_path / class_name
        saved({"x.weight": torch.zeros(2, 2)}, folder).rename(folder / "diffusion_pytorch_model.safetensors")
        (folder / "config.json").write_text(json.dumps({"_class_name": class_name}))
        with pytest.raises(ServiceError, match=f"a {class_name}, which is not served as an adapter"):
            models_of(Written(folder, None), tmp_path / "store")


def test_a_file_is_stored_once_and_its_hash_is_the_folders(tmp_path: Path) -> None:
    from weights.storage.store import WeightStore

    net = plain_net()
    net.save_pretrained(tmp_path / "folder")
    file = saved(net.state_dict(), tmp_path / "file")
    keys = []
    for place, path in enumerate((tmp_path / "folder", file)):
        models = models_of(Written(path, None), tmp_path / f"store{place}")
        image = np.zeros((32, 32, 3), np.uint8)
        options = {"prompt": "a five", "num_inference_steps": 1, "width": 32, "height": 32}
        models.generate(
            ImageRequest(model=SDXL, seed=1, control=(ControlNetUse(name="control", image=image),), **options)
        )
        (part,) = WeightStore(tmp_path / f"store{place}").manifest("control").components.values()
        keys.append({name: ref.sha256 for name, ref in part.tensors.items()})
    assert keys[0] == keys[1]
    assert load_file(file).keys() == keys[0].keys()


def test_an_ip_adapter_of_flux_answers_and_is_for_flux_alone(tmp_path: Path) -> None:
    from diffusers import FluxTransformer2DModel
    from unit.deployments.engines.diffusion.ip_adapter_files import write_ip_adapter

    from deployments.records import ImagePromptUse

    net = FluxTransformer2DModel.from_pretrained(MODELS / FLUX / "transformer")
    folder = write_ip_adapter(tmp_path / "look", net, "flux")
    models = models_of(Written(folder, None, FLUX), tmp_path / "store")
    options: dict[str, Any] = {"prompt": "a five", "num_inference_steps": 2, "width": 32, "height": 32}
    options |= {"max_sequence_length": 32, "seed": 1, "model": FLUX}
    image = np.random.default_rng(0).integers(0, 256, (40, 32, 3), dtype=np.uint8)
    use = ImagePromptUse(name="control", image=image, scale=0.8)
    [found] = models.generate(ImageRequest(**options, ip_adapter=(use,))).images
    [plain] = models.generate(ImageRequest(**options)).images
    assert np.abs(found.astype(int) - plain).max() > 4
    with pytest.raises(ServiceError, match=f"an IP-Adapter that is of Flux, and '{SDXL}' has a UNet"):
        models_of(Written(folder, None, SDXL), tmp_path / "store")


def test_the_registry_reads_a_file_by_the_base_in_its_store(tmp_path: Path) -> None:
    from cluster.records.errors import ModelUnservable
    from cluster.registry.importing import import_checkpoint
    from configs.model import AdapterConfig, ModelConfig
    from deployments.engines.servable import why_unservable
    from weights.records.errors import WeightsError
    from weights.storage.store import WeightStore

    written = control_lora(tmp_path / "source")
    store = WeightStore(tmp_path / "store")
    adapter = AdapterConfig(id="control", path=written.path, base=(SDXL,))
    with pytest.raises(WeightsError, match=SDXL):
        import_checkpoint(store, adapter, why_unservable=why_unservable)
    for id_ in (SDXL, FLUX):
        import_checkpoint(store, ModelConfig(id=id_, path=MODELS / id_, dtype="float32"), why_unservable=why_unservable)
    import_checkpoint(store, adapter, why_unservable=why_unservable)
    manifest = store.manifest("control")
    assert (manifest.kind, manifest.class_name) == ("controlnet", "ControlNetModel")
    expected = written.judge.state_dict()
    assert {name: ref.shape for name, ref in manifest.components["controlnet"].tensors.items()} == {
        name: tuple(one.shape) for name, one in expected.items()
    }
    again = import_checkpoint(store, adapter, why_unservable=why_unservable)
    assert again.fingerprint == manifest.fingerprint
    whole = ModelConfig(id="model", path=written.path, like=SDXL)
    with pytest.raises(ModelUnservable, match="a ControlNet, no model: an adapter, with its models as base"):
        import_checkpoint(store, whole, why_unservable=why_unservable)
    other = AdapterConfig(id="other", path=written.path, base=(FLUX,))
    with pytest.raises(WeightsError, match=f"a ControlNet of Stable Diffusion or SDXL, and '{FLUX}'.* has no unet"):
        import_checkpoint(store, other, why_unservable=why_unservable)


@pytest.mark.drawn
@pytest.mark.parametrize("base", ["a model", "a folder"])
def test_a_control_of_one_file_is_rebuilt_by_the_base_that_it_was_read_by(tmp_path: Path, base: str) -> None:
    from weights.operations.base_pipeline import open_base
    from weights.operations.externalize import externalize
    from weights.operations.repair import repair, verify
    from weights.storage.store import WeightStore

    written, store = control_lora(tmp_path / "source"), WeightStore(tmp_path / "store")
    externalize(store, SDXL, MODELS / SDXL)
    like = open_base(SDXL if base == "a model" else MODELS / SDXL, store)
    manifest = externalize(store, "control", written.path, like=like)
    own = manifest.extents.keys() - store.manifest(SDXL).extents.keys()
    for extent in (manifest.extents[id_] for id_ in own):
        data = bytearray((store.packs / extent.pack).read_bytes())
        data[extent.offset : extent.offset + extent.nbytes] = bytes(extent.nbytes)
        (store.packs / extent.pack).write_bytes(data)
    assert verify(store, "control", deep=True).damages
    report = repair(store)
    assert report.damages == ()
    assert verify(store, "control", deep=True).damages == ()
    assert store.manifest("control").components == manifest.components


def test_a_config_with_files_is_checked_before_anything_starts(tmp_path: Path) -> None:
    from deployments.preflight import check_config

    file, path = tmp_path / "c.yaml", in_original_names(tmp_path / "source").path

    def problems_of(source: str) -> list[str]:
        file.write_text(
            f"models: [{{id: base, path: {source}}}]\nadapters: [{{id: control, path: {path}, base: [base]}}]\n"
            f"store: {{path: {tmp_path / 'store'}}}\n"
        )
        return [problem.text for problem in check_config(file)[2]]

    assert problems_of(str(MODELS / SDXL)) == []
    assert problems_of("s3://bucket/model") == []  # it is looked at when it is there
    [problem] = problems_of(str(MODELS / FLUX))
    assert "a ControlNet of Stable Diffusion or SDXL, and" in problem


@pytest.mark.drawn
@pytest.mark.parametrize("name", [name for name in WRITERS if "folder" not in name])
def test_a_damaged_file_is_refused_in_words(tmp_path: Path, name: str) -> None:
    """Its tensors may have any names and shapes."""
    from cluster.registry.importing import base_of
    from deployments.engines.servable import why_unservable
    from weights.formats.checkpoint import read_checkpoint
    from weights.formats.control_files import read_control_file
    from weights.operations.base_pipeline import open_base
    from weights.records.errors import FormatError

    written, random = WRITERS[name](tmp_path / "source"), seeded_random()
    base, tensors = open_base(MODELS / written.base, None), load_file(written.path)
    model = base_of(written.base, read_checkpoint(MODELS / written.base), "float32")
    shapes = ((), (0,), (3,), (1, 1), (2, 0), (7, 5), (1, 2, 3, 4), (4, 4, 3, 3), (48, 48, 3, 3))
    said: list[str | None] = []

    def refusal_of(file: Path) -> str | None:
        try:
            return why_unservable(read_control_file(file, base), (model,), "float32")
        except FormatError as error:
            return str(error)

    for _ in range(8):
        damaged = dict(tensors)
        for key in random.sample(sorted(tensors), 3):
            one = damaged.pop(key)
            match random.choice(("shape", "name", "none", "number")):
                case "shape":
                    damaged[key] = torch.zeros(random.choice(shapes))
                case "name":
                    damaged[f"{key}.{random.choice(('up', 'down', 'weight', 'x'))}"] = one
                case "number":
                    damaged[re.sub(r"\d+", str(random.choice((0, 9, 99, 99999))), key, count=1)] = one
        file = saved(damaged, tmp_path / "damaged")
        said.append(refusal_of(file))
    assert all(one is None or (one.startswith(str(tmp_path)) and "\n" not in one) for one in said), said
