"""Footprints of a language model: the memory of its largest steps, recorded without weights and without a cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from deployments.engines.graph.recording import Recorder, Recording, record
from deployments.engines.llm.draft_model import create_draft, divided, draft_runner
from deployments.engines.llm.engine import plan_runner
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.model_runner import ModelRunner, OwnCacheRunner
from deployments.engines.llm.models.registry import create_any_model, load_config
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE
from deployments.engines.llm.sequences.sequence import Chunk
from deployments.engines.llm.sequences.sequence import Sequence as TokenSequence
from weights.platform.torch_seam import fake_mode

logger = logging.getLogger("atelier.replica")


class StepTwin:
    """A language model of fake tensors, whose steps are recorded as they would run on the device of `config`.

    `forms` are the dtypes and shapes of its checkpoint's tensors. LoRAs and images are left out, and so is the
    sampler's memory for some rows of logits at a time. Raises EngineError as the engine does.
    """

    def __init__(
        self, folder: Path, forms: Mapping[str, tuple[torch.dtype, Sequence[int]]], config: LLMEngineConfig
    ) -> None:
        self._device, self._config, self._mode = torch.device(config.device), config, fake_mode()
        with self._mode:
            fakes = {
                name: torch.empty(*shape, dtype=dtype, device=self._device) for name, (dtype, shape) in forms.items()
            }
        own, of_draft = divided(fakes)
        model = create_any_model(load_config(folder), own, self._device, arithmetic=config.arithmetic)
        draft = create_draft(folder, of_draft, model, config) if of_draft else None
        with self._mode:  # the cache, but not the frequencies, whose values are looked at
            self.plan, self._runner = plan_runner(model, config, draft=draft)
            # An assistant has as many rows as a step of completions, and no more than these take.
            runner = draft_runner(draft, self.plan, config) if draft else None
            self._drafts = [runner] if runner else []

    def step_bytes(self) -> int:
        """Return the bytes of the largest steps: of prompts alone, of completions alone, and of both together.

        Texts have their greatest length, and their blocks are scattered.
        """
        longest, most = self.plan.max_model_len, self._config.max_num_batched_tokens
        rows = min(self.plan.max_num_seqs, most)
        decoding = [(longest - 1, longest)] * rows
        both = [(longest - 1, longest)] * max(0, rows - 1)
        steps = [self._prompts(most, longest), decoding, both + self._prompts(most - len(both), longest)]
        runners = [self._runner, *self._drafts]  # one after the other
        return max(self.record(step, runner).eager_peak() for step in steps for runner in runners)

    @staticmethod
    def _prompts(num_tokens: int, longest: int) -> list[tuple[int, int]]:
        """Return the ends of prompts with so many tokens in all."""
        whole, rest = divmod(num_tokens, longest)
        return [(0, longest)] * whole + ([(longest - rest, longest)] if rest else [])

    def record(self, spans: Sequence[tuple[int, int]], runner: ModelRunner | OwnCacheRunner | None = None) -> Recording:
        """Return the recording of a step over tokens `start` to `end` of a sequence each; one is a completion's.

        The model's own runner computes it, or the draft's.
        """
        used = runner or self._runner
        chunks = []
        for start, end in spans:
            num_prompt_tokens = start if end - start == 1 else end
            blocks = list(range(-(-end // BLOCK_SIZE)))[::-1]
            sequence = TokenSequence("twin", [0] * end, max(1, num_prompt_tokens), block_table=blocks)
            chunks.append(Chunk(sequence, start, end, True, 0 if start else None, ((end, 1),)))
        return record(lambda: used.run(chunks), Recorder(self._device, is_fake=True), {}, self._mode)


def step_bytes(folder: Path, forms: Mapping[str, tuple[torch.dtype, Sequence[int]]], config: LLMEngineConfig) -> int:
    """Return the device bytes of a model's largest steps; 0, with a line in the log, if they cannot be recorded."""
    try:
        return StepTwin(folder, forms, config).step_bytes()
    except Exception as error:  # of any operation of a model that fake tensors have no rule for
        logger.info("the memory of the steps of %s is not planned: %s", folder.name, error)
        return 0
