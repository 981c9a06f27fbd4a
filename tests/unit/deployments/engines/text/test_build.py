"""Modules around given tensors: nothing copied, nothing forgotten, nothing on meta."""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deployments.engines.building.build import build_module
from deployments.engines.records.protocol import EngineError


def read_only(tensors):
    """The tensors as views of memory that numpy will not write."""
    views = {}
    for name, tensor in tensors.items():
        array = np.frombuffer(tensor.numpy().tobytes(), dtype=np.uint8)
        assert not array.flags.writeable
        views[name] = torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
    return views


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", ["clip", "clip_projection", "t5"])
def test_every_parameter_is_a_given_tensor(request, name):
    encoder = request.getfixturevalue(name)
    tensors = read_only(load_file(encoder.folder / "model.safetensors"))
    module = build_module("transformers", None, encoder.folder, tensors)
    assert type(module) is type(encoder.stock)
    assert {p.data_ptr() for p in module.parameters()} == {t.data_ptr() for t in tensors.values()}
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    ids = torch.tensor([[5, 6, 7, encoder.tokenizer.eos_token_id]])
    with torch.no_grad():
        assert torch.allclose(module(ids)[0], encoder.stock(ids)[0], atol=1e-5)


@pytest.mark.parametrize("kept", ["shared.weight", "encoder.embed_tokens.weight"])
def test_t5_takes_its_embedding_under_either_name(t5, kept):
    tensors = load_file(t5.folder / "model.safetensors")
    tensors[kept] = tensors.pop("shared.weight")
    module = build_module("transformers", "T5EncoderModel", t5.folder, tensors)
    assert module.shared.weight is module.encoder.embed_tokens.weight
    assert module.shared.weight.data_ptr() == tensors[kept].data_ptr()


def test_names_of_older_checkpoints(clip):
    """CLIP text encoders saved by transformers 4: a prefix, and a buffer that is computed today."""
    tensors = {f"text_model.{name}": t for name, t in load_file(clip.folder / "model.safetensors").items()}
    old = {**tensors, "text_model.embeddings.position_ids": torch.arange(10)[None]}
    module = build_module("transformers", "CLIPTextModel", clip.folder, old)
    assert {p.data_ptr() for p in module.parameters()} == {t.data_ptr() for t in tensors.values()}


def test_old_attention_names_of_a_vae(tmp_path):
    from diffusers import AutoencoderKL

    AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    new_to_old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for name, tensor in tensors.items():
        for new, former in new_to_old.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{former}.")
        old[name] = tensor
    assert old.keys() != tensors.keys()
    module = build_module("diffusers", "AutoencoderKL", tmp_path, old)
    assert all(p.data_ptr() == tensors[name].data_ptr() for name, p in module.named_parameters())


def test_a_persistent_buffer_is_taken_too(tmp_path):
    from diffusers import SD3Transformer2DModel

    sizes = {"joint_attention_dim": 4, "caption_projection_dim": 8, "pooled_projection_dim": 4}
    heads = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 8}
    SD3Transformer2DModel(sample_size=4, pos_embed_max_size=4, **sizes, **heads).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    module = build_module("diffusers", None, tmp_path, tensors)
    assert "pos_embed.pos_embed" in dict(module.named_buffers())
    assert {t.data_ptr() for t in module.state_dict().values()} == {t.data_ptr() for t in tensors.values()}


def test_missing_unexpected_and_misshapen_tensors(clip):
    tensors = load_file(clip.folder / "model.safetensors")
    name = "final_layer_norm.weight"
    cases = [
        ({n: t for n, t in tensors.items() if n != name}, f"tensor '{name}' missing for a CLIPTextModel"),
        ({**tensors, "extra.weight": torch.zeros(1)}, "has no place for tensor 'extra.weight'"),
        ({**tensors, name: torch.zeros(9)}, rf"tensor '{name}' has shape \(9,\), the config asks for \(8,\)"),
        ({}, r"36 tensors \('.*', …\) missing"),
    ]
    for given, message in cases:
        with pytest.raises(EngineError, match=message) as caught:
            build_module("transformers", "CLIPTextModel", clip.folder, given)
        assert str(clip.folder) in str(caught.value)


def test_unknown_classes_and_configs(clip, tmp_path):
    with pytest.raises(EngineError, match=r"unknown library 'torch' \(known: diffusers, transformers\)"):
        build_module("torch", "Linear", clip.folder, {})
    with pytest.raises(EngineError, match=r"no model class 'CLIPTextModle' \(near names: CLIPTextModel"):
        build_module("transformers", "CLIPTextModle", clip.folder, {})
    with pytest.raises(EngineError, match="no model class 'CLIPTokenizer'"):
        build_module("transformers", "CLIPTokenizer", clip.folder, {})
    with pytest.raises(EngineError, match=r"config.json: cannot be read as JSON"):
        build_module("transformers", None, tmp_path, {})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineError, match="expected a JSON object, got list"):
        build_module("transformers", None, tmp_path, {})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"config\.json names no class"):
        build_module("transformers", None, tmp_path, {})
    shutil.copy(clip.folder / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 3}))
    with pytest.raises(EngineError, match="does not describe a CLIPTextModel"):
        build_module("transformers", None, tmp_path, {})


def test_builds_in_several_threads_stay_apart(clip, t5):
    """And modules that other threads make meanwhile get real parameters."""
    failures = []

    def build(encoder):
        try:
            tensors = load_file(encoder.folder / "model.safetensors")
            for _ in range(5):
                module = build_module("transformers", None, encoder.folder, tensors)
                assert not any(parameter.is_meta for parameter in module.parameters())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=build, args=(encoder,)) for encoder in (clip, t5, clip)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not torch.nn.Linear(2, 2).weight.is_meta
    assert not failures
