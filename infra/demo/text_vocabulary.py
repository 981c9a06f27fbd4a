"""Small tokenizers of the stock classes, and the small text encoders that read them.

Both vocabularies know the captions' words as single tokens and fall back to bytes (CLIP) or to
characters (T5), so any text can be tokenized.
"""

from __future__ import annotations

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from digits import all_captions

TEXT_LENGTH = 16
CLIP_WIDTH = 32
T5_WIDTH = 64
PRINTABLE = [chr(code) for code in range(33, 127)]


def caption_words() -> list[str]:
    return sorted({word for caption in all_captions() for word in caption.split()})


def build_clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE whose merges spell out the captions' words (CLIP lower-cases its text)."""
    byte_symbols = _byte_symbols()
    tokens = [*byte_symbols, *(symbol + "</w>" for symbol in byte_symbols)]
    merges: list[str] = []
    for word in sorted({word.lower() for word in caption_words() if len(word) > 1}):
        _add_word(word, tokens, merges)
    # The end token has the highest id, as in CLIP: the pooled output is read at its position,
    # and transformers finds it by `eos_token_id` or, in old configs, by the largest id.
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split()) for merge in merges]
    return CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=TEXT_LENGTH)


def _add_word(word: str, tokens: list[str], merges: list[str]) -> None:
    """Merge `word` from left to right; words with a common beginning share their merges."""
    symbols = [*word[:-1], word[-1] + "</w>"]
    left = symbols[0]
    for right in symbols[1:]:
        if f"{left} {right}" not in merges:
            merges.append(f"{left} {right}")
            tokens.append(left + right)
        left += right


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins for bytes of GPT-2's byte-level alphabet."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def build_t5_tokenizer() -> T5Tokenizer:
    """Unigram over words and printable characters; other characters become <unk>."""
    scores: list[tuple[str, float]] = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    scores += [("▁", -8.0)]
    scores += [("▁" + word, -2.0) for word in caption_words()]
    scores += [(character, -8.0) for character in PRINTABLE]
    return T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=TEXT_LENGTH)


def clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT_LENGTH,
        hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(clip_config(tokenizer))


def build_clip_with_projection(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config(tokenizer))


def build_t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=16,
        d_ff=2 * T5_WIDTH,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config)
