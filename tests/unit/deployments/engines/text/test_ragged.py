"""Texts of different lengths in one forward: the same outputs as alone, and what it took is counted.

Up to rounding: in float32 within 1e-5 of the largest output, in bfloat16 as near to the float64 truth as each text
alone is. Bit for bit only in a forward of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)

from deployments.engines.graph.workspace import Workspace
from deployments.engines.records.protocol import ComputationFailed, EngineError
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.forward_plan import EncodeCounter, EncodeStats, ForwardLimits
from deployments.engines.text.forwards import text_kind
from deployments.engines.text.sentence_layers import Pooling
from deployments.engines.text.tokens import TokenizedText

ONE_FORWARD = ForwardLimits(max_padding=0.99, overhead_tokens=10**6)
VOCABULARY = 200
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def t5():
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4)
    return T5EncoderModel(config)


def clip(cls, eos_token_id=VOCABULARY - 1):
    ends = {"bos_token_id": VOCABULARY - 2, "eos_token_id": eos_token_id, "pad_token_id": 0}
    sizes = WIDTHS | {"projection_dim": 12, "max_position_embeddings": 77}
    return cls(cls.config_class(vocab_size=VOCABULARY, **sizes, **ends))


MODULES = {
    "t5": t5,
    "clip": lambda: clip(CLIPTextModel),
    "clip_old_end": lambda: clip(CLIPTextModel, eos_token_id=2),
    "clip_end_is_0": lambda: clip(CLIPTextModel, eos_token_id=0),
    "clip_projection": lambda: clip(CLIPTextModelWithProjection),
    "bert": lambda: BertModel(BertConfig(vocab_size=VOCABULARY, **WIDTHS, max_position_embeddings=77)),
    "roberta": lambda: RobertaModel(
        RobertaConfig(vocab_size=VOCABULARY, **WIDTHS, max_position_embeddings=79, pad_token_id=1)
    ),
    "mpnet": lambda: MPNetModel(MPNetConfig(vocab_size=VOCABULARY, **WIDTHS, max_position_embeddings=79)),
}


class Tokenizer:
    """Only what an encoder asks of one: ids come from the tests."""

    model_max_length = 77
    pad_token_id = 1
    padding_side = "right"


@pytest.fixture(scope="module")
def modules():
    torch.manual_seed(3)
    return {name: make().eval() for name, make in MODULES.items()}


def random_texts(name, lengths, seed=None):
    """Any ids, CLIP's end token among them or not, so that pooling without one is tried too."""
    draw = random.Random(seed)
    wants_vector = name in ("bert", "roberta", "mpnet")
    return [TokenizedText(tuple(draw.choices(range(VOCABULARY), k=n)), as_embedding=wants_vector) for n in lengths]


def alone(encoder, texts):
    return [encoder.encode([text])[0] for text in texts]


@pytest.mark.parametrize("name", MODULES)
def test_company_does_not_matter(modules, name):
    encoder = TextEncoder(modules[name], Tokenizer(), pooling=Pooling(normalize=True))
    lengths = [7, 1, 77, 30, 2, 76, 12]
    texts = random_texts(name, lengths)
    counter = EncodeCounter()
    together = encoder.encode_each(texts, limits=ONE_FORWARD, counter=counter)
    assert counter.encode_stats().forwards == 1
    for text, ours, reference in zip(texts, together, alone(encoder, texts), strict=True):
        assert ours.keys() == reference.keys()
        for output, expected in reference.items():
            assert ours[output].shape == expected.shape
            assert (ours[output] - expected).abs().max() <= 1e-5 * expected.abs().max(), (output, text)


@pytest.mark.parametrize("name", ["t5", "clip_projection", "bert"])
def test_one_text_per_forward_is_bitwise_the_same(modules, name):
    encoder = TextEncoder(modules[name], Tokenizer())
    texts = random_texts(name, [9, 20, 9, 20, 9])
    counter = EncodeCounter()
    together = encoder.encode_each(texts, limits=ForwardLimits(max_tokens=1), counter=counter)
    assert counter.encode_stats().forwards == 5
    for ours, reference in zip(together, alone(encoder, texts), strict=True):
        assert all(torch.equal(ours[output], expected) for output, expected in reference.items())


@pytest.mark.parametrize("name", ["t5", "clip", "bert"])
def test_half_precision_is_as_near_to_the_truth(modules, name):
    halves, doubles = (copy.deepcopy(modules[name]).to(dtype) for dtype in (torch.bfloat16, torch.float64))
    # The same values: what is compared is arithmetic, not the rounding of weights.
    doubles.load_state_dict(halves.state_dict())
    half, truth = TextEncoder(halves, Tokenizer()), TextEncoder(doubles, Tokenizer())
    texts = random_texts(name, [5, 1, 60, 33, 17], seed=4)
    together = half.encode_each(texts, limits=ONE_FORWARD)
    for ours, single, exact in zip(together, alone(half, texts), alone(truth, texts), strict=True):
        for output, expected in exact.items():
            room = 2 * (single[output] - expected).abs().max() + torch.finfo(torch.bfloat16).eps * expected.abs().max()
            assert (ours[output] - expected).abs().max() <= room


def test_a_forward_of_texts_that_stock_pads_is_planned_as_one_of_its_lengths(modules):
    asked = []
    workspace = Workspace(Mock(), Mock(get=asked.append))  # what is appended is None: nobody has planned it
    encoder = TextEncoder(modules["t5"], Tokenizer())
    for lengths in ((20, 20), (20, None), (None, None), (20, 4)):
        texts = [TokenizedText((5, 6, 7), padded_length=length) for length in lengths]
        encoder.encode_each(texts, limits=ONE_FORWARD, workspace=workspace)
    assert asked == [text_kind(20, is_padded=True)] + [text_kind(tokens, is_padded=False) for tokens in (20, 3, 20)]


def test_stock_padding_and_trimmed_texts_share_a_forward(modules):
    """The first attends to its padding, the others have none; the mask tells them apart."""
    encoder = TextEncoder(modules["t5"], Tokenizer())
    texts = [
        TokenizedText((5, 6, 7), padded_length=20),
        TokenizedText((5, 6, 7)),
        TokenizedText((9,), padded_length=4),
    ]
    counter = EncodeCounter()
    padded, trimmed, _ = outputs = encoder.encode_each(texts, limits=ONE_FORWARD, counter=counter)
    assert [len(output["hidden"]) for output in outputs] == [20, 3, 4]
    with torch.no_grad():
        stock = modules["t5"](torch.tensor([[5, 6, 7, *[1] * 17]]))[0][0]
    assert torch.allclose(padded["hidden"], stock, atol=1e-5)
    assert not torch.allclose(trimmed["hidden"], stock[:3], atol=1e-3)  # it makes a difference, so it is no default
    assert counter.encode_stats() == EncodeStats(
        1, 3, 3, text_tokens=7, stock_padding_tokens=20, batch_padding_tokens=33
    )
    assert json.loads(json.dumps(dataclasses.asdict(counter.encode_stats())))["forwards"] == 1


def test_padding_on_the_left_is_the_tokenizers_business(modules):
    tokenizer = Tokenizer()
    tokenizer.padding_side = "left"
    encoder = TextEncoder(modules["t5"], tokenizer)
    [output] = encoder.encode([TokenizedText((5, 6), padded_length=5)])
    with torch.no_grad():
        assert torch.equal(output["hidden"], modules["t5"](torch.tensor([[1, 1, 1, 5, 6]]))[0][0])


def test_an_error_stays_with_its_text(modules, monkeypatch):
    encoder = TextEncoder(modules["t5"], Tokenizer())
    run = encoder._run

    def run_unless_13(texts, counter):
        if any(text.token_ids[0] == 13 for text in texts):
            raise FloatingPointError("no luck")
        return run(texts, counter)

    monkeypatch.setattr(encoder, "_run", run_unless_13)
    texts = [TokenizedText(ids) for ids in ((3, 4), (13,), (5,), (VOCABULARY,), ())]
    counter = EncodeCounter()
    good, unlucky, also_good, unknown, empty = encoder.encode_each(texts, limits=ONE_FORWARD, counter=counter)
    assert isinstance(unlucky, FloatingPointError)
    assert isinstance(unknown, EngineError)
    assert isinstance(empty, EngineError)
    assert [good["hidden"].shape, also_good["hidden"].shape] == [(2, 32), (1, 32)]
    assert counter.encode_stats().texts == counter.encode_stats().forwards == 2
    with pytest.raises(FloatingPointError):
        encoder.encode(texts[:2])


@pytest.mark.parametrize(
    ("name", "as_embedding"), [(name, is_one) for name in sorted(MODULES) for is_one in sorted({False, name != "t5"})]
)
def test_numbers_that_are_not_finite_are_an_error_of_their_text(modules, name, as_embedding):
    """Token 13 has an embedding of NaN; what stands beside it in the forward is sound."""
    module = copy.deepcopy(modules[name])
    with torch.no_grad():
        module.get_input_embeddings().weight[13, 3] = float("nan")
    encoder = TextEncoder(module, Tokenizer())
    texts = [TokenizedText(ids, as_embedding=as_embedding) for ids in ((3, 4, 5), (7, 13), (5, 6))]
    good, bad, also_good = encoder.encode_each(texts, limits=ONE_FORWARD)
    assert isinstance(bad, ComputationFailed)
    assert "not finite" in str(bad)
    for outcome, text in ((good, texts[0]), (also_good, texts[2])):
        (alone,) = TextEncoder(modules[name], Tokenizer()).encode([text])
        for key, output in alone.items():
            assert torch.allclose(outcome[key], output, atol=1e-5)
    with pytest.raises(ComputationFailed):
        encoder.encode(texts)


def test_a_forward_that_finds_no_memory_is_tried_once(modules, monkeypatch):
    encoder = TextEncoder(modules["t5"], Tokenizer())
    run, sizes = encoder._run, []

    def run_eight(texts, counter):
        sizes.append(len(texts))
        if len(texts) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(texts, counter)

    monkeypatch.setattr(encoder, "_run", run_eight)
    texts = [TokenizedText(tuple(range(3, 9 + number % 2))) for number in range(16)]
    counter = EncodeCounter()
    expected = TextEncoder(modules["t5"], Tokenizer()).encode(texts)
    for _ in range(20):
        found = encoder.encode_each(texts, limits=ONE_FORWARD, counter=counter)
    assert sizes == [16] + [8] * 40
    assert (counter.encode_stats().forwards, counter.encode_stats().texts) == (40, 320)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one["hidden"], other["hidden"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "text", "variant"),
    [
        ("t5", TokenizedText((1,), padded_length=512), "stock:512:1"),
        ("t5", TokenizedText((1,)), "trimmed"),
        ("t5", TokenizedText((1,), as_embedding=True), "embedding:cls+mean+unit"),
        ("clip", TokenizedText((1,), as_embedding=True), "embedding:pooled"),
    ],
)
def test_variants_have_names_of_their_own(modules, name, text, variant):
    pooling = Pooling(("cls", "mean"), normalize=True) if name == "t5" else None
    assert TextEncoder(modules[name], Tokenizer(), pooling=pooling).variant(text) == variant
