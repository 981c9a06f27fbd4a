"""One running completion: its sequence for the scheduler, its picker for the sampler, its text for the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from deployments.engines.llm.loras import scope_of
from deployments.engines.llm.sampling.prompt_logprobs import PromptLogprobs
from deployments.engines.llm.sampling.sampler import SampledToken, check_sampling
from deployments.engines.llm.sampling.token_picker import TokenPicker
from deployments.engines.llm.sequences.pooled_states import PooledStates
from deployments.engines.llm.sequences.sequence import Proposer, Sequence, SequenceLora
from deployments.engines.llm.tokenizer import IncrementalDecoder, StopMatcher
from deployments.engines.records.protocol import EngineError, PromptTooLong, TextDelta, TextRequest


def check_request(
    request: TextRequest, *, max_model_len: int, max_positions: int, vocab_size: int, max_num_seqs: int
) -> None:
    """Raise EngineError, with what came and what was expected, unless the request can run.

    The model was made for sequences of `max_positions`, of which its cache takes `max_model_len`.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise EngineError("the prompt is empty; expected at least one token")
    most = max_model_len - (request.pooling is None)  # one token is to be written
    if len(prompt) > most:
        bound = "" if max_model_len == max_positions else f", as kv_cache_bytes allows of its {max_positions}"
        raise PromptTooLong(
            f"prompt is too long: {len(prompt)} tokens > {most} maximum ({len(prompt)} tokens; expected fewer than "
            f"{most + 1}: this model's maximum context length is {max_model_len} tokens{bound})"
        )
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise EngineError(f"token id {token_id} in the prompt; expected 0 to {vocab_size - 1}")
    if not 1 <= request.n <= max_num_seqs:
        raise EngineError(f"n is {request.n}; expected 1 to {max_num_seqs}, the sequences that run at once")
    if request.pooling is not None and (request.n > 1 or request.scores_prompt):
        raise EngineError(f"n is {request.n} for an embedding; expected 1, and no log probabilities")
    check_sampling(request.sampling, vocab_size)


def no_proposer(limit: int) -> None:
    """Return the proposer of a completion without proposals."""


@dataclass(slots=True, eq=False)
class Completion:
    """One of the completions of a request."""

    index: int
    sequence: Sequence
    picker: TokenPicker
    decoder: IncrementalDecoder
    matcher: StopMatcher
    max_tokens: int
    end_token_ids: frozenset[int]
    named_end_ids: frozenset[int]  # those of them that the request names

    @classmethod
    def create(
        cls,
        request: TextRequest,
        index: int,
        *,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        loras: tuple[SequenceLora, ...] = (),
        prompt_logprobs: PromptLogprobs | None = None,
        proposer_within: Callable[[int], Proposer | None] = no_proposer,
    ) -> Completion:
        """Return the state of a checked request; `max_tokens` is clipped to the room after the prompt.

        `proposer_within` makes the proposer of a sequence of at most so many tokens.
        """
        prompt, sampling = request.prompt_token_ids, request.sampling
        max_tokens = min(sampling.max_tokens, max_model_len - len(prompt))
        pooled = None if request.pooling is None else PooledStates(len(prompt), request.pooling)
        eos = frozenset() if sampling.ignore_eos else eos_token_ids
        return cls(
            index=index,
            sequence=Sequence(
                request.request_id,
                list(prompt),
                len(prompt),
                scope_of(loras),
                loras,
                prompt_logprobs,
                pooled,
                request.images,
                proposer=None if pooled else proposer_within(len(prompt) + max_tokens),
            ),
            picker=TokenPicker.create(
                sampling, prompt, index=index, constraint=request.constraint and request.constraint.fork()
            ),
            decoder=IncrementalDecoder(tokenizer, prompt, request.hidden_token_ids),
            matcher=StopMatcher(sampling.stop),
            max_tokens=max_tokens,
            end_token_ids=eos | frozenset(sampling.stop_token_ids),
            named_end_ids=frozenset(sampling.stop_token_ids) - eos,
        )

    def advance(self, sampled: SampledToken, num_others: int) -> TextDelta:
        """Return the delta of a token that the scheduler has appended to the sequence.

        `num_others` further completions of the same request are running.
        """
        token_id = sampled.token_id
        self.picker.advance(token_id)
        finish_reason, stopped_by = None, None
        if token_id in self.end_token_ids:
            # The end token is counted but not shown, whether the tokenizer calls it special or not.
            text, finish_reason = self._last_text(), "stop"
            stopped_by = token_id if token_id in self.named_end_ids else None
        else:
            text = self.matcher.feed(self.decoder.feed(token_id))
            if not self.matcher.stopped and self.picker.is_complete:
                text, finish_reason = text + self._last_text(), "stop"
            elif not self.matcher.stopped and self.sequence.num_completion_tokens >= self.max_tokens:
                text, finish_reason = text + self._last_text(), "length"
        if self.matcher.stopped:
            finish_reason = "stop"
        scores = self.sequence.prompt_logprobs
        return TextDelta(
            request_id=self.sequence.request_id,
            text=text,
            token_ids=(token_id,),
            num_prompt_tokens=self.sequence.num_prompt_tokens,
            num_completion_tokens=self.sequence.num_completion_tokens,
            finish_reason=finish_reason,
            index=self.index,
            num_others=num_others,
            num_cached_tokens=self.sequence.num_cached_tokens,
            logprob=sampled.logprob,
            prompt_logprobs=scores.tokens if scores and self.sequence.num_completion_tokens == 1 else (),
            stopped_by=self.matcher.found or stopped_by,
        )

    def embedded(self) -> TextDelta:
        """Return the delta with the computed embedding of a prompt. Raises ComputationFailed."""
        sequence = self.sequence
        assert sequence.pooled is not None
        return TextDelta(
            request_id=sequence.request_id,
            text="",
            token_ids=(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_completion_tokens=0,
            finish_reason="stop",
            num_cached_tokens=sequence.num_cached_tokens,
            embedding=sequence.pooled.vector(),
        )

    def _last_text(self) -> str:
        return self.matcher.feed(self.decoder.flush()) + self.matcher.flush()
