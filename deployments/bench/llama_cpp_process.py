"""llama.cpp behind pipes, in an interpreter that has llama-cpp-python and nothing of ours.

Orders are JSON lines: {"do": "run", "n_prompt", "n_gen", "depth"} -> {"ns"}; {"do": "tokens", "text"} -> {"ids"};
{"do": "greedy", "ids", "count"} -> {"ids"}. Usage: llama_cpp_process.py MODEL THREADS N_CTX N_BATCH N_UBATCH.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import llama_cpp
import numpy as np


class _Judge:
    """One model and context."""

    def __init__(self, path: str, threads: int, n_ctx: int, n_batch: int, n_ubatch: int) -> None:
        self.llama = llama_cpp.Llama(
            path,
            n_threads=threads,
            n_threads_batch=threads,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            verbose=False,
        )
        self.n_batch = n_batch

    def run_speed(self, n_prompt: int, n_gen: int, depth: int = 0) -> dict[str, Any]:
        """Time a run as llama-bench does: an empty cache, random tokens, a wait for every token, nothing sampled."""
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
            logits = np.ctypeslib.as_array(self.llama._ctx.get_logits(), shape=(self.llama.n_vocab(),))
            out.append(int(logits.argmax()))
            self.llama.eval(out[-1:])
        return {"ids": out}


def _main() -> None:
    path, *numbers = sys.argv[1:]
    judge = _Judge(path, *map(int, numbers))
    print(json.dumps({"version": llama_cpp.__version__, "n_params": judge.llama._model.n_params()}), flush=True)  # noqa: T201
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "run":
                answer = judge.run_speed(**order)
            case "tokens":
                answer = judge.tokenize_text(**order)
            case _:
                answer = judge.run_greedy(**order)
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    _main()
