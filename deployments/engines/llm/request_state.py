"""What the engine keeps for one request, and the checks that a request passes before it gets there."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from deployments.engines.llm.detokenizer import IncrementalDecoder, StopMatcher
from deployments.engines.llm.sampler import TokenPicker
from deployments.engines.llm.sequence import Sequence
from deployments.engines.protocol import EngineError, SamplingParams, TextDelta, TextRequest

SEED_LIMITS = (-(2**63), 2**64 - 1)  # what torch.Generator.manual_seed takes


def check_request(request: TextRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raises EngineError, with what came and what was expected, unless the request can run."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise EngineError("the prompt is empty; expected at least one token")
    if len(prompt) >= max_model_len:
        raise EngineError(
            f"the prompt has {len(prompt)} tokens; expected fewer than {max_model_len}, the greatest length"
        )
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise EngineError(f"token id {token_id} in the prompt; expected 0 to {vocab_size - 1}")
    check_sampling(request.sampling)


def check_sampling(sampling: SamplingParams) -> None:
    """Raises EngineError unless every parameter is in its range."""
    low, high = SEED_LIMITS
    rules = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf"), "0 or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        ("seed", sampling.seed, sampling.seed is None or low <= sampling.seed <= high, f"{low} to {high}"),
        ("stop", sampling.stop, all(sampling.stop), "strings that are not empty"),
    )
    for name, value, holds, expected in rules:
        if not holds:
            raise EngineError(f"{name} is {value!r}; expected {expected}")


@dataclass(slots=True)
class RequestState:
    """One request: its sequence for the scheduler, its picker for the sampler, its text for the caller."""

    sequence: Sequence
    picker: TokenPicker
    decoder: IncrementalDecoder
    matcher: StopMatcher
    max_tokens: int
    eos_token_ids: frozenset[int]

    @classmethod
    def create(
        cls,
        request: TextRequest,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> RequestState:
        """The state of a checked request; `max_tokens` is clipped to what fits behind the prompt."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        return cls(
            sequence=Sequence(request.request_id, list(prompt), len(prompt)),
            picker=TokenPicker.create(sampling),
            decoder=IncrementalDecoder(tokenizer, prompt),
            matcher=StopMatcher(sampling.stop),
            max_tokens=min(sampling.max_tokens, max_model_len - len(prompt)),
            eos_token_ids=frozenset() if sampling.ignore_eos else eos_token_ids,
        )

    def advance(self, token_id: int) -> TextDelta:
        """The delta of a token that the scheduler has appended to the sequence already."""
        finish_reason = None
        if token_id in self.eos_token_ids:
            # The end token is counted but not shown, whether the tokenizer calls it special or not.
            text, finish_reason = self._last_text(), "stop"
        else:
            text = self.matcher.feed(self.decoder.feed(token_id))
            if not self.matcher.stopped and self.sequence.num_completion_tokens >= self.max_tokens:
                text, finish_reason = text + self._last_text(), "length"
        if self.matcher.stopped:
            finish_reason = "stop"
        return self.delta(text, (token_id,), finish_reason)

    def delta(self, text: str, token_ids: tuple[int, ...], finish_reason: str | None) -> TextDelta:
        """A delta with the counts as they are now."""
        sequence = self.sequence
        return TextDelta(
            request_id=sequence.request_id,
            text=text,
            token_ids=token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_completion_tokens=sequence.num_completion_tokens,
            finish_reason=finish_reason,
        )

    def _last_text(self) -> str:
        return self.matcher.feed(self.decoder.flush()) + self.matcher.flush()
