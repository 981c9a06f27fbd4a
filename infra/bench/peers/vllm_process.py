"""vLLM behind pipes, in an interpreter that has it and nothing of ours.

Orders are JSON lines: {"do": "texts", "prompts", "count", "scores"} -> {"cpu_s", "wall_s", "ids", "logprobs"}.
Prompts of token ids come at once, and go on with the best tokens; `logprobs` are those of the first ones.
Usage: vllm_process.py MODEL TOKENS_OF_A_TEXT TOKENS_OF_A_STEP.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# One thread, wherever the kernel puts it, and the engine in this process, whose CPU time is told.
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to the standard output, in Python and in C++
    import vllm

    model, *numbers = sys.argv[1:]
    max_len, max_step = map(int, numbers)
    engine = vllm.LLM(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=max_len,
        max_num_batched_tokens=max_step,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    _write(answers, {"version": vllm.__version__})
    for line in sys.stdin:
        order = json.loads(line)
        _write(answers, _write_texts(engine, order["prompts"], order["count"], order["scores"]))


def _write_texts(engine: Any, prompts: list[list[int]], count: int, scores: bool) -> dict[str, Any]:
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=1 if scores else None
    )
    begin, begin_cpu = time.perf_counter(), time.process_time()
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    took = {"cpu_s": time.process_time() - begin_cpu, "wall_s": time.perf_counter() - begin}
    outputs = [one.outputs[0] for one in found]
    logprobs = [one.logprobs[0][one.token_ids[0]].logprob for one in outputs] if scores else []
    return {**took, "ids": [list(one.token_ids) for one in outputs], "logprobs": logprobs}


def _write(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    _main()
