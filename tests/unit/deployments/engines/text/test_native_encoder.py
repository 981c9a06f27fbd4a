"""All layers of a BERT in the compiled kernels, against the same module in float64 and beside stock's own error."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.drawing import seeds
from kit.kernels import needs_half_products
from transformers import BertConfig, BertModel

from deployments.engines.native.building import VARIANTS, built_library
from deployments.engines.native.library import Kernels, load_kernels
from deployments.engines.text import native_encoder
from deployments.engines.text.native_encoder import encoded
from weights.platform.private_folder import cache_folder
from weights.platform.torch_seam import fake_mode

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels for this processor")

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def faster_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that take any number of rows on every processor, and torch's threads as they were."""
    before = torch.get_num_threads()
    monkeypatch.setattr(native_encoder, "most_rows", lambda: sys.maxsize)
    yield
    torch.set_num_threads(before)


def bert(**sizes: Any) -> BertModel:
    """Return a BERT with norms and biases of some size, which random ones lack."""
    module = BertModel(BertConfig(**SIZES | {"intermediate_size": 48, "max_position_embeddings": 512} | sizes)).eval()
    with torch.no_grad():
        for name, one in module.named_parameters():
            one.copy_(torch.randn_like(one) * 0.3 + ("LayerNorm.weight" in name) if one.dim() == 1 else one * 4)
    return module.requires_grad_(False)


def drawn_bert(draws: random.Random) -> BertModel:
    heads = draws.randint(1, 4)
    return bert(
        hidden_size=heads * 16 * draws.randint(1, 4),
        num_attention_heads=heads,
        num_hidden_layers=draws.randint(1, 3),
        intermediate_size=16 * draws.randint(1, 20),
    )


def texts_of(module: BertModel, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, their embeddings and the mask of texts."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 50, mask.shape)
    return ids, module.embeddings(input_ids=ids), mask


def drawn_lengths(draws: random.Random) -> list[int]:
    """Return lengths beside the borders of tiles, keys and chunks of the kernel."""
    borders = 1, 2, 16, 17, 63, 64, 65, 128, 130, 256, 300
    return [min(512, draws.choice(borders) + draws.randint(0, 3)) for _ in range(draws.randint(1, 5))]


@seeds(50)
def test_layers_of_any_shape(seed: int) -> None:
    """As exact as stock's; the same bits in any batch and with any number of threads."""
    draws = random.Random(seed)
    module, lengths = drawn_bert(draws), drawn_lengths(draws)
    ids, hidden, mask = texts_of(module, lengths)
    shape = module.config.hidden_size, module.config.intermediate_size, lengths
    exact = copy.deepcopy(module).double()(ids, attention_mask=mask).last_hidden_state
    torch.set_num_threads(1)
    together = encoded(module, hidden, mask)
    torch.set_num_threads(2)
    assert together is not None
    assert torch.equal(encoded(module, hidden, mask), together), shape
    assert torch.all(together[mask == 0] == 0), shape
    assert (together - exact)[mask.bool()].abs().max() <= 1e-5 * exact.abs().max(), shape
    for row, length in enumerate(lengths):
        alone = encoded(module, hidden[row : row + 1, :length], mask[row : row + 1, :length])
        assert torch.equal(alone[0], together[row, :length]), shape


@needs_half_products
@seeds(20)
def test_bfloat16_is_nearer_to_the_exact_result_than_stock(seed: int) -> None:
    draws = random.Random(seed)
    module, lengths = drawn_bert(draws).bfloat16(), drawn_lengths(draws)
    ids, hidden, mask = texts_of(module, lengths)
    exact = copy.deepcopy(module).double()(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    stock = module(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    together = encoded(module, hidden, mask)
    assert together.dtype == torch.bfloat16
    assert (together[mask.bool()] - exact).pow(2).mean() < (stock - exact).pow(2).mean()
    for row, length in enumerate(lengths):
        alone = encoded(module, hidden[row : row + 1, :length], mask[row : row + 1, :length])
        assert torch.equal(alone[0], together[row, :length])


def test_processors_without_avx512(monkeypatch) -> None:
    kernels = Kernels(built_library(cache_folder() / "native"), VARIANTS["avx2"][1])
    module = bert(hidden_size=64)
    ids, hidden, mask = texts_of(module, [70, 9])
    monkeypatch.setattr(native_encoder, "load_kernels", lambda: kernels)
    found, stock = encoded(module, hidden, mask), module(ids, attention_mask=mask).last_hidden_state
    assert torch.allclose(found[mask.bool()], stock[mask.bool()], atol=1e-5 * float(stock.abs().max()))
    assert torch.equal(encoded(module, hidden[1:, :9], mask[1:, :9])[0], found[1, :9])
    assert encoded(copy.deepcopy(module).bfloat16(), hidden.bfloat16(), mask) is None


def test_tokens_that_are_masked_are_left_out_wherever_they_are() -> None:
    module = bert()
    _, hidden, mask = texts_of(module, [9, 4, 1])
    mask[0, 2:5] = 0
    mask[2] = 0  # a text without a token
    found = encoded(module, hidden, mask)
    alone = encoded(module, hidden[:1, [0, 1, 5, 6, 7, 8]], torch.ones(1, 6))
    assert torch.equal(found[0, [0, 1, 5, 6, 7, 8]], alone[0])
    assert torch.equal(found[2], torch.zeros(9, 32))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.encoder.layer[1].output.dense.register_forward_hook(lambda *_: None),
        lambda module: module.encoder.layer[0].attention.self.key.bfloat16(),
        lambda module: vars(module.encoder.layer[1].intermediate).update(intermediate_act_fn=torch.tanh),
        lambda module: setattr(module.encoder.layer[0].output.dense, "bias", None),
    ],
)
def test_a_layer_that_is_another_one_is_left_to_the_module(change) -> None:
    module = bert()
    _, hidden, mask = texts_of(module, [5])
    assert encoded(module, hidden, mask) is not None
    change(module)
    assert encoded(module, hidden, mask) is None


@pytest.mark.parametrize("sizes", [{"hidden_size": 48}, {"intermediate_size": 40}, {"hidden_act": "gelu_new"}])
def test_other_shapes_are_left_to_the_module(sizes) -> None:
    module = bert(**sizes)
    assert encoded(module, *texts_of(module, [5])[1:]) is None


def test_what_has_no_values_and_what_the_module_computes_faster_are_left_to_it(monkeypatch) -> None:
    module = bert()
    _, hidden, mask = texts_of(module, [5])
    with fake_mode() as mode:
        assert encoded(module, mode.from_tensor(hidden), mode.from_tensor(mask)) is None
    monkeypatch.setattr(native_encoder, "most_rows", lambda: 4)
    assert encoded(module, hidden, mask) is None


def test_memory_that_runs_out_is_said(monkeypatch) -> None:
    module = bert()
    monkeypatch.setattr(load_kernels(), "_encode", lambda *_: 1)
    with pytest.raises(MemoryError, match="no memory to encode 2 texts, of 7 tokens together"):
        encoded(module, *texts_of(module, [5, 2])[1:])
