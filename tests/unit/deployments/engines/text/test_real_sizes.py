"""The encoders of FLUX and SDXL by their published configs: whole on meta, and few of their layers for real."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)

from deployments.engines.building.build import build_skeleton
from deployments.engines.text.encoder import TextEncoder
from deployments.engines.text.forward_plan import ForwardLimits
from deployments.engines.text.forwards import encoder_family_of
from deployments.engines.text.tokens import TokenizedText

pytestmark = pytest.mark.slow

GATED = {"vocab_size": 32128, "d_kv": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
ENDS = {"bos_token_id": 49406, "eos_token_id": 49407, "vocab_size": 49408, "max_position_embeddings": 77}
# Class, config, and parameters as published.
ENCODERS = {
    "t5-v1_1-xxl": (
        T5EncoderModel,
        T5Config(**GATED, d_model=4096, d_ff=10240, num_layers=24, num_heads=64),
        4762310656,
    ),
    "t5-v1_1-large": (
        T5EncoderModel,
        T5Config(**GATED, d_model=1024, d_ff=2816, num_layers=24, num_heads=16),
        341231104,
    ),
    "clip-vit-l-14": (
        CLIPTextModel,
        CLIPTextConfig(
            **ENDS, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
            projection_dim=768,
        ),
        123060480,
    ),
    "open-clip-bigg-14": (
        CLIPTextModelWithProjection,
        CLIPTextConfig(
            **ENDS, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
            projection_dim=1280, hidden_act="gelu",
        ),
        694659840,
    ),
    "roberta-large": (
        RobertaModel,
        RobertaConfig(
            vocab_size=50265, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
            max_position_embeddings=514, type_vocab_size=1, pad_token_id=1,
        ),
        355359744,
    ),
}  # fmt: skip


class Tokenizer:
    model_max_length = 77
    pad_token_id = 0
    padding_side = "right"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ENCODERS)
def test_the_whole_model_has_its_published_size_and_shapes(name, tmp_path):
    cls, config, num_parameters = ENCODERS[name]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        stock = cls(config).eval()
    shapes = {key: tuple(tensor.shape) for key, tensor in stock.state_dict().items()}
    module = build_skeleton("transformers", cls.__name__, tmp_path, shapes).module
    assert sum(parameter.numel() for parameter in module.parameters()) == num_parameters
    if cls is RobertaModel:  # makes a mask and looks at its values, which meta does not have
        return
    ids_BL = torch.ones(2, 77, dtype=torch.long, device="meta")
    outputs = encoder_family_of(cls.__name__).run(module=stock, ids_BL=ids_BL, mask_BL=None, pooling=None)
    width = config.hidden_size
    known = {"hidden": (2, 77, width), "layer -1": (2, 77, width), "pooled": (2, width)}
    for output, tensor in outputs.items():
        assert tuple(tensor.shape) == known[output]


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["t5-v1_1-large", "clip-vit-l-14", "open-clip-bigg-14", "roberta-large"])
def test_company_does_not_matter_at_real_widths(name):
    cls, config, _ = ENCODERS[name]
    torch.manual_seed(6)
    layers = "num_layers" if cls is T5EncoderModel else "num_hidden_layers"
    few = {layers: 2, "vocab_size": 600, "bos_token_id": 598, "eos_token_id": 599}  # most of the weights are words
    module = cls(type(config)(**(config.to_dict() | few))).eval()
    encoder = TextEncoder(module, Tokenizer())
    texts = [
        TokenizedText(tuple(torch.randint(3, 600, (length,)).tolist()), as_embedding=cls is RobertaModel)
        for length in (12, 1, 77, 31)
    ]
    together = encoder.encode_each(texts, limits=ForwardLimits(max_padding=0.9, overhead_tokens=10**6))
    for text, ours in zip(texts, together, strict=True):
        for output, expected in encoder.encode([text])[0].items():
            assert (ours[output] - expected).abs().max() <= 1e-5 * expected.abs().max()
