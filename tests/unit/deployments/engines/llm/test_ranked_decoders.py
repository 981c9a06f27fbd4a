"""Our decoders on several ranks against one rank, and their slices against transformers' plans."""

from __future__ import annotations

import fnmatch
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.ranks import run_ranks
from kit.seeding import seeded_random, seeded_rng
from transformers import AutoConfig

from deployments.engines.llm.engine import LLMEngine, step_follower
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.model_runner import ModelRunner
from deployments.engines.llm.models.llama import DecoderSpec, ExpertsSpec
from deployments.engines.llm.models.rank_share import DecoderShare
from deployments.engines.llm.models.registry import ARCHITECTURES, check_ranks, create_model, load_config
from deployments.engines.llm.models.stored_slices import stored_slices
from deployments.engines.llm.ranked_steps import LoraWriter, StepReader, StepWriter
from deployments.engines.llm.sequences.sequence import Chunk, FittedLora, Sequence, SequenceLora
from deployments.engines.native.library import load_kernels
from deployments.engines.nn.batch_invariant import settled_rows
from deployments.engines.nn.packed_weights import PackedWeight, group_int8_weight, packed_weight, unpack_rows
from deployments.engines.ranks.following import RankChannel, follow
from deployments.engines.ranks.group import RankGroup, RankLost
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.records.protocol import EngineError, SamplingParams, TextLora, TextRequest
from infra.offline.checkpoints import quantize_checkpoint
from weights.loading.views import mapped_tensors
from weights.operations.adapters import LoraAdapter, LoraPair
from weights.records.dtypes import BLOCK_SIZES

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama-gqa": ("llama", 2, {}),
    "llama-repeated-kv": ("llama", 4, {"attention_bias": True, "mlp_bias": True}),
    "qwen2-tied": ("qwen2", 2, {"tie_word_embeddings": True, "vocab_size": 261}),
    "qwen3": ("qwen3", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}),
    "mixtral": ("mixtral", 2, {"num_local_experts": 3, "sliding_window": 20}),
}
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "kv_cache_bytes": 2**20}


def on_ranks(model: Any, size: int, lead: Callable[[LLMEngine, RankGroup], Any]) -> list[Any]:
    """Return the result of `lead` with the engine of rank 0, and the errors that ended its followers."""
    config = LLMEngineConfig(**OPTIONS)

    def rank_of(group: RankGroup) -> Any:
        if group.rank:
            follower = step_follower(model.folder, model.tensors, config, group)
            try:
                return follow(group, {"tiny": follower})
            except RankLost as lost:
                return lost
        found = lead(LLMEngine(model.folder, model.tensors, config, ranks=RankChannel(group, "tiny")), group)
        group.close()
        return found

    return run_ranks(RankLayout(tensor=size), rank_of)


def texts_of(engine: LLMEngine, requests: list[TextRequest], joins: list[int]) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each completion, and a scored prompt's log probabilities, whose requests join at steps."""
    found: dict[tuple[str, int], list[int]] = {}
    step = 0
    while engine.has_work or step <= max(joins):
        for request, at in zip(requests, joins, strict=True):
            if at == step:
                engine.add_request(request)
        for delta in engine.step():
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        assert engine.failures == {}
        step += 1
    return found


def requests(prompt_of: Any) -> list[TextRequest]:
    """Prompts of several chunks, two that begin alike, several completions, sampled tokens and scored prompts."""
    long = prompt_of(50)
    greedy = SamplingParams(max_tokens=9)
    return [
        TextRequest("long", long, greedy),
        TextRequest("alike", (*long[:33], *prompt_of(5)), greedy, n=3),
        TextRequest("short", prompt_of(3), SamplingParams(max_tokens=20)),
        TextRequest("sampled", prompt_of(7), SamplingParams(max_tokens=9, temperature=0.8, seed=5)),
        TextRequest("scored", prompt_of(21), SamplingParams(max_tokens=2, num_logprobs=2), scores_prompt=True),
    ]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_one_rank(name: str, tiny: Any, prompt_of: Any) -> None:
    family, size, overrides = MODELS[name]
    model = tiny(family, 3, **overrides)
    joins = [0, 3, 1, 4, 2]
    alone = texts_of(model.engine(**OPTIONS), requests(prompt_of), joins)
    ranked, *ends = on_ranks(model, size, lambda engine, _: texts_of(engine, requests(prompt_of), joins))
    assert ends == [None] * (size - 1)
    assert ranked == alone
    assert len(ranked) == 7
    assert ranked["short", 0] == model.greedy(prompt_of(3), 20)


def drawn_sequence(length: int, rng: random.Random) -> Sequence:
    tokens = rng.choices(range(4, 260), k=length)
    return Sequence("one", tokens, length - 1, block_table=rng.sample(range(20), -(-length // 16)))


def runner_of(folder: Any, tensors: Any, ranks: RankGroup | None, arithmetic: Any = "fast") -> ModelRunner:
    model = create_model(load_config(folder), tensors, torch.device("cpu"), arithmetic=arithmetic, ranks=ranks)
    return ModelRunner(model, 20)


def step_logits(runner: ModelRunner, sequence: Sequence) -> torch.Tensor:
    """Return the logits of a prompt, and of one token behind it."""
    prompt = sequence.num_prompt_tokens
    parts = [Chunk(sequence, 0, prompt, is_last=True), Chunk(sequence, prompt, prompt + 1, is_last=True)]
    return torch.cat([runner.run([part]) for part in parts])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("inner", [80, 128])  # the kernels take parts of the second one alone
@pytest.mark.parametrize("size", [2, 4])
def test_a_step_sends_what_the_formula_says(size: int, inner: int, tiny: Any) -> None:
    """Two sums of the activations a layer, and a part of the logits; float32 differs by what an order of sums does."""
    model = tiny("llama", 7, num_key_value_heads=4, vocab_size=263, hidden_size=64, intermediate_size=inner)
    has_kernels = inner == 128 and load_kernels() is not None
    sequence = drawn_sequence(40, seeded_random())
    expected = step_logits(runner_of(model.folder, model.tensors, None), sequence)

    def rank_of(group: RankGroup) -> tuple[torch.Tensor, int]:
        runner = runner_of(model.folder, model.tensors, group)
        assert runner._model.spec.num_kv_heads == 4 // size
        assert (runner._decoder is not None) == has_kernels
        return step_logits(runner, drawn_like(sequence)), group.sent_bytes["tensor"]

    found = run_ranks(RankLayout(tensor=size), rank_of)
    for logits, _ in found:
        assert torch.equal(logits, found[0][0])
        assert float((logits - expected).norm() / expected.norm()) < 1e-5
    multiple = 1 if has_kernels else settled_rows()
    padded = [-(-rows // multiple) * multiple for rows in (39, 1)]
    rounds, config = size - 1, model.stock.config
    sums = 2 * config.num_hidden_layers * sum(padded) * config.hidden_size * 4 * rounds
    heads = 2 * multiple * -(-263 // size) * 4 * rounds
    assert {sent for _, sent in found} == {sums + heads}


def drawn_like(sequence: Sequence) -> Sequence:
    return Sequence("one", list(sequence.token_ids), sequence.num_prompt_tokens, block_table=list(sequence.block_table))


@pytest.mark.parametrize("arithmetic", ["exact", "fast"])
@pytest.mark.parametrize("kind", ["int8-group", "gguf-q8_0"])
def test_packed_weights_are_cut_at_whole_groups(kind: str, arithmetic: str, tiny: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    if kind == "int8-group":  # groups of 64
        sizes |= {"intermediate_size": 320}
    model = tiny("qwen3", 5, **sizes)
    model.stock.save_pretrained(model.folder)
    target = tmp_path / ("int8" if kind == "int8-group" else "tiny.gguf")
    quantize_checkpoint(model.folder, target, kind)
    folder, tensors, _ = mapped_tensors(target)
    sequence = drawn_sequence(40, seeded_random())
    expected = step_logits(runner_of(folder, tensors, None, arithmetic), sequence)

    def rank_of(group: RankGroup) -> torch.Tensor:
        runner = runner_of(folder, tensors, group, arithmetic)
        assert (runner._decoder is not None) == (arithmetic == "fast" and load_kernels() is not None)
        return step_logits(runner, drawn_like(sequence))

    found = run_ranks(RankLayout(tensor=2), rank_of)
    limit = 1e-5 if arithmetic == "exact" else 0.05
    for one in found:
        assert float((one - expected).norm() / expected.norm()) < limit


KINDS = ["F32", "BF16", "Q8_0", "Q4_K", "GROUP_INT8"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_slice_has_the_values_of_its_part(kind: str) -> None:
    rng = seeded_rng()
    block = {"Q8_0": 32, "Q4_K": 256, "GROUP_INT8": 16}.get(kind, 1)
    size = rng.integers(2, 5)
    whole = DecoderSpec(50, 64, int(rng.integers(size, 7)) * 256, 1, 4 * size, 2 * size, 256, 1e-5, 64)
    matrices = {
        "q_proj": (whole.num_heads * 256, 512),
        "o_proj": (64, whole.num_heads * 256),
        "up_proj": (whole.intermediate_size, 512),
        "down_proj": (64, whole.intermediate_size),
    }
    for part, (rows, columns) in matrices.items():
        name = f"model.layers.0.x.{part}.weight"
        weight = drawn_weight(kind, rows, columns, rng)
        dense = unpack_rows(weight, 0, rows)
        cuts = [DecoderShare(whole, rank, size, block).cut_packed(name, weight) for rank in range(size)]
        pieces = [unpack_rows(cut, 0, cut.rows) for cut in cuts]
        assert [tuple(piece.shape) for piece in pieces] == [(cut.rows, cut.columns) for cut in cuts]
        assert torch.equal(torch.cat(pieces, dim=1 if part in ("o_proj", "down_proj") else 0), dense)


def drawn_weight(kind: str, rows: int, columns: int, rng: Any) -> PackedWeight:
    if kind in ("F32", "BF16"):
        values = torch.from_numpy(rng.normal(size=(rows, columns))).float()
        return packed_weight("one", kind, values if kind == "F32" else values.bfloat16())
    if kind == "GROUP_INT8":
        data = torch.from_numpy(rng.integers(-128, 128, (rows, columns)).astype("int8"))
        return group_int8_weight("one", data, torch.from_numpy(rng.random(rows * columns // 16, "float32")), 16)
    elements, nbytes = BLOCK_SIZES[kind]
    blocks = torch.from_numpy(rng.integers(0, 256, (rows, columns // elements, nbytes)).astype("uint8"))
    halves = 2 if kind == "Q4_K" else 1
    scales = torch.from_numpy(rng.random((rows, columns // elements, halves))).half()
    blocks[..., : 2 * halves] = scales.view(torch.uint8)
    return packed_weight("one", kind, blocks.flatten(1))


@pytest.mark.parametrize("class_name", ARCHITECTURES)
def test_matrices_are_cut_as_transformers_plans_it(class_name: str) -> None:
    model_type = {"Qwen3MoeForCausalLM": "qwen3_moe"}.get(class_name, class_name.removesuffix("ForCausalLM").lower())
    config = AutoConfig.for_model(model_type)
    plan = config.base_model_tp_plan
    experts = ExpertsSpec(4, 2, 64, frozenset({1}))
    share = DecoderShare(DecoderSpec(64, 64, 64, 2, 4, 4, 16, 1e-5, 64, experts=experts), 1, 2)
    stacked = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    paths = {f"layers.0.self_attn.{part}_proj": "" for part in "qkvo"}
    if any(".mlp.down_proj" in key for key in plan):
        paths |= {f"layers.0.mlp.{part}_proj": "" for part in ("gate", "up", "down")}
    if any(".experts." in key for key in plan):
        paths |= {f"layers.1.mlp.experts.2.{part}": stacked.get(part, part) for part in ("gate_proj", "down_proj")}
    for path, leaf in paths.items():
        known = f"layers.1.mlp.experts.{leaf}" if leaf else path
        (ways,) = {way for pattern, way in plan.items() if fnmatch.fnmatchcase(known, pattern) and "norm" not in known}
        cut = share.slice_of(f"model.{path}.weight")
        assert cut is not None
        assert cut.dimension == {"colwise": 0, "packed_colwise": 0, "rowwise": 1}[ways], path
    for whole in ("layers.0.mlp.gate", "layers.0.input_layernorm", "layers.0.self_attn.q_norm", "embed_tokens"):
        assert share.slice_of(f"model.{whole}.weight") is None


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2, "3 query heads cannot be divided among 2 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "3 key/value heads cannot be divided among 2 ranks"),
        ({"intermediate_size": 3}, 4, "down_proj's 3 columns cannot be divided among 4 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(sizes: dict[str, int], size: int, message: str) -> None:
    config = AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], hidden_size=96, **sizes)
    with pytest.raises(EngineError, match=re.escape(message)):
        check_ranks(config, RankLayout(tensor=size))
    check_ranks(config, RankLayout(cfg=2))


def test_followers_know_the_blocks_of_each_chunk() -> None:
    """Sequences come, grow, lose their blocks and go: what is said of each step is enough."""
    rng, writer, reader = seeded_random(), StepWriter(), StepReader()
    live: list[Sequence] = []
    for _ in range(200):
        if len(live) < 6 and rng.random() < 0.4:
            live.append(Sequence("r", rng.choices(range(99), k=rng.randint(1, 60)), rng.randint(1, 60)))
        if live and rng.random() < 0.1:
            live.pop(rng.randrange(len(live)))
        chunks = []
        for one in rng.sample(live, rng.randint(0, len(live))):
            if rng.random() < 0.2:
                one.block_table.clear()
            elif one.block_table and rng.random() < 0.1:
                one.block_table[-1] = rng.randrange(99)
            one.block_table += rng.choices(range(99), k=rng.randint(0, 3))
            start = rng.randrange(len(one.token_ids))
            end = rng.randint(start + 1, len(one.token_ids))
            proposed = tuple(rng.choices(range(99), k=rng.randint(0, 2))) if end == len(one.token_ids) else ()
            chunks.append(Chunk(one, start, end + len(proposed), end == len(one.token_ids), proposed=proposed))
        copies = [(rng.randrange(9), rng.randrange(9))]
        plan = json.loads(json.dumps(writer.plan(chunks, copies)))
        heard = reader.chunks(plan)
        assert plan["copies"] == [list(one) for one in copies]
        for ours, theirs in zip(chunks, heard, strict=True):
            assert (ours.token_ids, ours.start, ours.end) == (theirs.token_ids, theirs.start, theirs.end)
            assert (ours.num_logits, ours.proposed) == (theirs.num_logits, theirs.proposed)
            assert ours.sequence.block_table == theirs.sequence.block_table
            assert ours.sequence.num_prompt_tokens == theirs.sequence.num_prompt_tokens
        del chunks, heard
    assert len(reader._blocks) <= 7  # those that are gone are forgotten


def test_a_failure_on_one_rank_ends_the_group(tiny: Any, request_of: Any, prompt_of: Any, monkeypatch: Any) -> None:
    def lead(engine: LLMEngine, group: RankGroup) -> str:
        engine.add_request(request_of("one", prompt_of(5), max_tokens=3))
        engine.step()
        layers = engine._runner._model.module.model.layers  # type: ignore[union-attr]
        monkeypatch.setattr(layers[1].mlp, "forward", broken)
        with pytest.raises(RankLost, match="rank 0 failed in a step: out of order"):
            engine.step()
        with pytest.raises(RankLost):
            engine.step()

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("out of order")

    _, lost = on_ranks(tiny("llama", 3), 2, lead)
    assert isinstance(lost, RankLost)
    assert lost.ranks == (0,)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_slices_alone_and_refuses_another_shape(rank: int, tiny: Any) -> None:
    model = tiny("qwen2", 5, tie_word_embeddings=False)
    slices = stored_slices(model.folder, dict.fromkeys(model.tensors, "F32"), rank, 2)
    own = {
        name: tensor.narrow(slices[name][0], slices[name][1], slices[name][2] - slices[name][1])
        if name in slices
        else tensor
        for name, tensor in model.tensors.items()
    }
    assert {name.rpartition(".")[2] for name in slices} == {"weight", "bias"}
    assert sum(one.nbytes for one in own.values()) < 0.7 * sum(one.nbytes for one in model.tensors.values())
    group: Any = SimpleNamespace(
        layout=RankLayout(tensor=2), size=lambda axis: 2, place=SimpleNamespace(tensor=rank), all_reduce=torch.clone
    )

    def state_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        module = create_model(load_config(model.folder), tensors, torch.device("cpu"), ranks=group).module
        return dict(module.state_dict())

    whole, sliced = state_of(model.tensors), state_of(own)
    assert all(torch.equal(whole[name], tensor) for name, tensor in sliced.items())
    name = next(name for name in model.tensors if name.endswith("q_proj.weight"))
    for wrong in (torch.cat([model.tensors[name]] * 2), model.tensors[name][:-1]):
        with pytest.raises(EngineError, match=r"q_proj\.weight"):
            state_of({**model.tensors, name: wrong})


LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def drawn_lora(model: Any, name: str, layers: list[str], *, is_dora: bool = False) -> TextLora:
    """Return a LoRA of random pairs for all modules whose names end so."""
    rng, pairs = seeded_rng(), {}
    for path, module in model.stock.named_modules():
        if path.rpartition(".")[2] in layers and isinstance(module, torch.nn.Linear):
            down, up = (
                torch.from_numpy(rng.normal(size=size)).float() * 0.15
                for size in ((3, module.in_features), (module.out_features, 3))
            )
            bias = torch.from_numpy(rng.normal(size=module.out_features)).float() * 0.1
            length = module.weight.norm(dim=1) * (1 + 0.2 * torch.from_numpy(rng.random(module.out_features)).float())
            pairs[path] = LoraPair(down, up, 1.5, length if is_dora else None, bias=None if is_dora else bias)
    return TextLora(name, LoraAdapter(Path(name), {"model": pairs}), float(rng.uniform(0.5, 1.0)))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("family", "size", "overrides", "layers"),
    [
        ("llama", 2, {"attention_bias": True, "mlp_bias": True}, LORA_LAYERS),
        ("qwen3", 4, {"head_dim": 16}, [*LORA_LAYERS, "lm_head"]),
        ("mixtral", 2, {"num_local_experts": 3}, LORA_LAYERS[:4]),
    ],
)
def test_loras_of_ranks_write_what_one_rank_writes(
    family: str, size: int, overrides: dict[str, Any], layers: list[str], tiny: Any, prompt_of: Any, tmp_path: Path
) -> None:
    """Requests with and without LoRAs share steps, and an adapter that nobody has any more is forgotten."""
    model = tiny(family, 3, **overrides)
    loras = [drawn_lora(model, name, layers) for name in ("one", "other")]
    dora = drawn_lora(model, "dora", ["q_proj", "v_proj"], is_dora=True)
    greedy = SamplingParams(max_tokens=7)
    uses: list[tuple[TextLora, ...]] = [(), (loras[0],), (loras[1], loras[0]), (dora,), (loras[1],)]
    asked = [TextRequest(f"{number}", prompt_of(9 + number), greedy, loras=own) for number, own in enumerate(uses)]
    joins = [0, 1, 2, 3, 9]
    expected = texts_of(model.engine(**OPTIONS), asked, joins)
    assert expected["1", 0] != model.greedy(prompt_of(10), 7)
    found, *ends = on_ranks(model, size, lambda engine, _: texts_of(engine, asked, joins))
    assert ends == [None] * (size - 1)
    assert found == expected


def test_followers_forget_loras_that_are_gone() -> None:
    writer = LoraWriter()

    def chunk(*loras: FittedLora) -> Chunk:
        sequence = Sequence("one", [1], 1, loras=tuple(SequenceLora("key", lora, 1.0) for lora in loras))
        return Chunk(sequence, 0, 1, is_last=True)

    pairs = {"layer": LoraPair(torch.ones(1, 2), torch.ones(3, 1), 0.5)}
    first, second = (FittedLora(serial, {}, {}, pairs) for serial in (7, 8))
    said, tensors = writer.plan([chunk(first)])
    assert ([serial for serial, _ in said["loras"]], len(tensors), said["gone_loras"]) == ([7], 2, [])
    assert writer.plan([chunk(first)])[0] == {"loras": [], "forms": [], "gone_loras": []}
    del first
    said, _ = writer.plan([chunk(second)])
    assert ([serial for serial, _ in said["loras"]], said["gone_loras"]) == ([8], [7])
    assert writer.plan([chunk(second)])[0]["gone_loras"] == []


def test_a_dora_of_divided_columns_is_refused(tiny: Any, prompt_of: Any) -> None:
    model = tiny("llama", 3)
    lora = drawn_lora(model, "dora", ["o_proj"], is_dora=True)

    def lead(engine: LLMEngine, _: RankGroup) -> Any:
        with pytest.raises(EngineError, match=r"dora: a DoRA of 'model\.layers\.0\.self_attn\.o_proj' cannot be div"):
            engine.add_request(TextRequest("one", prompt_of(5), SamplingParams(max_tokens=2), loras=(lora,)))

    assert on_ranks(model, 2, lead) == [None, None]


def test_an_answer_of_ranks_keeps_to_its_grammar(tiny: Any) -> None:
    model = tiny("qwen2", 2, max_position_embeddings=512)
    schema = {"type": "array", "items": {"enum": ["red", 3, None]}, "minItems": 2, "maxItems": 4}

    def asked(engine: LLMEngine) -> list[TextRequest]:
        prompt, grammar = engine.encode_text("a list"), engine.grammars.compile_schema(schema)
        sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
        return [TextRequest("one", prompt, sampling, 2, grammar)]

    alone = model.engine(**OPTIONS)
    expected = texts_of(alone, asked(alone), [0])
    found, _ = on_ranks(model, 2, lambda engine, _: texts_of(engine, asked(engine), [0]))
    assert found == expected


@pytest.mark.parametrize("dtype", ["F8_E4M3", "Q8_0"])
def test_ranks_read_all_of_what_they_cannot_cut(dtype: str, tiny: Any) -> None:
    model = tiny("qwen2", 5)
    assert stored_slices(model.folder, dict.fromkeys(model.tensors, dtype), 0, 2) == {}
