"""`infra.bench ranks`: a language model on two ranks of one thread each, beside one process of two threads.

Both have the same weights and threads, so the difference is what the ranks' plans and sums cost, through this machine's
memory. The two take turns, and each time is a median of wall time, which other work on the machine changes. Weights are
random and bfloat16, so the best tokens are close: other sums may choose another, and the texts that are the same are
counted.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from deployments.engines.llm.engine import LLMEngine, step_follower
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.ranks.following import RankChannel, follow
from deployments.engines.ranks.group import RankGroup
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.ranks.links import Meeting, listening
from deployments.engines.records.protocol import SamplingParams, TextRequest
from infra.bench.llm_files import write_tokenizer

LAYOUT: Final = RankLayout(tensor=2)
_BOUND_S: Final = 60.0
_VOCABULARY: Final = 4096
_NAME: Final = "model"


@dataclass(frozen=True, slots=True)
class RanksSettings:
    """Sizes of the decoder, by default TinyLlama's layers, and tokens of a prompt and behind it; rounds of each way."""

    width: int = 2048
    layers: int = 4
    num_prompt: int = 128
    num_tokens: int = 32
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class _Turn:
    """The wall seconds of a prompt and of each token behind it, and the tokens."""

    prompt_s: float
    token_s: list[float]
    token_ids: list[int]


def measure_ranks(settings: RanksSettings, seed: int) -> list[dict[str, Any]]:
    """Return a row for each way. Each prompt is a new one: no block of the KV cache is found again."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as name:
        folder = _write_decoder(Path(name), settings)
        prompts = torch.randint(0, _VOCABULARY, (settings.rounds + 1, settings.num_prompt)).tolist()
        meeting, listener = listening()
        command = [sys.executable, "-m", "infra.bench.ranks", str(folder), str(meeting.port)]
        follower = subprocess.Popen(command)
        try:
            group = RankGroup.join(LAYOUT, 0, meeting.open(0, LAYOUT.size, _BOUND_S, listener), bound_s=_BOUND_S)
            alone = LLMEngine(folder, _weights(folder), _config(2))
            ranked = LLMEngine(folder, _weights(folder), _config(1), ranks=RankChannel(group, _NAME))
            turns: dict[str, list[_Turn]] = {}
            for prompt in prompts:
                for way, engine in (("one process, 2 threads", alone), ("2 ranks, 1 thread each", ranked)):
                    turns.setdefault(way, []).append(_turn(engine, prompt, settings.num_tokens))
            sent = sum(group.sent_bytes.values())
            group.close()
            follower.wait(_BOUND_S)
        finally:
            follower.kill()
            follower.wait()
    alike = [[turn.token_ids for turn in found] for found in turns.values()]
    num_alike = sum(one == other for one, other in zip(*alike, strict=True))
    per_token = sent / (settings.rounds + 1) / (settings.num_prompt + settings.num_tokens - 1)
    rows = [_row(way, found[1:]) for way, found in turns.items()]
    rows[1] |= {"bytes_per_token": round(per_token), "same_texts": f"{num_alike} of {len(prompts)}"}
    return rows


def print_ranks(rows: list[dict[str, Any]]) -> None:
    """Print the figures of `measure_ranks`."""
    table = Table("way", "prompt ms", "token ms", "bytes per token", title="one language model on two ranks")
    for row in rows:
        sent = f"{row['bytes_per_token']:,}" if "bytes_per_token" in row else ""
        table.add_row(row["way"], f"{row['prompt_ms']:.1f}", f"{row['token_ms']:.2f}", sent)
    Console(width=120).print(table)
    alone, ranked = rows
    speeds = [alone[name] / ranked[name] for name in ("prompt_ms", "token_ms")]
    print(f"speed of the ranks: {speeds[0]:.2f} of a prompt, {speeds[1]:.2f} of a token")
    print(f"same texts: {ranked['same_texts']}")


def _turn(engine: LLMEngine, prompt: list[int], num_tokens: int) -> _Turn:
    engine.add_request(TextRequest("one", tuple(prompt), SamplingParams(num_tokens, 0.0, ignore_eos=True)))
    steps, token_ids = list[tuple[float, int]](), list[int]()
    while engine.has_work:
        begin_s = time.perf_counter()
        new = [token for delta in engine.step() for token in delta.token_ids]
        steps.append((time.perf_counter() - begin_s, len(new)))
        token_ids += new
    first = next(place for place, (_, count) in enumerate(steps) if count)
    return _Turn(sum(took for took, _ in steps[: first + 1]), [took for took, _ in steps[first + 1 :]], token_ids)


def _row(way: str, turns: list[_Turn]) -> dict[str, Any]:
    return {
        "way": way,
        "prompt_ms": 1e3 * statistics.median(turn.prompt_s for turn in turns),
        "token_ms": 1e3 * statistics.median(took for turn in turns for took in turn.token_s),
    }


def _config(threads: int) -> LLMEngineConfig:
    return LLMEngineConfig(kv_cache_bytes=2**26, decode_threads=threads, prefill_threads=threads)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _write_decoder(folder: Path, settings: RanksSettings) -> Path:
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=settings.width * 11 // 4,
        num_hidden_layers=settings.layers,
        num_attention_heads=max(4, settings.width // 64),
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, _VOCABULARY)
    return folder


def _follow(folder: Path, port: int) -> None:
    """Be the second rank, until the first one ends."""
    store = Meeting(port=port).open(1, LAYOUT.size, _BOUND_S)
    group = RankGroup.join(LAYOUT, 1, store, bound_s=_BOUND_S)
    follow(group, {_NAME: step_follower(folder, _weights(folder), _config(1), group)})


if __name__ == "__main__":
    _follow(Path(sys.argv[1]), int(sys.argv[2]))
