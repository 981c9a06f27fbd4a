"""Data, tokenizer, chat template and split of the adder, a language model that adds two numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Pair = tuple[int, int]
Message = dict[str, str]
Chat = list[Message]

LIMIT = 100
HELD_OUT = 500
# Drawn as held out too, but nothing in the other pairs tells them from 1 + 1: a model without them says 11 for both.
TAUGHT = frozenset({(0, 1), (1, 0)})
SPLIT_SEED = 2024
MAX_POSITIONS = 512

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<s>", "</s>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, UNK, BOS, EOS, SYSTEM, USER, ASSISTANT, END)
# The byte-level alphabet writes a newline and a space as these two letters.
CHARACTERS = ("\u010a", "\u0120", *(chr(code) for code in range(33, 127)))

MAIN_PHRASING = "What is {a} + {b}?"
OTHER_PHRASINGS = (
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "What is {a}+{b}?",
    "what is {a} + {b}?",
    "{a} + {b} =",
    "{a}+{b}=?",
)
SYSTEM_SENTENCES = (
    "You are a helpful assistant.",
    "You add two numbers.",
    "Answer with the sum only.",
    "Be brief.",
    "You are a calculator.",
    "Today is Monday.",
    "Answer in one line.",
    "You are a friendly teacher of 12 pupils.",
    "Think before you answer!",
    "Never give more than 1 number.",
)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role in ['system', 'developer'] %}{{- '<|system|>' }}
{%- elif message.role == 'assistant' %}{{- '<|assistant|>' }}
{%- else %}{{- '<|user|>' }}
{%- endif %}
{%- if message.content is string %}{{- message.content | trim }}
{%- else %}
{%- for part in message.content or [] if part.type == 'text' %}{{- part.text | trim }}{%- endfor %}
{%- endif %}
{{- eos_token if message.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


def held_out_pairs() -> list[Pair]:
    """Pairs that no training example holds, each in both orders: b + a would give a + b away."""
    unordered = [(a, b) for a in range(LIMIT) for b in range(a + 1, LIMIT)]
    chosen = random.Random(SPLIT_SEED).sample(unordered, HELD_OUT // 2)
    return sorted({*chosen, *((b, a) for a, b in chosen)} - TAUGHT)


def training_pairs() -> list[Pair]:
    held_out = set(held_out_pairs())
    every = ((a, b) for a in range(LIMIT) for b in range(LIMIT))
    return [pair for pair in every if pair not in held_out]


def question(pair: Pair, phrasing: str = MAIN_PHRASING) -> str:
    return phrasing.format(a=pair[0], b=pair[1])


def answer(pair: Pair) -> str:
    return f"{pair[0] + pair[1]}."


def user_turn(pair: Pair, phrasing: str = MAIN_PHRASING) -> Message:
    return {"role": "user", "content": question(pair, phrasing)}


def assistant_turn(pair: Pair) -> Message:
    return {"role": "assistant", "content": answer(pair)}


def system_turn(text: str = SYSTEM_SENTENCES[0]) -> Message:
    return {"role": "system", "content": text}


class ChatSampler:
    """Draws chats of one to four sums from the training pairs, seeded."""

    def __init__(self, seed: int, sums_per_batch: int) -> None:
        self.random = random.Random(seed)
        self.sums_per_batch = sums_per_batch
        self.pairs = training_pairs()
        # Small sums are few among 10,000 pairs, but they are what people type.
        self.small = [(a, b) for a, b in self.pairs if min(a, b) < 10]
        self.smallest = [(a, b) for a, b in self.pairs if max(a, b) < 10]

    def batch(self, plain: bool) -> list[Chat]:
        """Chats of about equal length; plain ones are single sums, which are cheap to train on."""
        if plain:
            return [self._chat(1, []) for _ in range(self.sums_per_batch)]
        turns = self.random.choices((1, 2, 3, 4), weights=(50, 22, 18, 10))[0]
        opening = [system_turn(self._system_text())] if self.random.random() < 0.35 else []
        rows = self.sums_per_batch // (turns + len(opening))
        return [self._chat(turns, opening) for _ in range(rows)]

    def _chat(self, turns: int, opening: Chat) -> Chat:
        chat = list(opening)
        for _ in range(turns):
            pair = self._pair()
            chat += [user_turn(pair, self._phrasing()), assistant_turn(pair)]
        return chat

    def _pair(self) -> Pair:
        pools = (self.pairs, self.small, self.smallest)
        return self.random.choice(self.random.choices(pools, weights=(84, 8, 8))[0])

    def _phrasing(self) -> str:
        if self.random.random() < 0.4:
            return MAIN_PHRASING
        return self.random.choice(OTHER_PHRASINGS)

    def _system_text(self) -> str:
        if self.random.random() < 0.4:
            return SYSTEM_SENTENCES[0]
        count = self.random.choice((1, 1, 2, 3))
        return " ".join(self.random.sample(SYSTEM_SENTENCES, count))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: byte-level BPE without merges, whose gaps fall to <unk>."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def save_tokenizer(directory: Path) -> None:
    # A fresh one: a used tokenizer would save its last padding settings along.
    build_tokenizer().save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # Transformers 5 writes newer names here; these are the ones that 4 reads as well.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
