"""A decode step in one call of the kernels, against the module layer by layer with the same products."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deployments.engines.llm.kv_cache import KVCache, KvDtype
from deployments.engines.llm.loras import DecoderLoras
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.llama import DecoderSpec, LlamaForCausalLM
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.packed_decoder import PackedDecoder
from deployments.engines.llm.scheduler import Chunk
from deployments.engines.llm.scheduler import Sequence as Completion
from deployments.engines.native.library import load_kernels
from deployments.engines.nn.packed_linear import Arithmetic, PackedEmbedding, PackedLinear, packed_weight
from deployments.engines.nn.rotary import Rotary
from deployments.engines.protocol import TextLora
from weights.adapters import LoraAdapter, LoraPair
from weights.dtypes import BLOCK_SIZES

VOCABULARY = 64
NUM_BLOCKS = 24
SCALES = {"Q8_0": (0, 1e-3), "Q4_0": (0, 1e-2), "Q5_1": (0, 5e-3), "Q6_K": (208, 2e-5), "Q4_K": (0, 2e-4)}

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")


def random_blocks(kind: str, rows: int, columns: int) -> torch.Tensor:
    elements, nbytes = BLOCK_SIZES[kind]
    blocks = torch.randint(0, 256, (rows, columns // elements, nbytes), dtype=torch.uint8)
    at, scale = SCALES[kind]
    halves = 1 if kind in ("Q8_0", "Q4_0", "Q6_K") else 2
    drawn = (torch.rand(rows, columns // elements, halves) + 0.5) * scale
    blocks[..., at : at + 2 * halves] = drawn.half().view(torch.uint8)
    return blocks.flatten(1)


def random_model(
    kind: str, *, arithmetic: Arithmetic = "fast", is_interleaved: bool = False, **spec_fields: Any
) -> LoadedModel:
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
    }
    known: dict[str, Any] = {"vocab_size": VOCABULARY, "head_dim": 32, "rms_norm_eps": 1e-5, "max_positions": 512}
    spec = DecoderSpec(**sizes, **known, **spec_fields)
    module = LlamaForCausalLM(spec)
    for path, old in list(module.named_modules()):
        new: nn.Module
        if isinstance(old, nn.Embedding):
            new = PackedEmbedding(packed_weight(path, kind, random_blocks(kind, *old.weight.shape)), torch.float32)
        elif isinstance(old, nn.Linear):
            bias = None if old.bias is None else torch.randn(old.out_features) / 10
            weight = packed_weight(path, kind, random_blocks(kind, *old.weight.shape))
            new = PackedLinear(weight, bias, arithmetic)
        else:
            if "norm" in path and hasattr(old, "weight"):
                old.weight.data = torch.rand(old.weight.shape) + 0.5
            continue
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new)
    frequencies = 1 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    rotary = Rotary(frequencies, is_interleaved=is_interleaved)
    return LoadedModel(module, rotary, spec, torch.float32, torch.device("cpu"), pads_rows=False)


def sequences(lengths: Sequence[int]) -> list[Completion]:
    """Prompts with blocks in a drawn order, and two tokens of a completion each."""
    free = torch.randperm(NUM_BLOCKS).tolist()
    made = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(0, VOCABULARY, (length + 2,)).tolist()
        table = [free.pop() for _ in range(-(-(length + 2) // 16))]
        made.append(Completion(str(i), tokens, length, block_table=table))
    return made


def run(runner: ModelRunner, all_: Sequence[Completion]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of both tokens of the completions, computed after their prompts: one by one, then in one chunk."""
    for one in all_:
        runner.run([Chunk(one, 0, one.num_prompt_tokens, True)])
    steps = [
        runner.run([Chunk(one, one.num_prompt_tokens, one.num_prompt_tokens + 1, True) for one in all_]),
        runner.run([Chunk(one, one.num_prompt_tokens + 1, one.num_prompt_tokens + 2, True) for one in all_]),
    ]
    again = runner.run([Chunk(one, one.num_prompt_tokens, one.num_prompt_tokens + 2, True) for one in all_])
    assert torch.equal(again, steps[1])
    return steps[0], steps[1]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Q8_0", {"is_interleaved": True}),
        ("Q4_0", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
        ("Q4_K", {"qk_norm": True}),
        ("Q6_K", {}),
        ("Q5_1", {"is_interleaved": True}),
    ],
)
def test_one_call_computes_what_the_layers_do(
    kind: str, options: dict[str, Any], kv_dtype: KvDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(kind, **options)
    drawn = sequences([3, 31, 77, 16])
    got = run(ModelRunner(model, NUM_BLOCKS, kv_dtype), drawn)
    with monkeypatch.context() as patch:
        patch.setattr(PackedDecoder, "create", classmethod(lambda *_: None))
        plain = ModelRunner(model, NUM_BLOCKS, kv_dtype)
    one, other = torch.cat(got), torch.cat(run(plain, drawn))
    errors = ((one - other).norm(dim=-1) / other.norm(dim=-1)).sort().values
    # Float32 sums run in another order. Where an activation lies between two of its 127 steps, that may take the other.
    # So may a key or value that lies between two steps of an int8 cache, and every later token reads it.
    assert float(errors[len(errors) // 10]) < (1e-4 if kv_dtype == "auto" else 1e-2)
    assert float(errors[len(errors) // 2]) < 1e-2
    assert float(errors[-1]) < 3e-2


def test_a_row_is_the_same_in_any_company_and_with_any_number_of_threads() -> None:
    model = random_model("Q8_0", qk_norm=True)
    drawn = sequences([40, 5, 18, 33, 60, *[2] * 10])
    together = run(ModelRunner(model, NUM_BLOCKS), drawn)
    for i, one in enumerate(drawn):
        alone = run(ModelRunner(model, NUM_BLOCKS), [one])
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, run(ModelRunner(model, NUM_BLOCKS), drawn), together))
    finally:
        torch.set_num_threads(before)


def test_other_models_and_other_arithmetic_run_layer_by_layer() -> None:
    def decoder(model: LoadedModel) -> PackedDecoder | None:
        return PackedDecoder.create(model, KVCache(model.spec, 1, model.dtype, model.device))

    assert decoder(random_model("Q8_0")) is not None
    assert decoder(random_model("Q8_0", arithmetic="exact")) is None
    more = random_model("Q8_0")
    layer: Any = more.module.model.layers[1]
    layer.mlp.router = nn.Linear(256, 4)
    assert decoder(more) is None
    dense = random_model("Q8_0")
    layer = dense.module.model.layers[0]
    layer.mlp.up_proj = nn.Linear(256, 512)
    assert decoder(dense) is None


def test_rows_with_a_lora_take_the_layers_and_others_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels know no LoRA: its rows are computed layer by layer, and changed by it; those beside it are not."""
    model = random_model("Q8_0")
    target = "model.layers.1.mlp.down_proj"
    adapter = LoraAdapter(Path("lora"), {"model": {target: LoraPair(torch.randn(3, 512), torch.randn(256, 3), 0.3)}})
    drawn = sequences([3, 31])
    plain = run(ModelRunner(model, NUM_BLOCKS), drawn)
    drawn[0].loras = DecoderLoras(model).fit([TextLora("lora", adapter)])
    got = run(ModelRunner(model, NUM_BLOCKS), drawn)
    with monkeypatch.context() as patch:
        patch.setattr(PackedDecoder, "create", classmethod(lambda *_: None))
        layers = run(ModelRunner(model, NUM_BLOCKS), drawn)
    for ours, by_layers, without in zip(got, layers, plain, strict=True):
        assert torch.equal(ours[0], by_layers[0])
        assert torch.equal(ours[1], without[1])
    assert not torch.allclose(got[0][0], plain[0][0], rtol=0.1)


def test_a_prompt_beside_a_completion_changes_no_bit_of_it() -> None:
    model = random_model("Q8_0")
    first, second, prompt = sequences([20, 35, 70])
    runner = ModelRunner(model, NUM_BLOCKS)
    alone = run(runner, [first, second])[0]
    size = prompt.num_prompt_tokens
    plain = runner.run([Chunk(prompt, 0, size, True)])[0]

    def decoded(one: Completion) -> Chunk:
        return Chunk(one, one.num_prompt_tokens, one.num_prompt_tokens + 1, True)

    cut = runner.run([Chunk(prompt, 0, size - 9, False), decoded(first)])
    assert torch.equal(cut[0], alone[0])
    got = runner.run([decoded(first), Chunk(prompt, size - 9, size, True), decoded(second)])
    assert torch.equal(got[0], alone[0])
    assert torch.equal(got[2], alone[1])
    assert float((got[1] - plain).norm() / plain.norm()) < 0.1


def test_a_few_tokens_of_a_prompt_share_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    plain = PackedDecoder.run_layers
    monkeypatch.setattr(PackedDecoder, "run_layers", lambda self, rows: (calls.append(len(rows)), plain(self, rows))[1])
    model = random_model("Q8_0")
    runner = ModelRunner(model, NUM_BLOCKS)
    first, prompt = sequences([20, 70])
    run(runner, [first])
    whole = runner.run([Chunk(prompt, 0, 70, True)])[0]
    decoded = Chunk(first, 20, 21, True)
    alone = runner.run([decoded])[0]
    calls.clear()
    for start in range(0, 70, 7):
        got = runner.run([decoded, Chunk(prompt, start, start + 7, True)])
        assert torch.equal(got[0], alone)
    assert calls == [8] * 10
    # Sums of attention run in another order, and an activation may round to another of its 127 steps.
    assert float((got[1] - whole).norm() / whole.norm()) < 0.1
