"""OpenVINO GenAI behind pipes, in an interpreter that has it and nothing of ours.

Orders are JSON lines: {"do": "texts", "prompts", "count", "scores"} -> {"cpu_s", "wall_s", "ids", "logprobs"}.
Prompts of token ids come at once, and go on with the best tokens; `logprobs` are those of the first ones.
Usage: genai_process.py MODEL PRECISION TOKENS_OF_A_STEP.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library logs to the standard output
    import openvino_genai

    model, precision, max_step = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = int(max_step)
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = True
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": precision}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
    _write(answers, {"version": openvino_genai.__version__})
    for line in sys.stdin:
        order = json.loads(line)
        _write(answers, _write_texts(pipeline, order["prompts"], order["count"], order["scores"]))


def _write_texts(pipeline: Any, prompts: list[list[int]], count: int, scores: bool) -> dict[str, Any]:
    import numpy as np
    import openvino
    import openvino_genai

    def generate(count: int, num_logprobs: int) -> Any:
        wish = openvino_genai.GenerationConfig()
        wish.max_new_tokens = count
        wish.ignore_eos = True
        wish.do_sample = False
        wish.logprobs = num_logprobs
        given = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        return pipeline.generate(given, [wish] * len(given))

    begin, begin_cpu = time.perf_counter(), time.process_time()
    found = generate(count, 0)
    took = {"cpu_s": time.process_time() - begin_cpu, "wall_s": time.perf_counter() - begin}
    # A score is the sum over a text's tokens, so there is to be one.
    logprobs = [float(one.m_scores[0]) for one in generate(1, 1)] if scores else []
    return {**took, "ids": [list(one.m_generation_ids[0]) for one in found], "logprobs": logprobs}


def _write(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    _main()
