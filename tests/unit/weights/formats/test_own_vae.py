"""A VAE in the place of a pipeline's own: a folder or a file, and everything else is shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from safetensors.torch import save_file
from unit.weights.comparing import same
from unit.weights.formats.test_single_file import _contiguous, sd15, tiny_clip, tiny_vae, weights_of

from infra.bench.original_names import vae_of_ldm
from weights.formats.checkpoint import read_checkpoint
from weights.loading.loader import load_from_store
from weights.operations.base_pipeline import open_base
from weights.operations.externalize import externalize
from weights.records.errors import FormatError
from weights.storage.store import WeightStore


def other_vae(folder: Path) -> dict[str, torch.Tensor]:
    vae = tiny_vae().half()
    vae.register_to_config(scaling_factor=0.5)
    vae.save_pretrained(folder)
    return vae.state_dict()


@pytest.mark.drawn
@pytest.mark.parametrize("form", ["folder", "pipeline", "original file", "file of diffusers"])
def test_it_replaces_the_models_own_and_shares_the_rest(form: str, store: WeightStore, tmp_path: Path) -> None:
    folder, _ = sd15(tmp_path)
    tensors = other_vae(tmp_path / "other" / "vae")
    path = tmp_path / "other" / "vae"
    if form == "pipeline":
        path = path.parent
        (path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    elif form == "original file":
        path = tmp_path / "vae.safetensors"
        save_file(_contiguous(vae_of_ldm(tensors, 2, prefix="")), path)
    elif form == "file of diffusers":
        (path,) = path.glob("*.safetensors")
    plain = externalize(store, "plain", folder)
    mine = externalize(store, "mine", folder, parts={"vae": path})
    found = load_from_store(store.path, "mine")
    assert same(found["vae"], tensors)
    for name in ("unet", "text_encoder"):
        assert mine.components[name].module_key == plain.components[name].module_key
        assert same(found[name], weights_of(folder, name))
    assert mine.components["vae"].module_key != plain.components["vae"].module_key
    config = json.loads((store.skeleton(mine) / "vae" / "config.json").read_text())
    assert config["scaling_factor"] == (0.5 if path.is_dir() else AutoencoderKL().config.scaling_factor)
    assert externalize(store, "mine", folder, parts={"vae": path}) == mine
    assert externalize(store, "mine", folder) != mine
    assert store.manifest("mine").components["vae"].module_key == plain.components["vae"].module_key


def test_it_goes_with_a_single_file(store: WeightStore, tmp_path: Path) -> None:
    folder, file = sd15(tmp_path)
    tensors = other_vae(tmp_path / "vae")
    externalize(store, "mine", file, like=open_base(folder, store), parts={"vae": tmp_path / "vae"})
    found = load_from_store(store.path, "mine")
    assert same(found["vae"], tensors)
    assert same(found["unet"], weights_of(folder, "unet"))


def test_a_changed_vae_is_another_version(store: WeightStore, tmp_path: Path) -> None:
    folder, _ = sd15(tmp_path)
    other_vae(tmp_path / "vae")
    before = externalize(store, "mine", folder, parts={"vae": tmp_path / "vae"})
    tensors = other_vae(tmp_path / "vae")
    after = externalize(store, "mine", folder, parts={"vae": tmp_path / "vae"})
    assert after.fingerprint != before.fingerprint
    assert same(load_from_store(store.path, "mine")["vae"], tensors)


def test_what_is_no_vae_of_the_model_is_refused_in_words(tmp_path: Path) -> None:
    folder, _ = sd15(tmp_path)
    for path, words in (
        (tmp_path / "nothing", "expected a folder of diffusers or a .safetensors file"),
        (folder / "unet", "of class 'UNet2DConditionModel', the model's is AutoencoderKL"),
        (next((folder / "unet").glob("*.safetensors")), "vae"),
    ):
        with pytest.raises(FormatError, match=words):
            read_checkpoint(folder, parts={"vae": path})
    wide = AutoencoderKL(block_out_channels=(32,), latent_channels=16)
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(FormatError, match="latents of 16 channels and 1 sizes, the model's have 4 and 2"):
        read_checkpoint(folder, parts={"vae": tmp_path / "wide"})
    tiny_clip(32).save_pretrained(tmp_path / "clip")
    with pytest.raises(FormatError, match="has no VAE to replace"):
        read_checkpoint(tmp_path / "clip", parts={"vae": tmp_path / "wide"})


def small_vae(folder: Path, *, num_sizes: int = 2, channels: int = 4) -> dict[str, torch.Tensor]:
    sizes, ones = (8,) * num_sizes, (1,) * num_sizes
    vae = AutoencoderTiny(
        encoder_block_out_channels=sizes,
        decoder_block_out_channels=sizes,
        num_encoder_blocks=ones,
        num_decoder_blocks=ones,
        latent_channels=channels,
    )
    vae.save_pretrained(folder)
    return vae.state_dict()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("names", [("preview_vae",), ("vae",), ("vae", "preview_vae")])
def test_a_small_one_stands_beside_the_own_or_in_its_place(
    names: tuple[str, ...], store: WeightStore, tmp_path: Path
) -> None:
    folder, _ = sd15(tmp_path)
    tensors, plain = small_vae(tmp_path / "small"), externalize(store, "plain", folder)
    mine = externalize(store, "mine", folder, parts=dict.fromkeys(names, tmp_path / "small"))
    found, skeleton = load_from_store(store.path, "mine"), store.skeleton(mine)
    assert set(found) == {*plain.components, *names}
    for name in names:
        assert same(found[name], tensors)
        assert mine.components[name].class_name == "AutoencoderTiny"
        assert AutoencoderTiny.from_config(AutoencoderTiny.load_config(skeleton / name)).config.latent_channels == 4
    if "vae" in names:
        assert json.loads((skeleton / "model_index.json").read_text())["vae"] == ["diffusers", "AutoencoderTiny"]
    else:
        assert mine.components["vae"].module_key == plain.components["vae"].module_key
        small_vae(tmp_path / "small")
        assert externalize(store, "mine", folder, parts={"preview_vae": tmp_path / "small"}) != mine


def test_what_cannot_make_its_partial_images_is_refused_in_words(tmp_path: Path) -> None:
    folder, file = sd15(tmp_path)
    small_vae(tmp_path / "deep", num_sizes=4)
    small_vae(tmp_path / "wide", channels=16)
    for path, words in (
        (file, "preview_vae: .* expected a folder of diffusers with an AutoencoderTiny"),
        (folder, "preview_vae: .* of class 'AutoencoderKL', the model's is AutoencoderKL, expected an AutoencoderTiny"),
        (tmp_path / "deep", "preview_vae: .* latents of 4 channels and 4 sizes, the model's have 4 and 2"),
        (tmp_path / "wide", "preview_vae: .* latents of 16 channels and 2 sizes, the model's have 4 and 2"),
    ):
        with pytest.raises(FormatError, match=words):
            read_checkpoint(folder, parts={"preview_vae": path})
