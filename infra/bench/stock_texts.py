"""`infra.bench stock --texts`: language models that transformers' own code runs, over the engine, beside `generate`.

In one process, of the same weights, in turn: one text, several at once, and as `generate` has several, one after the
other and as one batch. Prompts are fresh, greedy, and of equal lengths, so that a batch of `generate` needs no padding.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from deployments.console.output import Column, print_json, print_line, print_table
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from infra.bench.stock_models import TEXT_CLASSES, save_text_model

_COLUMNS: Final = ("ours, one", "generate, one", "ours / generate", "by processor time", "ours, several")
_RATIOS: Final = ("/ one after the other", "/ a batch of generate", "equal tokens")

Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class TextEffort:
    """The amount of measuring: tokens of a prompt and of a text, texts at once, rounds, and a shrunk model's width."""

    prompt: int = 64
    tokens: int = 128
    texts: int = 8
    rounds: int = 3
    width: int = 640
    layers: int = 8


@dataclass(frozen=True, slots=True)
class _Taken:
    seconds: float
    cpu_s: float
    texts: Texts


def measure_texts(effort: TextEffort, seed: int) -> list[dict[str, Any]]:
    """Return the figures of each of TEXT_CLASSES."""
    with tempfile.TemporaryDirectory(prefix="bench-texts-") as folder:
        return [_measure_class(name, effort, seed, Path(folder) / name) for name in TEXT_CLASSES]


@torch.inference_mode()
def _measure_class(name: str, effort: TextEffort, seed: int, folder: Path) -> dict[str, Any]:
    model = save_text_model(name, folder, seed, effort.width, effort.layers)
    engine = LLMEngine(folder, load_file(folder / "model.safetensors"), LLMEngineConfig(kv_cache_bytes=2**28))
    draws = torch.Generator().manual_seed(seed)
    options = min(({}, {"cache_implementation": "static"}), key=lambda one: _option_s(model, effort, draws, one))
    alone, several = slice(0, 1), slice(0, effort.texts)
    ways: dict[str, Callable[[Texts], Texts]] = {
        "ours one": lambda prompts: _our_texts(engine, prompts[alone], effort.tokens),
        "generate one": lambda prompts: _stock_texts(model, prompts[alone], effort.tokens, options),
        "ours several": lambda prompts: _our_texts(engine, prompts[several], effort.tokens),
        "generate each": lambda prompts: [
            text for one in prompts for text in _stock_texts(model, [one], effort.tokens, options)
        ],
        "generate batch": lambda prompts: _stock_texts(model, prompts, effort.tokens, options),
    }
    taken: dict[str, list[_Taken]] = {way: [] for way in ways}
    for round_ in range(-1, effort.rounds):
        prompts = _prompts(effort, model.config.vocab_size, draws)
        for way in sorted(ways, reverse=round_ % 2 == 1):
            one = _timed(ways[way], prompts)
            if round_ >= 0:
                taken[way].append(one)
    cache = "static" if options else "dynamic"
    return {"class": name, "parameters": model.num_parameters(), "cache": cache, **_figures(taken, effort)}


def _option_s(model: Any, effort: TextEffort, draws: torch.Generator, options: dict[str, Any]) -> float:
    """Return the seconds of one text with these options of `generate`, the faster of two."""
    prompts = _prompts(effort, model.config.vocab_size, draws)[:1]
    return min(_timed(lambda given: _stock_texts(model, given, effort.tokens, options), prompts).seconds for _ in "12")


def _prompts(effort: TextEffort, vocab_size: int, draws: torch.Generator) -> Texts:
    found: Texts = torch.randint(3, vocab_size, (effort.texts, effort.prompt), generator=draws).tolist()
    return found


def _timed(write: Callable[[Texts], Texts], prompts: Texts) -> _Taken:
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    texts = write(prompts)
    return _Taken(time.perf_counter() - begin_s, time.process_time() - begin_cpu_s, texts)


def _our_texts(engine: LLMEngine, prompts: Texts, count: int) -> Texts:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    for place, prompt in enumerate(prompts):
        engine.add_request(TextRequest(str(place), tuple(prompt), params))
    texts: Texts = [[] for _ in prompts]
    while engine.has_work:
        for delta in engine.step():
            texts[int(delta.request_id)] += delta.token_ids
    return texts


def _stock_texts(model: Any, prompts: Texts, count: int, options: dict[str, Any]) -> Texts:
    given = torch.tensor(prompts)
    mask = torch.ones_like(given)
    output = model.generate(
        given, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
    )
    texts: Texts = output[:, given.shape[1] :].tolist()
    return texts


def _figures(taken: dict[str, list[_Taken]], effort: TextEffort) -> dict[str, Any]:
    def speed(way: str, num_texts: int) -> float:
        return num_texts * effort.tokens / statistics.median(one.seconds for one in taken[way])

    def ratio(slow: str, fast: str, kind: str = "seconds") -> float:
        """Return the median of the ratios of each round, whose two sides had the same machine."""
        pairs = zip(taken[slow], taken[fast], strict=True)
        return statistics.median(getattr(a, kind) / getattr(b, kind) for a, b in pairs)

    return {
        "ours_one": speed("ours one", 1),
        "generate_one": speed("generate one", 1),
        "one_ratio": ratio("generate one", "ours one"),
        "one_cpu_ratio": ratio("generate one", "ours one", "cpu_s"),
        "ours_several": speed("ours several", effort.texts),
        "each_ratio": ratio("generate each", "ours several"),
        "batch_ratio": ratio("generate batch", "ours several"),
        "equal": _share_equal(taken["ours one"], taken["generate one"]),
        "equal_several": _share_equal(taken["ours several"], taken["generate each"]),
    }


def _share_equal(ours: Sequence[_Taken], theirs: Sequence[_Taken]) -> float:
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.texts, b.texts, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def print_text_figures(rows: Sequence[dict[str, Any]], effort: TextEffort, as_json: bool) -> None:
    """Print the table, or one JSON array."""
    if as_json:
        print_json(rows)
        return
    columns = [Column("class"), *(Column(one, align="right") for one in (*_COLUMNS, *_RATIOS))]
    names = ("one_ratio", "one_cpu_ratio")
    shown = [
        (
            row["class"],
            *(f"{row[one]:.1f}" for one in ("ours_one", "generate_one")),
            *(f"{row[one]:.2f}" for one in names),
            f"{row['ours_several']:.1f}",
            *(f"{row[one]:.2f}" for one in ("each_ratio", "batch_ratio")),
            f"{row['equal']:.0%}, {row['equal_several']:.0%}",
        )
        for row in rows
    ]
    title = f"tokens/s of texts of {effort.tokens} tokens behind prompts of {effort.prompt}, one and {effort.texts}"
    print_table(columns, shown, title=title)
    for row in rows:
        million = row["parameters"] / 1e6
        print_line(f"{row['class']}: {million:.0f} million parameters; generate with its {row['cache']} cache")
