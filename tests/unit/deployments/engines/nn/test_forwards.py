"""Quick forwards of diffusers' attention and positions give the bits of stock's."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxPosEmbed

from deployments.engines.nn.forwards import make_quick


def quick_copy(stock):
    ours = copy.deepcopy(stock)
    make_quick(ours)
    assert type(ours) is not type(stock)
    return ours


def test_attention_has_the_bits_of_stocks():
    stock = Attention(64, cross_attention_dim=32, heads=2, dim_head=32)
    hidden, text = torch.randn(2, 16, 64), torch.randn(2, 7, 32)
    mask = torch.zeros(2, 7).masked_fill(torch.rand(2, 7) < 0.3, -1e9)[:, None]
    expected = stock(hidden, encoder_hidden_states=text, attention_mask=mask)
    assert torch.equal(quick_copy(stock)(hidden, encoder_hidden_states=text, attention_mask=mask), expected)


def test_joint_attention_has_the_bits_of_stocks():
    stock = FluxAttention(query_dim=64, heads=2, dim_head=32, added_kv_proj_dim=64, context_pre_only=False)
    hidden, text, ids = torch.randn(2, 16, 64), torch.randn(2, 7, 64), torch.randint(9, (23, 3)).float()
    angles = FluxPosEmbed(theta=10000, axes_dim=[8, 12, 12])(ids)
    options = {"hidden_states": hidden, "encoder_hidden_states": text, "image_rotary_emb": angles}
    for ours, expected in zip(quick_copy(stock)(**options), stock(**options), strict=True):
        assert torch.equal(ours, expected)


def test_an_option_that_the_processor_does_not_take_is_left_out():
    hidden = torch.randn(1, 4, 64)

    class Narrow(AttnProcessor2_0):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask)

    stock = Attention(64, heads=2, dim_head=32, processor=Narrow())
    assert torch.equal(quick_copy(stock)(hidden, unheard_of=1), stock(hidden))


@pytest.mark.parametrize("change", [lambda ids: ids + 1, lambda ids: ids[:5], lambda ids: ids.double()])
def test_positions_are_computed_when_they_change_and_only_then(monkeypatch, change):
    stock = FluxPosEmbed(theta=10000, axes_dim=[8, 12, 12])
    ours, ids = quick_copy(stock), torch.randint(9, (23, 3)).float()
    calls = []
    compute = FluxPosEmbed.forward
    monkeypatch.setattr(FluxPosEmbed, "forward", lambda self, ids: calls.append(self) or compute(self, ids))
    for asked in (ids, ids.clone(), change(ids), ids):
        assert all(map(torch.equal, ours(asked), compute(stock, asked)))
    assert len(calls) == 3


def test_making_quick_twice_changes_nothing():
    once = quick_copy(Attention(64, heads=2, dim_head=32))
    kind = type(once)
    make_quick(once)
    assert type(once) is kind


def test_a_forward_that_is_not_the_known_one_stays_stocks_and_is_said(monkeypatch, caplog):
    """As of another release of diffusers: nothing is slower or other without a word."""
    monkeypatch.setattr(Attention, "forward", lambda self, hidden_states: hidden_states + 1)
    module = torch.nn.Sequential(Attention(64, heads=2, dim_head=32))
    make_quick(module)
    assert type(module[0]) is Attention
    assert "attention_processor:Attention.forward of this version is another one" in caplog.text
    hidden = torch.randn(1, 4, 64)
    assert torch.equal(module(hidden), hidden + 1)


def test_a_class_of_the_same_name_elsewhere_is_left_alone():
    class Attention(torch.nn.Module):
        def forward(self, hidden):
            return hidden

    module = Attention()
    make_quick(module)
    assert type(module) is Attention
