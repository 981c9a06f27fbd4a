"""Measures the adder with stock transformers: python infra/demo/measure_adder.py [--json].

`--form gguf-q8_0` (or another form of `atelier quantize`, or all) writes it in that form first and measures it with
Atelier's engine on the packed weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from adder_data import (
    LIMIT,
    MAIN_PHRASING,
    OTHER_PHRASINGS,
    Chat,
    Pair,
    answer,
    assistant_turn,
    held_out_pairs,
    system_turn,
    training_pairs,
    user_turn,
)
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from infra.offline.checkpoints import FORMS, Form, quantize_checkpoint
from weights.loading.views import mapped_tensors

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "adder"
MAIN_TARGET = 0.98
OTHER_TARGET = 0.97
BATCH = 256

Case = tuple[Chat, Pair]


class Reader:
    """Answers chats greedily in float32, in batches of equally long prompts."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model: PreTrainedModel = model.eval()

    def accuracy(self, cases: list[Case]) -> float:
        """Only the exact answer counts, with the end token right behind it."""
        groups: dict[int, list[tuple[list[int], str]]] = defaultdict(list)
        for chat, pair in cases:
            ids = self.prompt(chat)
            groups[len(ids)].append((ids, answer(pair)))
        right = sum(
            self._right(group[start : start + BATCH])
            for group in groups.values()
            for start in range(0, len(group), BATCH)
        )
        return right / len(cases)

    def prompt(self, chat: Chat) -> list[int]:
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def _right(self, group: list[tuple[list[int], str]]) -> int:
        ids = torch.tensor([prompt for prompt, _ in group])
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=8,
        )
        texts = self.tokenizer.batch_decode(output[:, ids.shape[1] :])
        end, pad = self.tokenizer.eos_token, self.tokenizer.pad_token
        found = [text.replace(pad, "") for text in texts]
        return sum(text == right + end for text, (_, right) in zip(found, group, strict=True))


class PackedReader:
    """Answers the same chats through the engine, on weights that stay packed."""

    def __init__(self, directory: Path, form: Form, work: Path) -> None:
        model = work / (f"{form}.gguf" if form.startswith("gguf") else form)
        quantize_checkpoint(directory, model, form)
        folder, tensors, _ = mapped_tensors(model)
        self.engine = LLMEngine(folder, tensors, LLMEngineConfig(kv_cache_bytes=256 * 2**20))

    def accuracy(self, cases: list[Case]) -> float:
        expected: dict[str, str] = {}
        found: dict[str, str] = defaultdict(str)
        ended = set()
        for number, (chat, pair) in enumerate(cases):
            expected[str(number)] = answer(pair)
            ids = self.engine.chats.encode(chat)
            self.engine.add_request(TextRequest(str(number), ids, SamplingParams(max_tokens=8, temperature=0)))
        while self.engine.has_work:
            for delta in self.engine.step():
                found[delta.request_id] += delta.text
                if delta.finish_reason == "stop":
                    ended.add(delta.request_id)
        return sum(found[name] == right and name in ended for name, right in expected.items()) / len(cases)


def single(pairs: Iterable[Pair], phrasing: str = MAIN_PHRASING) -> list[Case]:
    return [([user_turn(pair, phrasing)], pair) for pair in pairs]


def with_system(pairs: Iterable[Pair]) -> list[Case]:
    return [([system_turn(), user_turn(pair)], pair) for pair in pairs]


def with_history(pairs: Iterable[Pair], turns: int, draw: random.Random) -> list[Case]:
    known = training_pairs()
    cases = []
    for pair in pairs:
        chat: Chat = []
        for earlier in draw.sample(known, turns - 1):
            chat += [user_turn(earlier), assistant_turn(earlier)]
        cases.append(([*chat, user_turn(pair)], pair))
    return cases


def suites(sample: int, every_pair: bool) -> dict[str, list[Case]]:
    held_out = held_out_pairs()
    draw = random.Random(0)
    some = draw.sample(held_out, min(sample, len(held_out)))
    chosen = {MAIN_PHRASING: single(held_out)}
    chosen |= {phrasing: single(some, phrasing) for phrasing in OTHER_PHRASINGS}
    chosen["with system message"] = with_system(some)
    chosen["second turn"] = with_history(some, 2, draw)
    chosen["third turn"] = with_history(some, 3, draw)
    digits = [(a, b) for a in range(10) for b in range(10)]
    chosen["single digits, a + b"] = single(digits, "{a} + {b}")
    if every_pair:
        chosen["all 10,000 pairs"] = single((a, b) for a in range(LIMIT) for b in range(LIMIT))
    return chosen


def target(name: str) -> float:
    return MAIN_TARGET if name == MAIN_PHRASING else OTHER_TARGET


def show(console: Console, form: str, results: list[dict[str, object]]) -> None:
    table = Table("suite", "sums", "right", "target", "", title=f"adder ({form}), exact answers")
    for row in results:
        verdict = "[green]ok[/]" if row["passed"] else "[red]below[/]"
        figures = (f"{row['accuracy']:.2%}", f"{row['target']:.0%}")
        table.add_row(str(row["suite"]), str(row["sums"]), *figures, verdict)
    console.print(table)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the adder on sums it never saw.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--sample", type=int, default=250, help="sums per further suite")
    parser.add_argument("--every-pair", action="store_true", help="also all 10,000 pairs")
    parser.add_argument("--threads", type=int, default=2, help="1 where the cores are shared")
    parser.add_argument("--form", choices=["hf", *FORMS, "all"], default="hf")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    forms = ["hf", *FORMS] if options.form == "all" else [options.form]
    found = {form: measure_form(form, options) for form in forms}
    passed = all(bool(row["passed"]) for results in found.values() for row in results)
    if options.json:
        print(json.dumps({"passed": passed, "forms": found}))
    else:
        for form, results in found.items():
            show(Console(), form, results)
    return 0 if passed else 1


def measure_form(form: str, options: argparse.Namespace) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as work:
        is_stock = form == "hf"
        return measure(Reader(options.model) if is_stock else PackedReader(options.model, form, Path(work)), options)


def measure(reader: Reader | PackedReader, options: argparse.Namespace) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, cases in progress.track(suites(options.sample, options.every_pair).items()):
            accuracy = reader.accuracy(cases)
            row = {"suite": name, "sums": len(cases), "accuracy": round(accuracy, 4)}
            results.append(row | {"target": target(name), "passed": accuracy >= target(name)})
    return results


if __name__ == "__main__":
    sys.exit(main())
