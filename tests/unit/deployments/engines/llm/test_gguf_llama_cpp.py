"""Tokens of GGUF models against llama.cpp's own; skipped where `make judge-llama` has not compiled it."""

from __future__ import annotations

import json
import random
import statistics
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.model_parsers import BPE_TOKENS, bpe_metadata, spm_metadata, valid_gguf_model
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional as F

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.llm.tokenizer import load_tokenizer
from deployments.engines.records.protocol import SamplingParams, TextRequest
from infra.bench.command.peers import LlamaCpp, llama_cpp_python
from infra.offline.checkpoints import quantize_checkpoint
from weights.formats.gguf_names import TEXT_SPLITS
from weights.loading.views import mapped_tensors

DEMO = Path(__file__).parents[5] / "infra" / "demo"
PYTHON = llama_cpp_python()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="no llama-cpp-python: make judge-llama")]
QUESTIONS = ["What is 12 + 7?", "99 + 1", "0 + 1", "What is 40 + 2?", "1 + 0", "57 + 38"]
TEXTS = [
    *QUESTIONS,
    "  spaces\tand\nlines \r\n\n\n  ",
    "<|user|>3 + 4<|assistant|>",
    " <|user|> <|assistant|><|user|>",
    "<|us er|> </s> <s>",
    "12345 - (6 * 7) = 1e-9, 0x7f",
    "def f(x):\n\treturn {'a': [x ** 2], \"b\": x // 3}  # don't, we'll, I'M",
    "ünïcödé 👍🏽 e\u0301 日本語 שלום \uff41\uff42\uff43 \u00a0\u200b\ufeff",
    "".join(map(chr, range(32, 127))),
    "…—“quotes” ½ ² Ⅷ ٣ \U0001d7d8",
]


@pytest.fixture(scope="module", params=["gguf-q8_0", "gguf-q4_0"])
def adder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("adder") / "adder.gguf"
    quantize_checkpoint(DEMO / "models" / "adder", file, request.param)
    return file


@pytest.fixture(scope="module")
def judge(adder: Path) -> Iterator[LlamaCpp]:
    assert PYTHON is not None
    with LlamaCpp(PYTHON, adder, n_ctx=96, n_batch=96) as process:
        yield process


def test_the_ids_of_a_text(adder: Path, judge: LlamaCpp) -> None:
    engine = LLMEngine(adder.parent, mapped_tensors(adder)[1], LLMEngineConfig())
    for text in TEXTS:
        ours = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ours == judge.ask("tokens", text=text)["ids"], text


def test_greedy_tokens(adder: Path, judge: LlamaCpp) -> None:
    engine = LLMEngine(adder.parent, mapped_tensors(adder)[1], LLMEngineConfig())
    for question in QUESTIONS:
        prompt = engine.chats.encode([{"role": "user", "content": question}])
        engine.add_request(TextRequest(question, prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
        ours = []
        while engine.has_work:
            ours += [token for delta in engine.step() for token in delta.token_ids]
        assert ours == judge.ask("greedy", ids=list(prompt), count=4)["ids"]


YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 8}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
MORE_TEXTS = [
    "",
    " ",
    "   three spaces and a tab\t\tand\n\n\nlines\r\n  ",
    "I'm, you'RE, they'Ll, WE'VE; 3.14159, 1234567890, ٣٤٥",
    "<|im_start|>user\nhi<|im_end|>\n <s></s> <0x0A> ▁▁",
    "👩‍👩‍👧 family, 🏳️‍🌈 flag, हिन्दी 한국어 Ελληνικά naïve İstanbul ǅ",
    "aaaaaaaaaaaaaaaaaaaaaaaa   !!!!????.... /////\r\n//",
    "word" * 50,
]


def random_texts(count: int) -> list[str]:
    pieces = [
        *"abcdeABC 012 \n\t'.,!?(){}éß中文👍/",
        "  ",
        "ing",
        "'s",
        "'S",
        "<s>",
        "<|im_end|>",
        "▁",
        "\u0301",
        "\u00a0",
    ]
    return ["".join(random.choices(pieces, k=random.randint(1, 40))) for _ in range(count)]


def trained(core: Tokenizer, **options: Any) -> dict[str, Any]:
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, **options)
    core.train_from_iterator((TEXTS + MORE_TEXTS) * 2, trainer)
    return dict(json.loads(core.to_str())["model"])


def bpe_vocabulary(pre: str) -> dict[str, Any]:
    core = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in TEXT_SPLITS[pre][0]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    model = trained(core, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    }


def spm_vocabulary(adds_space: bool) -> dict[str, Any]:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    model = trained(core)
    taken = {"<unk>", "<s>", "</s>"}
    learned = [one for one in sorted(model["vocab"], key=model["vocab"].__getitem__) if one not in taken]
    words = [one for one in learned if len(one) > 1] + [one for one in learned if len(one) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *words]
    return spm_metadata() | {
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(words))],
        "add_space_prefix": adds_space,
    }


def gemma4_vocabulary() -> dict[str, Any]:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    model = trained(core)
    lines = ["\n", "\n\n", "\n\n\n"]
    ends = {"</s>", "<|im_end|>"}  # to llama.cpp these end a text in any vocabulary
    learned = [one for one in sorted(model["vocab"], key=model["vocab"].__getitem__) if one not in ends | set(lines)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{value:02X}>" for value in range(256)), *lines, *learned]
    return {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [3, 3, 3, 2] + [6] * 256 + [1] * (len(lines) + len(learned)),
        "scores": [0.0] * len(tokens),
        "merges": [" ".join(pair) for pair in model["merges"] if not {"".join(pair)} & ends and "\n" not in pair[0]],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
    }


def is_plain_for_tekken(character: str) -> bool:
    """Return whether llama.cpp splits there as the models' own tokenizer.json, whose ids ours are.

    Its expression for this kind takes marks for no letters, and letters beyond ASCII for capitals and small at once.
    """
    category = unicodedata.category(character)
    return character.isascii() or category[0] not in "LM" or category == "Lo"


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("llama", {}),
        ("llama", {"scaling.factor": 4.0}),
        ("llama", {"scale_linear": 4.0}),
        ("llama", {"scaling.type": "linear", "scaling.factor": 4.0}),
        ("llama", {"scaling.type": "linear", "scaling.factor": 4.0, "scaling.attn_factor": 2.0}),
        ("llama", YARN),
        ("llama", YARN | {"scaling.attn_factor": 2.0}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3moe", {}),
    ],
)
def test_logits_of_every_family(family: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    """Random weights in five types. llama.cpp rounds activations to int8, which costs 1 to 3 % here."""
    file = tmp_path / "tiny.gguf"
    valid_gguf_model(file, family, bpe_metadata(), scaling)
    described, tensors, _ = mapped_tensors(file)
    model = create_model(load_config(described), tensors, torch.device("cpu"), arithmetic="exact")
    errors = []
    assert PYTHON is not None
    with LlamaCpp(PYTHON, file, n_ctx=32, n_batch=32) as judge:
        for number in range(8):
            ids = random.Random(number).choices(range(3, len(BPE_TOKENS)), k=5 + 3 * number)
            expected = torch.tensor(judge.ask("logits", ids=ids)["logits"])
            angles = model.rotary.angles(torch.arange(len(ids)), model.dtype)
            got = model.module.logits(model.module(torch.tensor(ids), angles, attend))[-1]
            errors.append(float((got - expected).norm() / expected.norm()))
    assert statistics.median(errors) < 0.05, errors


KINDS = ["llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "spm", "spm without a space"]
KINDS += ["deepseek-llm", "deepseek-coder", "deepseek-v3", "falcon", "qwen35", "gemma4"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_of_hard_texts_in_every_kind_of_vocabulary(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    if kind == "gemma4":
        vocabulary = gemma4_vocabulary()
    else:
        vocabulary = spm_vocabulary(kind == "spm") if kind.startswith("spm") else bpe_vocabulary(kind)
    valid_gguf_model(file, "llama", vocabulary)
    ours = load_tokenizer(file)
    assert PYTHON is not None
    with LlamaCpp(PYTHON, file, n_ctx=32, n_batch=32) as judge:
        for text in TEXTS + MORE_TEXTS + random_texts(150):
            if kind == "tekken" and not all(map(is_plain_for_tekken, text)):
                continue
            expected = judge.ask("tokens", text=text)["ids"]
            assert ours(text, add_special_tokens=False)["input_ids"] == expected, repr(text)
