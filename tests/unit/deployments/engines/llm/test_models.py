"""Folders and tensors that the model builder takes, shares or refuses."""

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import pytest
import torch

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.records.protocol import EngineError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", 0)


def folder_with(model, tmp_path, **changes):
    folder = shutil.copytree(model.folder, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tensors_are_shared_and_never_written(model, run_all, request_of, prompt_of):
    frozen, memory = {}, []
    for name, tensor in model.tensors.items():
        array = np.frombuffer(tensor.numpy().tobytes(), np.float32).reshape(tensor.shape)
        assert not array.flags.writeable  # a write would end the process
        memory.append(array)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")
            frozen[name] = torch.from_numpy(array)
    loaded = create_model(load_config(model.folder), frozen, CPU)
    for name, parameter in loaded.module.named_parameters():
        assert parameter.data_ptr() == frozen[name].data_ptr()
        assert not parameter.requires_grad
    outcome = run_all(
        LLMEngine(model.folder, frozen, LLMEngineConfig()), [request_of("r", prompt_of(9), max_tokens=5)]
    )["r"]
    assert outcome.token_ids == model.greedy(prompt_of(9), 5)
    for array, tensor in zip(memory, model.tensors.values(), strict=True):
        assert np.array_equal(array, tensor.numpy())


def test_tied_embeddings_share_one_tensor(tiny):
    tied = tiny("llama", 4, tie_word_embeddings=True)
    module = create_model(load_config(tied.folder), tied.tensors, CPU).module
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def test_buffers_of_old_checkpoints_are_ignored(model):
    old = model.tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    create_model(load_config(model.folder), old, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"up_proj.weight' of shape \(48, 32\) is missing",
        ),
        (lambda t: t.clear(), r"embed_tokens.weight' .* missing \(and 20 more\): 0 tensors given"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(7, 32)}),
            r"'lm_head.weight' has shape \(7, 32\), expected \(260, 32\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            "norm.weight' is torch.int8",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32).bfloat16()}),
            "norm.weight' is torch.bfloat16, expected torch.float32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, model):
    tensors = dict(model.tensors)
    change(tensors)
    with pytest.raises(EngineError, match=message):
        LLMEngine(model.folder, tensors, LLMEngineConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Lama2ForCausalLM"]}, "'Lama2ForCausalLM' .* nearest is LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' .* that is served"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' .* llama3",
        ),
        ({"num_hidden_layers": "two"}, "not a valid config"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "layers of type 'chunked_attention'"),
    ],
)
def test_configs_that_are_not_supported_are_refused(changes, message, model, tmp_path):
    with pytest.raises(EngineError, match=message):
        LLMEngine(folder_with(model, tmp_path, **changes), model.tensors, LLMEngineConfig())


@pytest.mark.parametrize("count", [0, 10**6, "many"])
def test_a_damaged_number_of_experts_is_refused_before_they_are_built(count, tiny, tmp_path):
    model = tiny("mixtral", 0, num_local_experts=5)
    with pytest.raises(EngineError, match=r"experts, expected 1 to 1024|not a valid config"):
        LLMEngine(folder_with(model, tmp_path, num_local_experts=count), model.tensors, LLMEngineConfig())


def test_the_model_type_stands_in_for_the_architecture(model, tmp_path):
    LLMEngine(folder_with(model, tmp_path, architectures=None), model.tensors, LLMEngineConfig())


def test_a_folder_without_config_or_tokenizer_is_refused(model, tmp_path):
    with pytest.raises(EngineError, match=r"config\.json: cannot be read as JSON"):
        LLMEngine(tmp_path, model.tensors, LLMEngineConfig())
    shutil.copy(model.folder / "config.json", tmp_path)
    with pytest.raises(EngineError, match="no tokenizer"):
        LLMEngine(tmp_path, model.tensors, LLMEngineConfig())
