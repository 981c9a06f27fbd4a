"""The sides of `infra.bench peers` that write texts: our engine, transformers, and the processes of other engines.

All of them read prompts of token ids that come at once, and go on with the best tokens. A peer that is not installed is
no side.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextDelta, TextRequest
from infra.bench.command.peers import LlamaCpp, OrderedProcess, llama_cpp_python, script_command
from infra.bench.peers.settings import Took, clocked
from weights.formats.own_draft import PREFIX
from weights.loading.views import mapped_tensors

STEP_TOKENS: Final = 2048  # of all sides
_KV_BYTES: Final = 2**28
_err: Final = Console(stderr=True)
_HERE: Final = Path(__file__).parent
Prompts = Sequence[Sequence[int]]
Model = Callable[[], Path]  # written once it is wanted


@dataclass(frozen=True, slots=True)
class Texts:
    """Written texts: their token ids, and the log probabilities of the first ones if asked for."""

    took: Took
    ids: Sequence[Sequence[int]]
    logprobs: Sequence[float] = ()
    num_computed: int = 0  # of the prompts' tokens, where it is known


class TextSide(Protocol):
    """An engine with a model open."""

    def write(self, prompts: Prompts, count: int, *, scores: bool = False) -> Texts:
        """Write so many tokens behind each prompt."""


class OurTexts:
    """Our engine, in this process."""

    def __init__(self, model: Path, *, prompt_lookup: bool = False, draft: Path | None = None) -> None:
        """A `draft` is the folder of that name in the model's."""
        config = LLMEngineConfig(
            kv_cache_bytes=_KV_BYTES, max_num_batched_tokens=STEP_TOKENS, prompt_lookup=prompt_lookup
        )
        folder, tensors, _ = mapped_tensors(model)
        if draft is not None:
            _, of_draft, _ = mapped_tensors(draft)
            tensors = {**tensors, **{f"{PREFIX}{name}": tensor for name, tensor in of_draft.items()}}
        self._engine = LLMEngine(folder, tensors, config)
        self._num_texts = 0

    def write(self, prompts: Prompts, count: int, *, scores: bool = False) -> Texts:
        sampling = SamplingParams(count, 0.0, ignore_eos=True, num_logprobs=0 if scores else None)
        names = [str(self._num_texts + place) for place in range(len(prompts))]
        self._num_texts += len(prompts)

        def run() -> list[TextDelta]:
            for name, prompt in zip(names, prompts, strict=True):
                self._engine.add_request(TextRequest(name, tuple(prompt), sampling))
            deltas: list[TextDelta] = []
            while self._engine.has_work:
                deltas += self._engine.step()
                if self._engine.failures:
                    raise RuntimeError(f"requests failed: {dict(self._engine.failures)}")
            return deltas

        deltas, took = clocked(run)
        by_name: dict[str, list[TextDelta]] = {name: [] for name in names}
        for delta in deltas:
            by_name[delta.request_id].append(delta)
        firsts = [found[0] for found in by_name.values()]
        ids = [[token for delta in found for token in delta.token_ids] for found in by_name.values()]
        logprobs = [float(one.logprob.logprob or 0.0) for one in firsts if one.logprob is not None]
        num_computed = sum(map(len, prompts)) - sum(first.num_cached_tokens for first in firsts)
        return Texts(took, ids, logprobs, num_computed)


class StockTexts:
    """transformers in this process, one text after the other; `options` are those of `generate`."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._options = options

    @torch.inference_mode()
    def write(self, prompts: Prompts, count: int, *, scores: bool = False) -> Texts:
        rows, took = clocked(lambda: [self._generated(prompt, count) for prompt in prompts])
        ids = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        logprobs = [float(self.logprobs_of(prompt).max()) for prompt in prompts] if scores else []
        return Texts(took, ids, logprobs)

    def _generated(self, prompt: Sequence[int], count: int) -> list[int]:
        given = torch.tensor([prompt])
        limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(given)
        found = self._model.generate(given, attention_mask=mask, **limits, **self._options)[0]
        return [int(token) for token in found]

    @torch.inference_mode()
    def logprobs_of(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return the log probability of each token behind a prompt."""
        return self._model(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].float().log_softmax(-1)


class PeerTexts:
    """Another engine's process."""

    def __init__(self, process: OrderedProcess) -> None:
        self._process = process

    def write(self, prompts: Prompts, count: int, *, scores: bool = False) -> Texts:
        given = [list(map(int, prompt)) for prompt in prompts]
        found = self._process.ask("texts", prompts=given, count=count, scores=scores)
        return Texts(Took(found["cpu_s"], found["wall_s"]), found["ids"], found["logprobs"])


def vllm_texts(judges: Path, model: Model, max_len: int) -> AbstractContextManager[TextSide | None]:
    """Open a Hugging Face folder in vLLM; None where it is not installed."""
    python = judges / "vllm/bin/python"

    def start() -> OrderedProcess:
        command = script_command(python, _HERE / "vllm_process.py", model(), max_len, STEP_TOKENS)
        return OrderedProcess("vLLM's process", command, _environment())

    return _opened("vLLM", start) if python.is_file() else nullcontext()


def genai_texts(judges: Path, model: Model, precision: str) -> AbstractContextManager[TextSide | None]:
    """Open a GGUF file in OpenVINO GenAI; None where it is not installed."""
    folder = (judges / "openvino").resolve()

    def start() -> OrderedProcess:
        command = script_command(sys.executable, _HERE / "genai_process.py", model(), precision, STEP_TOKENS)
        return OrderedProcess("OpenVINO's process", command, _environment(folder))

    return _opened("OpenVINO", start) if (folder / "openvino_genai").is_dir() else nullcontext()


def llama_texts(model: Model, max_len: int) -> AbstractContextManager[TextSide | None]:
    """Open a GGUF file in llama.cpp; None where it is not installed."""
    if (python := llama_cpp_python()) is None:
        return nullcontext()
    return _opened("llama.cpp", lambda: LlamaCpp(python, model(), n_ctx=max_len, n_batch=STEP_TOKENS))


@contextlib.contextmanager
def _opened(name: str, start: Callable[[], OrderedProcess]) -> Iterator[TextSide | None]:
    """Start a peer's process; None, and a line that says why, where it does not start."""
    with contextlib.ExitStack() as stack:
        side: TextSide | None = None
        try:
            side = PeerTexts(stack.enter_context(start()))
        except RuntimeError as error:
            _err.print(f"no rows of {name}: {error}", markup=False, highlight=False)
        yield side


def _environment(modules: Path | None = None) -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(modules)} if modules else {})
