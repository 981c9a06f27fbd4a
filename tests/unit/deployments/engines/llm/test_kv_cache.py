"""The KV cache in int8: what a vector loses, what an answer loses, and what memory it takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deployments.engines.llm.engine import working_bytes
from deployments.engines.llm.models.llama import DecoderSpec
from deployments.engines.llm.models.registry import decoder_spec, load_config
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE
from deployments.engines.llm.sequences.kv_cache import KVCache, free_memory, plan_cache
from deployments.engines.records.protocol import SamplingParams, TextRequest

SPEC = DecoderSpec(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_positions=512,
)


def int8_cache(dtype: torch.dtype = torch.float32, num_blocks: int = 4) -> KVCache:
    return KVCache(SPEC, num_blocks, dtype, torch.device("cpu"), "int8")


def plain_int8(vector: np.ndarray) -> np.ndarray:
    """A vector after int8 with a float16 scale, by the formula."""
    scale = np.float32(np.float16(np.abs(vector).max() / np.float32(127)))
    return np.clip(np.rint(vector / scale), -127, 127) * scale if scale else np.zeros_like(vector)


def drawn_vectors(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (torch.rand(2, num_tokens, 2, 1, generator=generator) * 6 - 3)
    keys, values = torch.randn(2, num_tokens, 2, 16, generator=generator) * sizes
    keys[3], values[5] = 0, 1e-9  # nothing, and less than the least scale
    return keys, values


def test_a_vector_loses_half_a_step_at_most():
    cache = int8_cache()
    keys, values = drawn_vectors(40, 0)
    slots = torch.randperm(64)[:40]
    cache.write_slots(1, slots, keys, values)
    for given, read in zip((keys, values), cache.read_slots(1, slots), strict=True):
        expected = np.stack([[plain_int8(head) for head in token] for token in given.numpy()])
        np.testing.assert_allclose(read.numpy(), expected, rtol=1e-6)
        bound = given.abs().amax(-1, keepdim=True) / 254 * 1.001 + 127 * 2**-24  # float16's least number
        assert bool(((read - given).abs() <= bound).all())
    run = cache.read_run(1, 0, 64)
    assert all(map(torch.equal, cache.read_slots(1, torch.arange(64)), run))
    assert not cache.read_run(0, 0, 64)[0].any()


def test_a_token_is_stored_alike_in_any_company():
    together, alone = int8_cache(torch.bfloat16), int8_cache(torch.bfloat16)
    keys, values = (one.bfloat16() for one in drawn_vectors(20, 1))
    together.write_slots(0, torch.arange(20), keys, values)
    for slot in range(20):
        alone.write_slots(0, torch.tensor([slot]), keys[slot : slot + 1], values[slot : slot + 1])
    assert all(map(torch.equal, together.read_run(0, 0, 64), alone.read_run(0, 0, 64)))
    assert together.read_run(0, 0, 20)[0].dtype is torch.bfloat16


def test_blocks_are_copied_with_their_scales():
    cache = int8_cache()
    cache.write_slots(0, torch.arange(BLOCK_SIZE), *drawn_vectors(BLOCK_SIZE, 2))
    cache.copy_blocks([(0, 2)])
    before, after = (cache.read_run(0, block * BLOCK_SIZE, BLOCK_SIZE) for block in (0, 2))
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_half_of_the_memory(head_dim, tiny):
    model = tiny("llama", 0, head_dim=head_dim)
    spec = decoder_spec(load_config(model.folder))
    limits = {"kv_cache_bytes": 2**22, "max_num_seqs": 10**6, "max_model_len": None}
    wide, narrow = (plan_cache(spec, torch.bfloat16, kv_dtype=kind, **limits) for kind in ("auto", "int8"))
    assert 1.93 < narrow.num_blocks / wide.num_blocks < 2
    cache = KVCache(spec, narrow.num_blocks, torch.bfloat16, torch.device("cpu"), "int8")
    slots = [one for layer in range(spec.num_layers) for one in cache.layer_slots(layer) if one is not None]
    nbytes = sum(one.nbytes for one in slots)
    cpu = torch.device("cpu")
    counted = working_bytes(
        model.folder, torch.bfloat16, cpu, kv_cache_bytes=2**22, max_num_seqs=10**6, kv_dtype="int8"
    )
    assert nbytes <= counted <= nbytes + 4096 * 8
    assert nbytes <= 2**22 * 1.01


def log_probabilities(engine, requests):
    for request in requests:
        engine.add_request(request)
    found: dict[str, list] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta.logprob)
        assert not engine.failures
    return found


def scoring_request(id_: str, prompt) -> TextRequest:
    return TextRequest(id_, prompt, SamplingParams(max_tokens=12, num_logprobs=20))


def test_answers_lose_little(tiny, prompt_of):
    """The log probabilities of a prompt's tokens, between int8 and float32: a hundredth of what they vary by."""
    model = tiny("llama", 0, head_dim=16)
    errors, values = [], []
    for length in (40, 130, 200):
        prompt = prompt_of(length)
        request = TextRequest("r", prompt, SamplingParams(max_tokens=1, num_logprobs=1), scores_prompt=True)
        found = []
        for kv_dtype in ("auto", "int8"):
            engine = model.engine(kv_dtype=kv_dtype)
            engine.add_request(request)
            deltas = []
            while engine.has_work:
                deltas += engine.step()
            found.append([one.logprob for one in deltas[0].prompt_logprobs[1:]])
        errors += [a - b for a, b in zip(*found, strict=True)]
        values += found[0]
    error = math.sqrt(np.mean(np.square(errors)))
    assert 0 < error < 0.02 * float(np.std(values))


@pytest.mark.parametrize("budget", [24, 512])
def test_cuts_company_and_a_prefix_hit_change_no_bit(budget, tiny, prompt_of):
    model = tiny("llama", 0, head_dim=16)
    requests = [scoring_request(str(i), prompt_of(length)) for i, length in enumerate((70, 130, 9, 65))]
    alone: dict[str, list] = {}
    for request in requests:
        alone |= log_probabilities(model.engine(kv_dtype="int8"), [request])
    engine = model.engine(kv_dtype="int8", max_num_batched_tokens=budget, is_deterministic=True)
    assert log_probabilities(engine, requests) == alone
    assert log_probabilities(engine, requests) == alone  # found in the cache


def test_free_memory_is_the_machine_s_or_the_group_s(tmp_path) -> None:
    cpu = torch.device("cpu")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n")
    assert free_memory(cpu, tmp_path) == 4000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1048576\n")
    for most, free in (("max", 4000 * 1024), ("3145728", 2 * 2**20), ("9999999999", 4000 * 1024), ("1000", 0)):
        (group / "memory.max").write_text(f"{most}\n")
        assert free_memory(cpu, tmp_path) == free
    assert 0 < free_memory(cpu) < 2**50
