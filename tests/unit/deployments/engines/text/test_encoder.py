"""CLIP and T5 encoders: stock outputs, shared forwards, refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from deployments.engines.building.skeletons import SkeletonPool
from deployments.engines.nn.batch_invariant import is_batch_invariant, make_batch_invariant
from deployments.engines.records.protocol import EngineError
from deployments.engines.text import encoder as encoders
from deployments.engines.text.encoder import load_text_encoder
from deployments.engines.text.tokens import TokenizedText

TEXTS = ["a 7", "", "one very long text that is cut", "naïve 汉字 \x00"]


def assert_close(ours: torch.Tensor, stock: torch.Tensor) -> None:
    assert ours.shape == stock.shape
    assert torch.allclose(ours, stock, atol=1e-5)


def stock_ids(encoder, texts, length):
    options = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
    return encoder.tokenizer(texts, **options).input_ids


@pytest.mark.parametrize("name", ["clip", "clip_projection"])
def test_clip_equals_stock(request, name):
    encoder = request.getfixturevalue(name)
    ids = stock_ids(encoder, TEXTS, 10)
    tokens = encoder.ours.tokenize(TEXTS)
    assert [encoder.ours._tokenizer.pad(text) for text in tokens] == [tuple(row) for row in ids.tolist()]
    with torch.no_grad():
        stock = encoder.stock(ids, output_hidden_states=True)
    pooled = stock.pooler_output if name == "clip" else stock.text_embeds
    for row, ours in enumerate(encoder.ours.encode(tokens)):
        assert sorted(ours) == ["penultimate", "pooled"]
        assert_close(ours["pooled"], pooled[row])
        assert_close(ours["penultimate"], stock.hidden_states[-2][row])


def test_t5_equals_stock(t5):
    ids = stock_ids(t5, TEXTS, 16)
    tokens = t5.ours.tokenize(TEXTS, max_length=16)
    assert [t5.ours._tokenizer.pad(text) for text in tokens] == [tuple(row) for row in ids.tolist()]
    with torch.no_grad():
        stock = t5.stock(ids)[0]
    for row, ours in enumerate(t5.ours.encode(tokens)):
        assert_close(ours["hidden"], stock[row])


def test_an_output_does_not_keep_its_batch_alive(clip, t5):
    output = clip.ours.encode(clip.ours.tokenize(["a", "b", "c"]))[0]["penultimate"]
    assert output.untyped_storage().nbytes() == output.nbytes
    short, _ = t5.ours.encode(t5.ours.tokenize(["a", "a longer one"], padding="trimmed"))
    assert short["hidden"].untyped_storage().nbytes() == short["hidden"].nbytes == 3 * 16 * 4


def test_nothing_to_do(clip):
    assert clip.ours.tokenize([]) == []
    assert clip.ours.encode([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda clip: clip.tokenize("one string"), "must be a sequence of strings, got 'one string'"),
        (lambda clip: clip.tokenize(["a", None]), "must be a sequence of strings"),
        (lambda clip: clip.tokenize(["a \ud83d"]), "an unpaired surrogate"),
        (lambda clip: clip.tokenize(["a"], max_length=0), "max_length 0: expected 1 to 10 tokens"),
        (lambda clip: clip.tokenize(["a"], max_length=11), "max_length 11: expected 1 to 10 tokens"),
        (lambda clip: clip.tokenize(["a"], padding="none"), "padding 'none': expected one of stock, trimmed"),
        (lambda clip: clip.accept_ids([]), "a text of 0 tokens: expected 1 to 10"),
        (lambda clip: clip.accept_ids((1,) * 11), "a text of 11 tokens: expected 1 to 10"),
        (lambda clip: clip.accept_ids((1, -2)), "token ids -2 to 1: expected 0 to 513"),
        (lambda clip: clip.encode([TokenizedText((1, 514))]), "token ids 1 to 514"),
        (lambda clip: clip.encode([TokenizedText((1,), padded_length=11)]), "a text of 11 tokens"),
    ],
)
def test_bad_input(clip, call, message):
    with pytest.raises(EngineError, match=message):
        call(clip.ours)


def test_a_folder_without_tokenizer(clip, tmp_path):
    tensors = clip.ours.module.state_dict()
    with pytest.raises(EngineError, match="there is no tokenizer"):
        load_text_encoder(clip.folder, "transformers", None, tmp_path, tensors)


def test_dtype_is_the_tensors_own(clip):
    tensors = {name: tensor.bfloat16() for name, tensor in clip.ours.module.state_dict().items()}
    half = load_text_encoder(clip.folder, "transformers", None, clip.tokenizer_folder, tensors)
    assert half.dtype == torch.bfloat16
    assert half.encode(half.tokenize(["a"]))[0]["pooled"].dtype == torch.bfloat16


@pytest.mark.parametrize("is_faster", [False, True])
def test_products_are_the_kernels_where_these_are_faster(clip, monkeypatch, is_faster):
    monkeypatch.setattr(encoders, "are_kernels_faster", lambda: is_faster)
    tensors = dict(clip.ours.module.state_dict())
    ours = load_text_encoder(clip.folder, "transformers", None, clip.tokenizer_folder, tensors)
    assert {is_batch_invariant(part) for part in ours.module.modules() if isinstance(part, nn.Linear)} == {is_faster}
    found, expected = (one.encode(one.tokenize(["a b"]))[0] for one in (ours, clip.ours))
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)


def test_a_kept_module_keeps_its_layers_and_is_not_walked_again(clip, monkeypatch):
    walked = []
    monkeypatch.setattr(encoders, "are_kernels_faster", lambda: True)
    monkeypatch.setattr(encoders, "make_batch_invariant", lambda module: walked.append(make_batch_invariant(module)))
    pool, factors = SkeletonPool(), (1.0, 0.5)

    def load(factor):
        tensors = {name: factor * tensor for name, tensor in clip.ours.module.state_dict().items()}
        build = partial(pool.build_module, "clip")
        return load_text_encoder(clip.folder, "transformers", None, clip.tokenizer_folder, tensors, build=build)

    modules = []
    for factor in factors:
        ours = load(factor)
        layers = [part for part in ours.module.modules() if isinstance(part, nn.Linear)]
        assert all(is_batch_invariant(part) for part in layers)
        stock = load_text_encoder(
            clip.folder, "transformers", None, clip.tokenizer_folder, dict(ours.module.state_dict())
        )
        found, expected = (one.encode(one.tokenize(["a b"]))[0] for one in (ours, stock))
        assert all(torch.equal(found[name], expected[name]) for name in found)
        modules.append(ours.module)
        pool.retire_module(ours.module)
    assert modules[0] is modules[1]
    assert len(walked) == 1 + len(factors)  # the kept one once, each other one once
