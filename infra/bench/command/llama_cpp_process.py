"""llama.cpp behind pipes, in an interpreter that has llama-cpp-python and nothing of ours.

Orders are JSON lines: {"do": "run", "n_prompt", "n_gen", "depth", "num_parallel"} -> {"ns"};
{"do": "texts", "prompts", "count", "scores"} -> {"cpu_s", "wall_s", "ids", "logprobs"};
{"do": "tokens", "text"} -> {"ids"}; {"do": "greedy", "ids", "count"} -> {"ids"}; {"do": "logits", "ids"} -> {"logits"};
{"do": "all_logits", "ids", "file"} -> {}, with (ids, vocabulary) float32 in the file;
{"do": "quantize", "source", "target", "ftype"} -> {"failed"}.
Usage: llama_cpp_process.py MODEL THREADS THREADS_BATCH N_CTX N_BATCH N_UBATCH.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _internals as internals


class _Judge:
    """One model and context."""

    def __init__(self, path: str, threads: int, threads_batch: int, n_ctx: int, n_batch: int, n_ubatch: int) -> None:
        self.llama = llama_cpp.Llama(
            path,
            n_threads=threads,
            n_threads_batch=threads_batch,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            verbose=False,
        )
        self.n_batch = n_batch
        self.slots: _Slots | None = None

    def run_speed(self, n_prompt: int, n_gen: int, depth: int = 0, num_parallel: int = 1) -> dict[str, Any]:
        """Time a run as llama-bench does: an empty cache, random tokens, a wait for every token, nothing sampled."""
        if num_parallel > 1:
            if self.slots is None or self.slots.num_parallel != num_parallel:
                self.slots = _Slots(self.llama, num_parallel)
            return {"ns": self.slots.run_speed(n_prompt, n_gen, depth)}
        draw = random.Random(n_prompt)
        vocabulary = self.llama.n_vocab()
        self.llama.reset()
        if depth:
            self.llama.eval([draw.randrange(3, vocabulary) for _ in range(depth)])
        begin = time.perf_counter_ns()
        prompt = [draw.randrange(3, vocabulary) for _ in range(n_prompt)]
        if prompt:
            self.llama.eval(prompt)
        for _ in range(n_gen):
            self.llama.eval([draw.randrange(3, vocabulary)])
        return {"ns": time.perf_counter_ns() - begin}

    def tokenize_text(self, text: str) -> dict[str, Any]:
        return {"ids": self.llama.tokenize(text.encode(), add_bos=False, special=True)}

    def run_greedy(self, ids: list[int], count: int) -> dict[str, Any]:
        self.llama.reset()
        out: list[int] = []
        self.llama.eval(ids)
        for _ in range(count):
            out.append(int(self._logits().argmax()))
            self.llama.eval(out[-1:])
        return {"ids": out}

    def write_texts(self, prompts: list[list[int]], count: int, scores: bool) -> dict[str, Any]:
        """Continue prompts one after the other with the best tokens; `logprobs` are those of the first ones."""
        begin, begin_cpu, ids, logprobs = time.perf_counter(), time.process_time(), [], []
        for prompt in prompts:
            self.llama.reset()
            self.llama.eval(prompt)
            logits = self._logits()
            ids.append([int(logits.argmax())])
            if scores:
                best = logits.max()
                logprobs.append(float(-np.log(np.exp((logits - best).astype(np.float64)).sum())))
            for _ in range(count - 1):
                self.llama.eval(ids[-1][-1:])
                ids[-1].append(int(self._logits().argmax()))
        took = {"cpu_s": time.process_time() - begin_cpu, "wall_s": time.perf_counter() - begin}
        return {**took, "ids": ids, "logprobs": logprobs}

    def score_next(self, ids: list[int]) -> dict[str, Any]:
        self.llama.reset()
        self.llama.eval(ids)
        return {"logits": self._logits().tolist()}

    def score_all(self, ids: list[int], file: str) -> dict[str, Any]:
        """Write the logits behind each of the tokens, computed as one prompt."""
        self.llama._ctx.kv_cache_clear()
        batch = internals.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1, verbose=False)
        batch.set_batch(ids, n_past=0, logits_all=True)
        self.llama._ctx.decode(batch)
        logits = np.ctypeslib.as_array(self.llama._ctx.get_logits(), shape=(len(ids), self.llama.n_vocab()))
        np.save(file, logits)
        return {}

    def quantize(self, source: str, target: str, ftype: int) -> dict[str, Any]:
        """Write a file whose matrices are all of one type, as far as their rows allow."""
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.pure = ftype, True
        return {"failed": llama_cpp.llama_model_quantize(source.encode(), target.encode(), options)}

    def _logits(self) -> Any:
        return np.ctypeslib.as_array(self.llama._ctx.get_logits(), shape=(self.llama.n_vocab(),))


class _Slots:
    """Parallel slots: a context with as many sequences, which take a token each in one batch (llama-batched-bench)."""

    def __init__(self, llama: llama_cpp.Llama, num_parallel: int) -> None:
        self.num_parallel = num_parallel
        own = llama.context_params
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = own.n_ctx * num_parallel, num_parallel, False
        params.n_batch, params.n_ubatch = own.n_batch, own.n_ubatch
        params.n_threads, params.n_threads_batch = own.n_threads, own.n_threads_batch
        self.context = internals.LlamaContext(model=llama._model, params=params, verbose=False)
        self.size, self.vocabulary = own.n_batch, llama.n_vocab()
        self.batch = internals.LlamaBatch(n_tokens=self.size, embd=0, n_seq_max=1, verbose=False)

    def run_speed(self, n_prompt: int, n_gen: int, depth: int) -> int:
        """Return the nanoseconds in which all slots read their prompts and are given their tokens."""
        draw = random.Random(n_prompt)
        self.context.kv_cache_clear()
        self.add_tokens(draw, 0, depth)
        begin = time.perf_counter_ns()
        self.add_tokens(draw, depth, n_prompt)
        for i in range(n_gen):
            self.add_tokens(draw, depth + n_prompt + i, 1)
        return time.perf_counter_ns() - begin

    def add_tokens(self, draw: random.Random, first: int, count: int) -> None:
        """Compute tokens at positions `first` and on of every slot, in batches that are as large as may be."""
        places = [(slot, position) for slot in range(self.num_parallel) for position in range(first, first + count)]
        for start in range(0, len(places), self.size):
            part, raw = places[start : start + self.size], self.batch.batch
            raw.n_tokens = len(part)
            for i, (slot, position) in enumerate(part):
                raw.token[i], raw.pos[i] = draw.randrange(3, self.vocabulary), position
                raw.seq_id[i][0], raw.n_seq_id[i] = slot, 1
                raw.logits[i] = position == first + count - 1
            self.context.decode(self.batch)
            llama_cpp.llama_synchronize(self.context.ctx)


def _main() -> None:
    path, *numbers = sys.argv[1:]
    judge = _Judge(path, *map(int, numbers))
    print(json.dumps({"version": llama_cpp.__version__, "n_params": judge.llama._model.n_params()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "run":
                answer = judge.run_speed(**order)
            case "texts":
                answer = judge.write_texts(**order)
            case "tokens":
                answer = judge.tokenize_text(**order)
            case "logits":
                answer = judge.score_next(**order)
            case "all_logits":
                answer = judge.score_all(**order)
            case "quantize":
                answer = judge.quantize(**order)
            case _:
                answer = judge.run_greedy(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
