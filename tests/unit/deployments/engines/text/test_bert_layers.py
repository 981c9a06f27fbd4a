"""The layers of BERT and its relatives, against transformers' own forward of the same module."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CamembertConfig,
    CamembertModel,
    DistilBertConfig,
    DistilBertModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from deployments.engines.nn import few_rows
from deployments.engines.text import native_encoder
from deployments.engines.text.forwards import has_bert_layers, token_vectors

PAD = 1
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 70,
    "pad_token_id": PAD,
}
MODELS = [
    (BertModel, BertConfig),
    (RobertaModel, RobertaConfig),
    (XLMRobertaModel, XLMRobertaConfig),
    (CamembertModel, CamembertConfig),
]


@pytest.fixture
def without_kernels(monkeypatch):
    for module in (few_rows, native_encoder):
        monkeypatch.setattr(module, "load_kernels", lambda: None)


def _random_texts(lengths):
    longest = max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(5, 97, (len(lengths), longest)) * mask + PAD * (1 - mask), mask


@pytest.mark.parametrize("lengths", [[1], [23], [9, 9, 9], [31, 4, 17]])
@pytest.mark.parametrize(("model", "config"), MODELS)
def test_equals_stock(model, config, lengths):
    """Padding has vectors, too, which nobody reads."""
    module = model(config(**SIZES, type_vocab_size=2)).eval()
    ids, mask = _random_texts(lengths)
    with torch.no_grad():
        stock = module(ids, attention_mask=mask).last_hidden_state
        ours = token_vectors(module, ids, mask)
    assert torch.allclose(ours[mask.bool()], stock[mask.bool()], atol=1e-5)


@pytest.mark.parametrize("lengths", [[1], [23], [9, 9, 9], [31, 4, 17]])
@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.usefixtures("without_kernels")
def test_equals_stock_bit_for_bit_without_kernels(model, config, lengths):
    module = model(config(**SIZES, type_vocab_size=2)).eval()
    ids, mask = _random_texts(lengths)
    with torch.no_grad():
        stock = module(ids, attention_mask=mask).last_hidden_state
        ours = token_vectors(module, ids, mask)
    assert has_bert_layers(module)
    assert all(torch.equal(mine[:n], other[:n]) for mine, other, n in zip(ours, stock, lengths, strict=True))


def test_bfloat16_is_as_near_to_float32_as_stock_s() -> None:
    """Products of bfloat16 may be the kernels', which sum in another order; what is left are its own roundings."""
    module = BertModel(BertConfig(**SIZES)).eval()
    half = copy.deepcopy(module).to(torch.bfloat16)
    ids, mask = _random_texts([30])
    with torch.no_grad():
        exact = module(ids, attention_mask=mask).last_hidden_state
        stock, ours = half(ids, attention_mask=mask).last_hidden_state, token_vectors(half, ids, mask)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).abs().mean() < 1.25 * (stock - exact).abs().mean()


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
@pytest.mark.usefixtures("without_kernels")
def test_takes_the_config_s_activation(activation):
    module = BertModel(BertConfig(**SIZES, hidden_act=activation)).eval().to(torch.bfloat16)
    ids, mask = _random_texts([12])
    with torch.no_grad():
        assert torch.equal(token_vectors(module, ids, mask), module(ids, attention_mask=mask).last_hidden_state)


def test_runs_the_hooks_of_products():
    """A LoRA is a hook of the layer that it changes."""
    module, (ids, mask) = BertModel(BertConfig(**SIZES)).eval(), _random_texts([6])
    with torch.no_grad():
        before = token_vectors(module, ids, mask)
        module.encoder.layer[1].output.dense.register_forward_hook(lambda layer, inputs, output: 2 * output)
        after = token_vectors(module, ids, mask)
        assert torch.allclose(after, module(ids, attention_mask=mask).last_hidden_state, atol=1e-5)
    assert not torch.allclose(before, after)


def test_other_modules_keep_their_own_forward():
    assert not has_bert_layers(DistilBertModel(DistilBertConfig(vocab_size=97, dim=48, n_heads=4, n_layers=1)))
    assert not has_bert_layers(BertModel(BertConfig(**SIZES, attn_implementation="eager")))
    assert not has_bert_layers(BertModel(BertConfig(**SIZES, is_decoder=True)))
    own = type("BertModel", (BertModel,), {"__module__": __name__})  # which may do anything
    assert not has_bert_layers(own(BertConfig(**SIZES)))


def test_a_part_that_is_not_the_known_one_leaves_all_to_stock(monkeypatch, caplog):
    module = BertModel(BertConfig(**SIZES))
    assert has_bert_layers(module)
    layer = type(module.encoder.layer[0])
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states, *inputs, **options: hidden_states)
    assert not has_bert_layers(module)
    assert "BertLayer.forward of this version is another one" in caplog.text
