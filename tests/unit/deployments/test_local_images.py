"""Images as input, from the record to the pixels: a digit becomes another, a ControlNet comes out of the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from configs.cluster import ClusterConfig
from deployments.local import LocalModels
from deployments.records import ControlNetUse, ImageRequest
from deployments.records.errors import InvalidRequest, ModelUnavailable, UnknownModel
from infra.bench.original_names import unet_of_ldm, vae_of_ldm
from weights.storage.store import WeightStore

# slow: imports diffusers. Engines have a test of each feature; here each goes the whole way, through a store.
pytestmark = [pytest.mark.slow, pytest.mark.drawn(5, of="file")]

MODELS = Path(__file__).parents[3] / "infra" / "demo" / "models"
SDXL = "digits-sdxl"
FIVE = {"model": SDXL, "prompt": "a handwritten five", "seed": 1, "num_inference_steps": 4, "width": 32, "height": 32}


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ControlNet that begins as stock's training does, but for residuals that are not zero."""
    from kit.tiny.parts import save_controlnet

    return save_controlnet(MODELS / SDXL / "unet", tmp_path_factory.mktemp("outline"))


@pytest.fixture(scope="module")
def style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of kohya's trainer, which changes the UNet and both text encoders."""
    from diffusers import StableDiffusionXLPipeline
    from safetensors.torch import save_file

    stock = StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for prefix, module, ending in [
        ("lora_unet_", stock.unet, "attn2.to_k"),
        ("lora_te1_text_model_", stock.text_encoder, "out_proj"),
        ("lora_te2_text_model_", stock.text_encoder_2.text_model, "fc1"),
    ]:
        for path, layer in module.named_modules():
            if path.endswith(ending):
                name = prefix + path.replace(".", "_")
                tensors[f"{name}.lora_down.weight"] = torch.randn(2, layer.in_features, generator=generator) * 0.3
                tensors[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, 2, generator=generator) * 0.3
                tensors[f"{name}.alpha"] = torch.tensor(2.0)
    file = tmp_path_factory.mktemp("style") / "style.safetensors"
    save_file(tensors, file)
    return file


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """UNet and VAE of the demo model in one file, in the names of Stability's code."""
    from safetensors.torch import load_file, save_file

    unet, vae = (load_file(MODELS / SDXL / name / "diffusion_pytorch_model.safetensors") for name in ("unet", "vae"))
    num_blocks = len({key.split(".")[2] for key in vae if key.startswith("encoder.down_blocks")})
    tensors = unet_of_ldm(unet, layers_per_block=1) | vae_of_ldm(vae, num_blocks)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        file := tmp_path_factory.mktemp("one") / "one.safetensors",
    )
    return file


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store in which models stay from one test to the next."""
    return tmp_path_factory.mktemp("models") / "store"


@pytest.fixture
def models(store: Path, outline: Path, style: Path, one_file: Path) -> LocalModels:
    config = {
        "store": {"path": str(store)},
        "models": [
            {"id": "one-file", "path": str(one_file), "like": SDXL, "dtype": "float32"},
            {"id": SDXL, "path": str(MODELS / SDXL), "dtype": "float32"},
        ],
        "adapters": [
            {"id": "outline", "path": str(outline), "base": [SDXL]},
            {"id": "style", "path": str(style), "base": [SDXL], "dtype": "float32"},
        ],
    }
    return LocalModels(ClusterConfig.model_validate(config))


def test_an_image_and_a_mask(models):
    [five] = models.generate(ImageRequest(**FIVE)).images
    little = {**FIVE, "prompt": "a handwritten eight", "init_image": five, "strength": 0.3}
    [near] = models.generate(ImageRequest(**little)).images
    [far] = models.generate(ImageRequest(**{**little, "strength": 1.0})).images
    assert np.abs(near.astype(int) - five).mean() < np.abs(far.astype(int) - five).mean()
    mask = np.zeros((32, 32), np.uint8)
    mask[16:] = 255
    [half] = models.generate(ImageRequest(**{**little, "strength": 1.0, "mask_image": mask})).images
    assert np.abs(half[:8].astype(int) - five[:8]).mean() < np.abs(half[20:].astype(int) - five[20:]).mean()


def test_a_model_in_one_file_is_that_of_its_folder(models, store):
    result = models.generate(ImageRequest(**{**FIVE, "model": "one-file"}))
    again = models.generate(ImageRequest(**FIVE))
    assert np.array_equal(result.images[0], again.images[0])
    one, folder = (WeightStore(store).manifest(name) for name in ("one-file", SDXL))
    assert [part.module_key for part in one.components.values()] == [p.module_key for p in folder.components.values()]
    assert not (store / "packs" / "one-file_weight_combined").exists()


def test_an_image_of_another_size_is_scaled_as_by_stock(models):
    from diffusers import StableDiffusionXLImg2ImgPipeline

    image = np.random.default_rng(3).integers(0, 256, (33, 35, 3), dtype=np.uint8)
    options = {"prompt": FIVE["prompt"], "num_inference_steps": 4, "strength": 0.5, "guidance_scale": 3.0}
    stock = StableDiffusionXLImg2ImgPipeline.from_pretrained(MODELS / SDXL, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(FIVE["seed"])
    [expected] = stock(**options, image=Image.fromarray(image), generator=generator, output_type="np").images
    result = models.generate(ImageRequest(model=SDXL, seed=FIVE["seed"], init_image=image, **options))
    assert result.images[0].shape == expected.shape == (32, 32, 3)
    assert np.abs(result.images[0] - expected * 255).max() < 2
    assert any("35x33 pixels were scaled to 32x32" in warning for warning in result.warnings)


def test_a_controlnet_is_a_component_of_the_store(models, store):
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    plain = models.generate(ImageRequest(**FIVE))
    control = (ControlNetUse(name="outline", image=image),)
    result = models.generate(ImageRequest(**FIVE, control=control))
    assert "outline" in result.switch.built
    assert np.abs(result.images[0].astype(int) - plain.images[0]).max() > 4
    off = (ControlNetUse(name="outline", image=image, scale=0),)
    assert np.array_equal(models.generate(ImageRequest(**FIVE, control=off)).images[0], plain.images[0])
    net, pipeline = (WeightStore(store).manifest(name) for name in ("outline", SDXL))
    assert (net.kind, net.class_name) == ("controlnet", "ControlNetModel")
    unet = {ref.sha256 for ref in pipeline.components["unet"].tensors.values()}
    shared = [ref for ref in net.components["controlnet"].tensors.values() if ref.sha256 in unet]
    assert len(shared) > 20  # its encoder is the UNet's own, and is stored once


def test_a_controlnet_of_another_type_equals_stock_with_that_of_its_model(tmp_path, store, outline):
    """As diffusers loads one for a pipeline: `from_pretrained(..., dtype=pipeline.dtype)`."""
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

    ControlNetModel.from_pretrained(outline, dtype=torch.float16).save_pretrained(tmp_path / "half")
    config = {
        "store": {"path": str(store)},
        "models": [{"id": SDXL, "path": str(MODELS / SDXL), "dtype": "float32"}],
        "adapters": [{"id": "half", "path": str(tmp_path / "half"), "base": [SDXL]}],
    }
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    models = LocalModels(ClusterConfig.model_validate(config))
    [found] = models.generate(ImageRequest(**FIVE, control=(ControlNetUse(name="half", image=image),))).images
    net = ControlNetModel.from_pretrained(tmp_path / "half", dtype=torch.float32)
    stock = StableDiffusionXLControlNetPipeline.from_pretrained(
        MODELS / SDXL, controlnet=net, dtype=torch.float32, add_watermarker=False
    )
    stock.set_progress_bar_config(disable=True)
    options = {"prompt": FIVE["prompt"], "num_inference_steps": 4, "output_type": "np"}
    generator = torch.Generator().manual_seed(FIVE["seed"])
    [expected] = (stock(**options, image=Image.fromarray(image), generator=generator).images * 255).round()
    assert np.abs(found - expected).max() <= 1

    config["adapters"][0]["dtype"] = "bfloat16"
    with pytest.raises(ModelUnavailable, match=f"half: a ControlNet in bfloat16, and '{SDXL}' is in float32"):
        LocalModels(ClusterConfig.model_validate(config))


def test_an_adapter_of_another_base_is_refused_when_the_models_are_opened(tmp_path, style):
    config = {
        "store": {"path": str(tmp_path / "store")},
        "models": [{"id": "flux", "path": str(MODELS / "digits-flux")}],
        "adapters": [{"id": "style", "path": str(style), "base": ["flux"]}],
    }
    with pytest.raises(ModelUnavailable, match=r"model 'style': .*expected a LoRA for 'flux', a FluxPipeline"):
        LocalModels(ClusterConfig.model_validate(config))


def test_a_lora_of_denoiser_and_text_encoders_equals_stock(models, style):
    from diffusers import StableDiffusionXLPipeline

    stock = StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    stock.load_lora_weights(str(style.parent), weight_name=style.name, adapter_name="style")
    options = {"prompt": FIVE["prompt"], "num_inference_steps": 4, "width": 32, "height": 32, "output_type": "np"}
    images = {}
    for scale in (0.0, 0.8):
        stock.set_adapters("style", scale)
        generator = torch.Generator().manual_seed(FIVE["seed"])
        [expected] = (stock(**options, generator=generator).images * 255).round()
        [images[scale]] = models.generate(ImageRequest(**FIVE, lora=({"name": "style", "scale": scale},))).images
        assert np.abs(images[scale] - expected).max() <= 1
    assert np.abs(images[0.0].astype(int) - images[0.8]).max() > 4


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("scheduler", "options", "steps", "guidance"),
    [
        ("LCMScheduler", {}, 4, 1.0),  # LCM
        ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}, 4, 0.0),  # Lightning
        ("DDIMScheduler", {"timestep_spacing": "trailing"}, 2, 0.0),  # Hyper-SD
        ("TCDScheduler", {}, 4, 0.0),  # TCD, and Hyper-SD of one step or of any number
    ],
)
def test_a_lora_of_few_steps_with_its_solver_equals_stock(models, style, scheduler, options, steps, guidance):
    import diffusers

    stock = diffusers.StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    stock.load_lora_weights(str(style.parent), weight_name=style.name)
    stock.scheduler = getattr(diffusers, scheduler).from_config(stock.scheduler.config, **options)
    asked = {**FIVE, "num_inference_steps": steps, "guidance_scale": guidance}
    call = {name: value for name, value in asked.items() if name not in ("model", "seed")}
    generator = torch.Generator().manual_seed(FIVE["seed"])
    [expected] = (stock(**call, generator=generator, output_type="np").images * 255).round()
    use = {"lora": ({"name": "style"},), "scheduler": scheduler, "scheduler_options": options}
    [image] = models.generate(ImageRequest(**asked, **use)).images
    assert np.abs(image - expected).max() <= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_image": np.zeros((16, 16, 3), np.uint8)}, "init_image: 16x16 pixels, expected the 32x32"),
        ({"control": [{"name": "outline", "image": np.zeros((8, 8, 3), np.uint8)}]}, "control: 8x8 pixels"),
        ({"lora": [{"name": "outline"}]}, "unknown adapter 'outline'"),
    ],
)
def test_what_is_refused(models, fields, message):
    with pytest.raises(InvalidRequest, match=message):
        models.generate(ImageRequest(**FIVE, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": [{"name": "style"}]}, r"no adapter 'style' for 'other' \(known: outline\)"),
        ({"lora": [{"name": "nobody"}]}, r"no adapter 'nobody' for 'other' \(known: outline\)"),
        (
            {"control": [{"name": "style", "image": np.zeros((32, 32, 3), np.uint8)}]},
            r"no ControlNet 'style' for 'other' \(known: outline\)",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused_before_anything_is_read(tmp_path, style, outline, fields, message):
    config = {
        "store": {"path": str(tmp_path / "store")},
        "models": [{"id": name, "path": str(MODELS / SDXL), "dtype": "float32"} for name in (SDXL, "other")],
        "adapters": [
            {"id": "style", "path": str(style), "base": [SDXL]},
            {"id": "outline", "path": str(outline), "base": [SDXL, "other"]},
        ],
    }
    with pytest.raises(UnknownModel, match=message):
        LocalModels(ClusterConfig.model_validate(config)).generate(ImageRequest(**{**FIVE, "model": "other"}, **fields))
    assert not (tmp_path / "store" / "models").exists() or not list((tmp_path / "store" / "models").iterdir())


def test_a_learned_word_equals_stock(tmp_path, store):
    from diffusers import StableDiffusionXLPipeline
    from safetensors.torch import save_file

    stock = StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    generator, vectors = torch.Generator().manual_seed(0), {}
    for key, encoder in (("clip_l", stock.text_encoder), ("clip_g", stock.text_encoder_2)):
        width = encoder.get_input_embeddings().embedding_dim
        vectors[key] = torch.randn(2, width, generator=generator)
    save_file(vectors, tmp_path / "inky.safetensors")
    config = {
        "store": {"path": str(store)},
        "models": [{"id": SDXL, "path": str(MODELS / SDXL), "dtype": "float32"}],
        "adapters": [{"id": "inky", "path": str(tmp_path / "inky.safetensors"), "base": [SDXL]}],
    }
    models = LocalModels(ClusterConfig.model_validate(config))
    prompts = ("a handwritten five", "a handwritten inky five")
    [plain], [image] = (models.generate(ImageRequest(**{**FIVE, "prompt": prompt})).images for prompt in prompts)
    stock.load_textual_inversion(
        {"inky": vectors["clip_l"]}, token="inky", text_encoder=stock.text_encoder, tokenizer=stock.tokenizer
    )
    stock.load_textual_inversion(
        {"inky": vectors["clip_g"]}, token="inky", text_encoder=stock.text_encoder_2, tokenizer=stock.tokenizer_2
    )
    options = {"prompt": prompts[1], "num_inference_steps": 4, "width": 32, "height": 32, "output_type": "np"}
    [expected] = (stock(**options, generator=torch.Generator().manual_seed(FIVE["seed"])).images * 255).round()
    assert np.abs(image - expected).max() <= 1
    assert np.abs(image.astype(int) - plain).max() > 4


def test_a_vae_of_its_own_equals_stock_with_it(tmp_path, store):
    from diffusers import StableDiffusionXLPipeline

    stock = StableDiffusionXLPipeline.from_pretrained(MODELS / SDXL, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stock.vae.decoder.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    stock.vae.save_pretrained(tmp_path / "vae")
    plain = {"id": SDXL, "path": str(MODELS / SDXL), "dtype": "float32"}
    config = {
        "store": {"path": str(store)},
        "models": [plain, {**plain, "id": "mine", "vae": str(tmp_path / "vae")}],
    }
    models = LocalModels(ClusterConfig.model_validate(config))
    images = {id_: models.generate(ImageRequest(**{**FIVE, "model": id_})).images[0] for id_ in (SDXL, "mine")}
    options = {"prompt": FIVE["prompt"], "num_inference_steps": 4, "width": 32, "height": 32, "output_type": "np"}
    [expected] = (stock(**options, generator=torch.Generator().manual_seed(FIVE["seed"])).images * 255).round()
    assert np.abs(images["mine"] - expected).max() <= 1
    assert np.abs(images["mine"].astype(int) - images[SDXL]).max() > 4
    ours, theirs = (WeightStore(store).manifest(name).components for name in ("mine", SDXL))
    assert {name for name in ours if ours[name].module_key != theirs[name].module_key} == {"vae"}
