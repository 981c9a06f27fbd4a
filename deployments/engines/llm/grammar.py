"""Grammars: the tokens that keep an answer within the JSON documents of a schema. llguidance computes the masks."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from deployments.engines.llm.answer_grammars import LarkGrammar
from deployments.engines.llm.schemas import MAX_SCHEMA_CHARS, prepare_schema
from deployments.engines.llm.tokenizer import special_tokens
from deployments.engines.records.protocol import ComputationFailed, EngineError
from weights.platform.panics import panics_as_errors

# Room between the parts of a document is bounded, so that no model fills its answer with spaces.
_OPTIONS: Final[Any] = {"whitespace_pattern": r"[ \n\t]{0,24}"}
# Below llguidance's own: a schema from outside may not hold a thread, nor a step, for long.
_LIMITS: Final[Any] = {"initial_lexer_fuel": 500_000, "max_grammar_size": 100_000, "max_lexer_states": 50_000}

_MISFIT: Final = "doesn't satisfy the grammar"  # every other error of a matcher is a limit of it
_NUM_REHEARSALS: Final = 3
_REHEARSED_BYTES: Final = 96
_FORCED_TOKENS: Final = 64
_BYTES: Final = LLTokenizer("byte")  # a vocabulary of single bytes, in which a step costs microseconds


class GrammarCompiler:
    """Compiles schemas for the tokens of one model. One thread at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._tokenizer, self.special_tokens = tokenizer, special_tokens(tokenizer)
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._tokens: LLTokenizer | None = None  # made at the first use: most models have none

    def compile_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of all JSON documents of a schema.

        Raises:
            EngineError: the schema is too large, has keywords unknown to llguidance, fits no document, or it
            is too complex to enforce.
        """
        try:
            text = json.dumps(prepare_schema(schema), ensure_ascii=False)
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
        except RecursionError:
            raise EngineError("the schema is nested too deeply") from None
        except ValueError as error:
            raise EngineError(f"the schema cannot be compiled: {_reason(str(error))}") from None
        return self._compile(grammar)

    def lark(self) -> LarkGrammar:
        """Return an empty grammar with this model's special tokens, for `compile_lark`."""
        return LarkGrammar(self.special_tokens)

    def compile_lark(self, grammar: str) -> Grammar:
        """Return a grammar in llguidance's dialect of Lark. Raises EngineError as `compile_schema` does."""
        if len(grammar) > MAX_SCHEMA_CHARS:
            raise EngineError(f"the schemas have {len(grammar)} characters; expected {MAX_SCHEMA_CHARS} at most")
        return self._compile(LLMatcher.grammar_from_lark(grammar))

    def _compile(self, grammar: str) -> Grammar:
        matcher = LLMatcher(self._known_tokens(), grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise EngineError(f"the schema cannot be compiled: {_reason(matcher.get_error())}")
        matcher.compute_bitmask()
        if matcher.is_error():  # as for a schema that only refers to itself: it compiles, but no document can begin
            raise EngineError(f"no document fits the schema ({_reason(matcher.get_error())})")
        _rehearse(grammar)
        _check_vocabulary(matcher.deep_copy())
        return Grammar(matcher)

    def _known_tokens(self) -> LLTokenizer:
        if self._tokens is None:
            size = max(self._vocab_size, len(self._tokenizer))
            try:
                with panics_as_errors():
                    self._tokens = from_tokenizer(self._tokenizer, size, self._end_token_ids or None)
            except Exception as error:  # of several kinds; all mean that these tokens are not understood
                raise EngineError(f"no grammar works with this model's tokenizer: {error}") from error
        return self._tokens


@functools.lru_cache(maxsize=64)  # most clients send the same schema again and again
def _rehearse(grammar: str) -> None:
    """Write a few texts by the grammar, byte by byte. Raises EngineError if that is too much for the parser.

    A grammar of too many choices at once compiles, and fails at the first token that opens them: this finds it before
    a prompt is computed. Any other such place fails the request that meets it, with the same message.
    """
    first = LLMatcher(_BYTES, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
    for seed in range(_NUM_REHEARSALS):
        draw, matcher = random.Random(seed), first.deep_copy()
        for _ in range(_REHEARSED_BYTES):
            if matcher.is_stopped():
                break
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not matcher.is_error() and len(allowed):
                matcher.consume_token(int(draw.choice(allowed)))
            if matcher.is_error():
                raise _too_complex(matcher)


def _check_vocabulary(matcher: LLMatcher) -> None:
    """Write the text that a grammar leaves no choice of. Raises EngineError if the model's tokens cannot write it."""
    for _ in range(_FORCED_TOKENS):
        forced = matcher.compute_ff_bytes()
        if not forced or matcher.is_stopped():
            return
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if len(allowed):
            matcher.consume_token(int(allowed[-1]))  # of one text's tokens the longer ones mostly come later
        if matcher.is_error() and _MISFIT not in matcher.get_error():
            return  # too complex: the request that meets it gets the error
        if matcher.is_error() or not len(allowed):
            text = forced.decode(errors="replace")[:64]
            raise EngineError(f"the model's vocabulary has no tokens that write {text!r}")


def _too_complex(matcher: LLMatcher) -> EngineError:
    return EngineError(f"the schema is too complex to be kept to ({_reason(matcher.get_error())})")


class Grammar:
    """A `TokenConstraint` of one answer, at one place in it: documents of a schema."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_free(self) -> bool:
        return False

    def fork(self) -> Grammar:
        """Return a constraint for another answer that goes on from here."""
        return Grammar(self._matcher.deep_copy())

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next. After the end of the document these are only end tokens."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._check()
        mask[: len(found)] = found[: len(mask)]

    def advance(self, token_id: int) -> None:
        """Take in the next token.

        Raises ComputationFailed when the grammar does not go on with it, EngineError when it is too complex to.
        """
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._check()

    @property
    def is_complete(self) -> bool:
        """Return whether the document is complete and cannot go on."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            if _MISFIT not in (reason := _reason(self._matcher.get_error())):
                raise _too_complex(self._matcher)
            raise ComputationFailed(f"the grammar ends: {reason}")


def _reason(text: str) -> str:
    """Return the first line, with that of a regular expression's error, which follows the expression itself."""
    if "coerce_one_of" in text:
        return "the members of oneOf may overlap; use anyOf, or a property with another constant in each of them"
    first, *others = text.strip().splitlines() or [""]
    found = [line for line in others if line.startswith("error: ")] if first.endswith(":") else []
    return " ".join([first, *(line.removeprefix("error: ") for line in found[:1])])[:400]
