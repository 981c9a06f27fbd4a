"""The parts of `infra.bench peers` on decoders: prompts and tokens in bfloat16 and int8, beginnings in common, streams.

A decoder of TinyLlama's shape with random weights, in the form that each engine reads; what a side writes first is
compared with transformers in float32.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from infra.bench.llm_files import write_model
from infra.bench.peers.settings import OURS, PeersSettings, Took, rows_of
from infra.bench.peers.texts import (
    OurTexts,
    Prompts,
    StockTexts,
    Texts,
    TextSide,
    genai_texts,
    llama_texts,
    vllm_texts,
)
from infra.offline.checkpoints import Form, quantize_checkpoint

_SCORED: Final = (2, 64)  # prompts whose first tokens are compared, and tokens of each
_BEGIN: Final = 8  # tokens of the prompt before tokens that are timed
_ROOM: Final = 64  # of a context, beside prompts and new tokens
_OTHERWISE: Final = "ours, other beginnings"

Sides = Mapping[str, TextSide]


class DecoderFiles:
    """The decoder in a folder, in each form from the first time on that it is wanted."""

    def __init__(self, folder: Path, settings: PeersSettings, seed: int) -> None:
        self._folder = folder
        self._settings = settings
        self._seed = seed

    @cached_property
    def plain(self) -> Path:
        """A Hugging Face folder in bfloat16."""
        write_model(self._folder / "plain", self._seed, **self._settings.decoder)
        return self._folder / "plain"

    @cached_property
    def w8a8(self) -> Path:
        """The folder with int8 weights, a scale for each row, and activations rounded token by token."""
        return write_w8a8(self.plain, self._folder / "w8a8")

    @cached_property
    def q8_0(self) -> Path:
        """A GGUF file with a scale for each 32 weights."""
        return self._exported("gguf-q8_0")

    @cached_property
    def bf16_gguf(self) -> Path:
        return self._exported("gguf-bf16")

    @cached_property
    def f16_gguf(self) -> Path:
        return self._exported("gguf-f16")

    @cached_property
    def vocabulary_size(self) -> int:
        return int(json.loads((self.plain / "config.json").read_text())["vocab_size"])

    def prompts(self, number: int, length: int) -> list[list[int]]:
        """Draw prompts."""
        return torch.randint(2, self.vocabulary_size, (number, length)).tolist()

    def _exported(self, form: Form) -> Path:
        target = self._folder / f"{form}.gguf"
        quantize_checkpoint(self.plain, target, form)
        return target


def write_w8a8(source: Path, target: Path) -> Path:
    """Write a folder as compressed-tensors has it: symmetric int8 by rows; embeddings and the head stay as they are."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        wide = tensor.float()
        scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        tensors[name] = (wide / scales).round().to(torch.int8)
        tensors[f"{name}_scale"] = scales.to(tensor.dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    ints = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**ints, "strategy": "channel", "dynamic": False},
        "input_activations": {**ints, "strategy": "token", "dynamic": True},
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


class Exact:
    """The log probabilities of the tokens behind some prompts, by transformers in float32."""

    def __init__(self, files: DecoderFiles) -> None:
        stock, self._prompts = StockTexts(files.plain, torch.float32), files.prompts(*_SCORED)
        self._expected = [stock.logprobs_of(prompt) for prompt in self._prompts]

    def distances(self, sides: Sides) -> dict[str, str]:
        """Return how far those of each side's first tokens are off, and how many are the best."""
        return {name: self._distance(side.write(self._prompts, 3, scores=True)) for name, side in sides.items()}

    def _distance(self, texts: Texts) -> str:
        firsts = [ids[0] for ids in texts.ids]
        found = list(zip(texts.logprobs, firsts, self._expected, strict=True))
        most_off = max(abs(own - float(all_[token])) for own, token, all_ in found)
        num_best = sum(token == int(all_.argmax()) for _, token, all_ in found)
        return f"log p off by {most_off:.1e}; {num_best} of {len(found)} best"


def measure_bfloat16(settings: PeersSettings, files: DecoderFiles) -> list[dict[str, Any]]:
    """Measure a prompt, and tokens behind a short one."""
    exact = Exact(files)
    with _sides_in_bfloat16(settings, files) as sides:
        return _prompt_and_tokens(settings, files, sides, exact)


def measure_int8(settings: PeersSettings, files: DecoderFiles) -> list[dict[str, Any]]:
    """Measure the same with int8 weights."""
    exact = Exact(files)
    with _sides_in_int8(settings, files) as sides:
        return _prompt_and_tokens(settings, files, sides, exact)


def measure_streams(settings: PeersSettings, files: DecoderFiles) -> list[dict[str, Any]]:
    """Measure prompts with int8 weights that come at once, until each has all of its tokens."""
    number, length, count = settings.streams
    exact = Exact(files)
    with _sides_in_int8(settings, files, has_batches=True) as sides:
        beside = exact.distances(sides)
        prompts = (files.prompts(number, length) for _ in range(settings.slow_rounds + 1))
        times = _timed(sides, lambda side, prompts: side.write(prompts, count).took, prompts)
    return rows_of(f"{number} x {length} + {count} tokens", times, beside)


def measure_prefix(settings: PeersSettings, files: DecoderFiles) -> list[dict[str, Any]]:
    """Measure prompts at once that begin alike, until all have a token; ours also with prompts that do not."""
    number, computed = settings.num_requests, dict[str, int]()

    def begun(shares: bool) -> list[list[int]]:
        beginnings = files.prompts(1 if shares else number, settings.num_shared)
        owns = files.prompts(number, settings.num_own)
        return [beginnings[place % len(beginnings)] + own for place, own in enumerate(owns)]

    with _sides_in_int8(settings, files, has_batches=True) as sides:
        ours = sides[OURS]

        def first_tokens(side: TextSide, prompts: Prompts) -> Took:
            texts = side.write(prompts, 1)
            computed[OURS] = texts.num_computed if side is ours else computed[OURS]
            return texts.took

        times = _timed(sides, first_tokens, (begun(shares=True) for _ in range(settings.slowest_rounds + 1)))
        others = ours.write(begun(shares=False), 1)
    beside = {OURS: f"{computed[OURS]} tokens computed", _OTHERWISE: f"{others.num_computed} tokens computed"}
    case = f"{number} x ({settings.num_shared} + {settings.num_own}) tokens"
    return rows_of(case, times | {_OTHERWISE: [others.took]}, beside)


@contextlib.contextmanager
def _sides_in_bfloat16(settings: PeersSettings, files: DecoderFiles) -> Iterator[Sides]:
    length = settings.num_prompt + settings.num_new + _ROOM
    own: Sides = {OURS: OurTexts(files.plain), "transformers": StockTexts(files.plain)}
    peers = {
        "vLLM": vllm_texts(settings.judges, lambda: files.plain, length),
        "OpenVINO": genai_texts(settings.judges, lambda: files.f16_gguf, "bf16"),
        "llama.cpp": llama_texts(lambda: files.bf16_gguf, length),
    }
    with _opened(own, peers) as sides:
        yield sides


@contextlib.contextmanager
def _sides_in_int8(settings: PeersSettings, files: DecoderFiles, *, has_batches: bool = False) -> Iterator[Sides]:
    length = max(settings.num_prompt, settings.num_shared + settings.num_own, settings.streams[1])
    length += max(settings.num_new, settings.streams[2]) + _ROOM
    peers = {
        "vLLM, W8A8": vllm_texts(settings.judges, lambda: files.w8a8, length),
        "OpenVINO": genai_texts(settings.judges, lambda: files.q8_0, "bf16"),
    }
    if not has_batches:
        peers["llama.cpp"] = llama_texts(lambda: files.q8_0, length)
    with _opened({OURS: OurTexts(files.q8_0)}, peers) as sides:
        yield sides


@contextlib.contextmanager
def _opened(own: Sides, peers: Mapping[str, AbstractContextManager[TextSide | None]]) -> Iterator[Sides]:
    with contextlib.ExitStack() as stack:
        found = {name: stack.enter_context(peer) for name, peer in peers.items()}
        yield {**own, **{name: side for name, side in found.items() if side is not None}}


def _prompt_and_tokens(
    settings: PeersSettings, files: DecoderFiles, sides: Sides, exact: Exact
) -> list[dict[str, Any]]:
    beside, count = exact.distances(sides), settings.num_new
    prompts = (files.prompts(1, settings.num_prompt) for _ in range(settings.slow_rounds + 1))
    rows = rows_of(
        f"prompt of {settings.num_prompt}",
        _timed(sides, lambda side, prompts: side.write(prompts, 1).took, prompts),
        beside,
    )

    def behind(side: TextSide, prompts: Prompts) -> Took:
        """Return the time of all tokens but the first one."""
        first, whole = (side.write([[*prompts[0], place]], number).took for place, number in ((2, 1), (3, count + 1)))
        return Took(whole.cpu_s - first.cpu_s, whole.wall_s - first.wall_s)

    begins = (files.prompts(1, _BEGIN) for _ in range(settings.slow_rounds + 1))
    return rows + rows_of("a token", _timed(sides, behind, begins), parts=count)


def _timed(sides: Sides, run: Callable[[TextSide, Prompts], Took], rounds: Iterator[Prompts]) -> dict[str, list[Took]]:
    """Return the times of all rounds but the first: engines make kernels for the lengths that they see first."""
    times: dict[str, list[Took]] = {name: [] for name in sides}
    for number, prompts in enumerate(rounds):
        for name, side in sides.items():
            took = run(side, prompts)
            times[name] += [took] if number else []
    return times
