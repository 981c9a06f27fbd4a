"""Layers in the kernels, of prompts and completions, against the module layer by layer with the same products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deployments.engines.llm import native_decoder
from deployments.engines.llm.loras import DecoderLoras
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.llama import DecoderSpec, LlamaForCausalLM, Rotary
from deployments.engines.llm.models.registry import LoadedModel
from deployments.engines.llm.native_decoder import NativeDecoder
from deployments.engines.llm.sequences.kv_cache import KVCache, KvDtype
from deployments.engines.llm.sequences.sequence import Chunk
from deployments.engines.llm.sequences.sequence import Sequence as Completion
from deployments.engines.native.building import built_library
from deployments.engines.native.library import Kernels, load_kernels
from deployments.engines.nn.packed_linear import PackedEmbedding, PackedLinear
from deployments.engines.nn.packed_weights import Arithmetic, packed_weight
from deployments.engines.records.protocol import StepAborted, TextLora
from weights.operations.adapters import LoraAdapter, LoraPair
from weights.platform.private_folder import cache_folder
from weights.records.dtypes import BLOCK_SIZES

VOCABULARY = 64
NUM_BLOCKS = 24
SCALES = {"Q8_0": (0, 1e-3), "Q4_0": (0, 1e-2), "Q5_1": (0, 5e-3), "Q6_K": (208, 2e-5), "Q4_K": (0, 2e-4)}
SCALES |= {"Q2_K": (80, 1e-3), "Q3_K": (108, 2e-4), "IQ4_XS": (0, 1e-5)}

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels here")


def random_blocks(kind: str, rows: int, columns: int) -> torch.Tensor:
    elements, nbytes = BLOCK_SIZES[kind]
    blocks = torch.randint(0, 256, (rows, columns // elements, nbytes), dtype=torch.uint8)
    at, scale = SCALES[kind]
    halves = 1 if kind in ("Q8_0", "Q4_0", "Q6_K", "Q3_K", "IQ4_XS") else 2
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
        "head_dim": 32,
    }
    known: dict[str, Any] = {"vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "max_positions": 512}
    spec = DecoderSpec(**known, **sizes | spec_fields)
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
    frequencies = 1 / 1e4 ** (torch.arange(0, spec.head_dim, 2) / spec.head_dim)
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
        ("Q2_K", {}),
        ("Q3_K", {}),
        ("IQ4_XS", {}),
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
        patch.setattr(NativeDecoder, "create", classmethod(lambda *_: None))
        plain = ModelRunner(model, NUM_BLOCKS, kv_dtype)
    one, other = torch.cat(got), torch.cat(run(plain, drawn))
    errors = ((one - other).norm(dim=-1) / other.norm(dim=-1)).sort().values
    # Float32 sums run in another order. Where an activation lies between two of its 127 steps, that may take the other.
    # So may a key or value that lies between two steps of an int8 cache, and every later token reads it.
    assert float(errors[len(errors) // 10]) < (1e-4 if kv_dtype == "auto" else 1e-2)
    assert float(errors[len(errors) // 2]) < (1.5e-2 if kv_dtype == "auto" else 2e-2)
    assert float(errors[-1]) < 5e-2


def test_large_keys_keep_what_float16_has_of_them() -> None:
    """Some models (Qwen2) have keys of tens by their biases, of which bfloat16 would keep three bits less."""
    model = random_model("Q8_0", qkv_bias=True)
    for layer in model.module.model.layers:
        layer.self_attn.k_proj.bias[::8] += 50
    (drawn,) = sequences([77])
    keys = []
    for one in (model, replace(model, dtype=torch.bfloat16)):
        runner = ModelRunner(one, NUM_BLOCKS)
        runner.run([Chunk(drawn, 0, 77, True)])
        keys.append(runner._cache.layer_slots(0).keys)
    assert [kept.dtype for kept in keys] == [torch.float32, torch.float16]
    errors = (keys[1].float() - keys[0]).abs()
    assert bool((errors <= keys[0].abs() * 2**-11 + 2**-25).all())


@pytest.mark.parametrize("value", [1e6, float("-inf"), float("nan")])
def test_what_float16_cannot_hold_is_its_greatest_number_and_a_nan_stays(value: float) -> None:
    """The same in the kernels and layer by layer: a token is computed by one and read by the other."""
    model = replace(random_model("Q8_0", qkv_bias=True), dtype=torch.bfloat16)
    for layer in model.module.model.layers:
        layer.self_attn.v_proj.bias[3] = value
    runner = ModelRunner(model, NUM_BLOCKS)
    runner.run([Chunk(sequences([20])[0], 0, 20, True)])
    kept = runner._cache.layer_slots(0).values
    numbers = kept[kept.float().abs().amax((-1, -2)).nan_to_num(1) > 0][..., 0, 3].float()
    expected = torch.tensor(value).clamp(-65504, 65504)
    assert torch.equal(numbers.isnan(), expected.isnan().expand_as(numbers))
    assert bool(expected.isnan()) or torch.equal(numbers, expected.expand_as(numbers))


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
    def decoder(model: LoadedModel) -> NativeDecoder | None:
        return NativeDecoder.create(model, KVCache(model.spec, 1, model.dtype, model.device))

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
        patch.setattr(NativeDecoder, "create", classmethod(lambda *_: None))
        layers = run(ModelRunner(model, NUM_BLOCKS), drawn)
    for ours, by_layers, without in zip(got, layers, plain, strict=True):
        assert torch.equal(ours[0], by_layers[0])
        assert torch.equal(ours[1], without[1])
    assert not torch.allclose(got[0][0], plain[0][0], rtol=0.1)


def test_a_prompt_has_the_same_bits_however_it_is_cut_and_beside_whatever() -> None:
    """Tiles of attention begin anew with every chunk, and 64 keys at a time are met: the drawn cuts cross both."""
    model = random_model("Q8_0", qk_norm=True)
    prompt, other, completion = sequences([150, 37, 20])
    runner = ModelRunner(model, NUM_BLOCKS)
    alone = run(runner, [completion])[0]
    whole = runner.run([Chunk(prompt, 0, 150, True)])
    decoded = Chunk(completion, 20, 21, True)
    for cuts in ([0, 150], [0, 1, 63, 64, 65, 129, 150], [0, *sorted(torch.randperm(149)[:5].add(1).tolist()), 150]):
        for start, end in pairwise(cuts):
            chunks = [Chunk(other, 0, 37, True), decoded, Chunk(prompt, start, end, True)]
            order = torch.randperm(3).tolist()
            got = runner.run([chunks[i] for i in order])
            assert torch.equal(got[order.index(1)], alone[0])
        assert torch.equal(got[order.index(2)], whole[0]), cuts


def test_the_avx2_variant_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    older = Kernels(built_library(cache_folder() / "native"), frozenset({"avx2", "fma", "f16c"}))
    assert older.variant == "avx2"
    model = random_model("Q5_1", qk_norm=True, head_dim=48, intermediate_size=544)
    drawn = sequences([70, 129, 5])
    expected = run(ModelRunner(model, NUM_BLOCKS), drawn)
    monkeypatch.setattr(native_decoder, "load_kernels", lambda: older)
    runner = ModelRunner(model, NUM_BLOCKS)
    got = run(runner, drawn)
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-2
    for start, end in pairwise([0, 3, 64, 100, 130]):
        cut = runner.run([Chunk(drawn[1], start, end, True)])
    assert torch.equal(cut[0], got[0][1])


def test_rows_of_a_prompt_are_those_of_a_completion() -> None:
    model = random_model("Q4_0")
    (one,) = sequences([90])
    runner = ModelRunner(model, NUM_BLOCKS, "int8")
    together = runner.run([Chunk(one, 0, 90, True)])
    for position in range(90):
        single = runner.run([Chunk(one, position, position + 1, True)])
    assert torch.equal(single, together)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [16, 48, 80, 128])
def test_heads_of_any_number_and_size(num_kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers attend by torch's `scaled_dot_product_attention`."""
    model = random_model("Q8_0", num_kv_heads=num_kv_heads, head_dim=head_dim, intermediate_size=544)
    drawn = sequences([70, 129])
    got = run(ModelRunner(model, NUM_BLOCKS), drawn)
    monkeypatch.setattr(NativeDecoder, "create", classmethod(lambda *_: None))
    for ours, layers in zip(got, run(ModelRunner(model, NUM_BLOCKS), drawn), strict=True):
        assert float((ours - layers).norm() / layers.norm()) < 3e-2


def test_a_prompt_nobody_wants_ends_between_two_layers() -> None:
    model = random_model("Q8_0")
    (prompt,) = sequences([100])
    runner = ModelRunner(model, NUM_BLOCKS)
    calls: list[int] = []

    def check() -> None:
        calls.append(len(calls))
        if len(calls) == 3:  # before the step, before the first layer, before the second
            raise StepAborted

    with pytest.raises(StepAborted):
        runner.run([Chunk(prompt, 0, 100, True)], check)
    assert len(calls) == 3
    assert len(runner.run([Chunk(prompt, 0, 100, True)])) == 1
