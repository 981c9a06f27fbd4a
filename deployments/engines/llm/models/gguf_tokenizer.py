"""The tokenizer of GGUF metadata as a transformers one: byte-level BPE, SentencePiece's BPE, Gemma 4's."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from deployments.engines.records.protocol import EngineError
from weights.formats.gguf import GgufValue
from weights.formats.gguf_names import ADDS_BOS, BYTE, CONTROL, TEXT_SPLITS, UNKNOWN, USER_DEFINED
from weights.formats.untrusted import shown
from weights.platform.panics import panics_as_errors

if TYPE_CHECKING:  # the control plane calls `check_gguf_tokenizer`, and has no torch
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def gguf_tokenizer(metadata: Mapping[str, GgufValue]) -> PreTrainedTokenizerBase:
    """Return the tokenizer with its special tokens and chat template.

    Raises EngineError for an unsupported kind, with the supported ones, and for damaged vocabularies.
    """
    try:
        with panics_as_errors():
            return _tokenizer(metadata)
    except EngineError:
        raise
    except Exception as error:  # the tokenizers library raises bare ones
        raise EngineError(f"the GGUF metadata does not describe a tokenizer: {error}") from None


def check_gguf_tokenizer(metadata: Mapping[str, GgufValue]) -> None:
    """Raise EngineError for a kind of tokenizer that is not supported, with those that are, and for a vocabulary that
    has a token twice, none at all or another number of kinds."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model not in ("gpt2", "llama", "gemma4"):
        raise EngineError(
            f"tokenizer.ggml.model {shown(model)} is not supported; supported are gpt2 (BPE), llama (SPM), gemma4"
        )
    if model == "gpt2" and (not isinstance(pre, str) or pre not in TEXT_SPLITS):
        raise EngineError(
            f"tokenizer.ggml.pre {shown(pre)} is not supported; supported are {', '.join(sorted(TEXT_SPLITS))}"
        )
    tokens = _texts(metadata, "tokens")
    if len(set(tokens)) != len(tokens):
        raise EngineError("tokenizer.ggml.tokens has a token twice")
    if model != "llama":
        _texts(metadata, "merges", may_be_absent=True)
    for name in ("token_type", "scores"):
        _numbers(metadata, name, len(tokens), default=0)


def _tokenizer(metadata: Mapping[str, GgufValue]) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    check_gguf_tokenizer(metadata)
    tokens = _texts(metadata, "tokens")
    kinds = _numbers(metadata, "token_type", len(tokens), default=1)
    if metadata["tokenizer.ggml.model"] == "gpt2":
        core, adds_bos = _byte_level(metadata, tokens)
    elif metadata["tokenizer.ggml.model"] == "gemma4":
        core, adds_bos = _characters(metadata, tokens), True
    else:
        core, adds_bos = _sentencepiece(metadata, tokens, kinds)
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    added = [text for text, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    named = {f"{name}_token": _token(metadata, name, tokens) for name in ("bos", "eos", "padding", "unknown")}
    _add_ends(core, metadata, named, tokens, adds_bos=adds_bos)
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=named["bos_token"],
        eos_token=named["eos_token"],
        pad_token=named["padding_token"],
        unk_token=named["unknown_token"],
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
    )


def _byte_level(metadata: Mapping[str, GgufValue], tokens: tuple[str, ...]) -> tuple[Tokenizer, bool]:
    pre = str(metadata["tokenizer.ggml.pre"])
    patterns, ignore_merges = TEXT_SPLITS[pre]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    merges = _merges(metadata, vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    core.decoder = decoders.ByteLevel()
    return core, pre in ADDS_BOS


def _merges(metadata: Mapping[str, GgufValue], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in _texts(metadata, "merges", may_be_absent=True):
        # A space inside of a token is written as another character, so the only one is between the two.
        left, _, right = merge.partition(" ")
        # Merges without a token are cut into bytes again by llama.cpp, and refused by the tokenizers library.
        if left in vocabulary and right in vocabulary and left + right in vocabulary:
            merges.append((left, right))
    return merges


def _characters(metadata: Mapping[str, GgufValue], tokens: tuple[str, ...]) -> Tokenizer:
    """Build Gemma 4's BPE: over characters, a line at a time, with bytes for characters that the vocabulary lacks.

    A run of line ends that is a token is that token, of a longer one each is a token of its own (llama.cpp,
    LLAMA_VOCAB_PRE_TYPE_GEMMA4).
    """
    vocabulary = {text: index for index, text in enumerate(tokens)}
    longest = next(length for length in itertools.count(1) if "\n" * (length + 1) not in vocabulary)
    runs = [("\n" * left, "\n" * (both - left)) for both in range(2, longest + 1) for left in range(1, both)]
    merges = [pair for pair in _merges(metadata, vocabulary) if "\n" not in "".join(pair)]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges + runs, byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"(?<!\n)\n{{1,{longest}}}(?!\n)|\n"), "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def _sentencepiece(
    metadata: Mapping[str, GgufValue], tokens: tuple[str, ...], kinds: tuple[Any, ...]
) -> tuple[Tokenizer, bool]:
    """Build SentencePiece's BPE: the greater score merges first, and of equals the smaller id."""
    scores = _numbers(metadata, "scores", len(tokens), default=0.0)
    vocabulary = {text: index for index, text in enumerate(tokens)}
    plain = {text for text, kind in zip(tokens, kinds, strict=True) if kind not in (CONTROL, UNKNOWN, BYTE)}
    ranked = []
    for text in plain:
        pairs = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in plain and text[i:] in plain]
        ranked += [
            ((-scores[vocabulary[text]], vocabulary[text], vocabulary[left]), left, right) for left, right in pairs
        ]
    merges = [(left, right) for _, left, right in sorted(ranked)]
    unknown = _token(metadata, "unknown", tokens)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    adds_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if adds_prefix else []
    core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if adds_prefix else parts)
    return core, True


def _add_ends(
    core: Tokenizer,
    metadata: Mapping[str, GgufValue],
    named: Mapping[str, str | None],
    tokens: tuple[str, ...],
    *,
    adds_bos: bool,
) -> None:
    """Let the tokenizer write the first and last token by itself, if the file or its kind says so."""
    before = named["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    after = named["eos_token"] if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if before is None and after is None:
        return
    first, last = [before] if before else [], [after] if after else []
    core.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *first, "$B", *last],
        special_tokens=[(text, tokens.index(text)) for text in dict.fromkeys([*first, *last])],
    )


def _token(metadata: Mapping[str, GgufValue], name: str, tokens: tuple[str, ...]) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if type(index) is not int or not 0 <= index < len(tokens):  # as llama.cpp takes it
        logger.warning("tokenizer.ggml.%s_token_id is %s, none of %d tokens: left out", name, shown(index), len(tokens))
        return None
    return tokens[index]


def _texts(metadata: Mapping[str, GgufValue], name: str, *, may_be_absent: bool = False) -> tuple[str, ...]:
    value = metadata.get(f"tokenizer.ggml.{name}", () if may_be_absent else None)
    if not isinstance(value, tuple) or not (value or may_be_absent):
        raise EngineError(f"tokenizer.ggml.{name} is {shown(value)}, expected an array of texts")
    return value


def _numbers(metadata: Mapping[str, GgufValue], name: str, count: int, *, default: float) -> tuple[Any, ...]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return (default,) * count
    if isinstance(value, str | int | float | tuple) or len(value) != count:
        raise EngineError(f"tokenizer.ggml.{name} is {shown(value)}, expected {count} numbers")
    return tuple(value.tolist())
