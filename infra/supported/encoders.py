"""Encoders and classifiers of transformers, tiny and random, as they are served beside stock: the table of what equals.

    python infra/supported/encoders.py

prints a row for each class: the largest difference to sentence-transformers or transformers, as a share of the largest
number, or why it is refused.
"""

from __future__ import annotations

import math
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from deployments.engines.servable import why_unservable
from deployments.engines.text.encoder import TextEncoder, load_text_encoder
from deployments.engines.text.tokens import TextPair
from weights.formats.checkpoint import read_checkpoint
from weights.formats.classifier import SUFFIX
from weights.loading.views import mapped_tensors
from weights.records.errors import FormatError

WORDS: Final = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "mu",
    "nu",
    "xi",
    "pi",
]
SPECIAL: Final = ("<pad>", "<cls>", "<sep>", "<unk>", "<mask>")
NUM_TOKENS: Final = len(SPECIAL) + len(WORDS)
MAX_TOKENS: Final = 64
# Under every name that a config of transformers has for it.
_SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "emb_dim", "n_embd", "model_dim"), 32),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "d_inner"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "d_head"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), MAX_TOKENS + 3),  # RoBERTa counts from 2
    "num_key_value_heads": 2,
    "embedding_size": 16,
    "vocab_size": NUM_TOKENS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


@dataclass(frozen=True)
class Row:
    """A class, what its tiny config says beside sizes, and the beginning of the reason why it is refused, if it is."""

    class_name: str
    said: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


def word_tokenizer(*, has_types: bool, max_tokens: int = MAX_TOKENS) -> PreTrainedTokenizerFast:
    """Return one with words as tokens, and BERT's form of a pair."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *WORDS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>", pair="<cls> $A <sep> $B:1 <sep>:1", special_tokens=[("<cls>", 1), ("<sep>", 2)]
    )
    inputs = ["input_ids", *["token_type_ids"] * has_types, "attention_mask"]
    names = {"pad_token": "<pad>", "cls_token": "<cls>", "sep_token": "<sep>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=inputs, model_max_length=max_tokens, **names
    )


def make_model(folder: Path, row: Row, **said: Any) -> Any:
    """Save a tiny random model of a class with its tokenizer, and return it."""
    cls = getattr(transformers, row.class_name)
    known = cls.config_class()
    text = known.get_text_config() if hasattr(known, "get_text_config") else known
    sizes = {name: value for name, value in _SIZES.items() if hasattr(text, name)}
    config = cls.config_class(**(sizes | dict(row.said) | said))
    torch.manual_seed(7)
    module = cls(config).eval()
    for parameter in module.parameters():  # so that texts differ by more than rounding
        parameter.data.mul_(4 if parameter.ndim > 1 else 1)
    module.save_pretrained(folder)
    has_types = getattr(config, "type_vocab_size", 0) == 2
    word_tokenizer(has_types=has_types).save_pretrained(folder)
    return module


_AS_THEY_ARE: Final = [
    "Albert",
    "Bert",
    "BigBird",
    "Camembert",
    "ConvBert",
    "Data2VecText",
    "Deberta",
    "DebertaV2",
    "DistilBert",
    "Electra",
    "Ernie",
    "Esm",
    "EuroBert",
    "FNet",
    "Flaubert",
    "Gte",
    "JinaEmbeddingsV3",
    "LayoutLM",
    "Longformer",
    "Luke",
    "MPNet",
    "MegatronBert",
    "MobileBert",
    "ModernBert",
    "Mra",
    "NomicBert",
    "Nystromformer",
    "RemBert",
    "RoCBert",
    "RoFormer",
    "Roberta",
    "RobertaPreLayerNorm",
    "Splinter",
    "XLM",
    "XLMRoberta",
    "XLMRobertaXL",
    "Yoso",
    "Bloom",
    "GPT2",
    "GPTNeoX",
    "Gemma3Text",
    "Llama",
    "ModernBertDecoder",
    "OPT",
    "Phi",
    "Qwen3",
]
ENCODERS: Final = (
    *(Row(f"{name}Model") for name in _AS_THEY_ARE),
    Row("BartModel", refused="needs a second text"),
    Row("CanineModel", refused="has no vocabulary of its own"),
    Row("DPRQuestionEncoder", refused="gives no token vectors"),
    Row("IBertModel", refused="computes with integers"),
    Row("XmodModel", refused="wants the language of each text"),
)
_DEBERTA_V2: Final = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
CLASSIFIERS: Final = (
    *(
        Row(f"{name}{SUFFIX}")
        for name in [
            "Albert",
            "Bert",
            "Camembert",
            "DistilBert",
            "Electra",
            "Ernie",
            "FNet",
            "Gte",
            "MPNet",
            "MegatronBert",
            "Roberta",
            "XLMRoberta",
        ]
    ),
    Row(f"DebertaV2{SUFFIX}", _DEBERTA_V2),
    Row(f"ModernBert{SUFFIX}", {"local_attention": 8, "classifier_pooling": "mean"}),
)


def why_refused(folder: Path) -> str:
    """Return why the model of a folder is not taken in, "" for one that is."""
    try:
        return why_unservable(read_checkpoint(folder)) or ""
    except FormatError as error:
        return str(error)


def load_served(folder: Path) -> TextEncoder:
    """Return the model as the text encoder service builds it, of the tensors that the store would have."""
    return load_text_encoder(folder, "transformers", None, folder, mapped_tensors(folder)[1])


def draw_texts(draw: random.Random, count: int = 7) -> list[str]:
    """Return texts of a few words each."""
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 14))) for _ in range(count)]


def measure_difference(folder: Path, module: Any, draw: random.Random) -> float:
    """Return the largest difference of ours, in one batch, to stock, one by one, as a share of stock's largest number.

    Of a classifier, of the logits of pairs; else of mean pooled vectors. NaN where stock cannot tell texts apart.
    """
    ours, texts = load_served(folder), draw_texts(draw)
    if ours.scoring is not None:
        pairs = [TextPair(*pair) for pair in zip(texts, draw_texts(draw), strict=True)]
        found, expected = _embeddings(ours, pairs), _stock_logits(folder, module, pairs)
    else:
        found = _embeddings(ours, texts)
        stages = [Transformer(str(folder)), Pooling(found.shape[-1], "mean")]
        stock = SentenceTransformer(modules=stages, device="cpu")
        expected = torch.stack([stock.encode(text, convert_to_tensor=True) for text in texts])
    if expected.std(0).max() < 1e-3:
        return math.nan
    return float((found - expected).abs().max() / expected.abs().max())


def _embeddings(encoder: TextEncoder, texts: Sequence[str | TextPair]) -> torch.Tensor:
    outputs = encoder.encode(encoder.tokenize(texts, as_embedding=True))
    return torch.stack([output["embedding"] for output in outputs])


def _stock_logits(folder: Path, module: Any, pairs: Sequence[TextPair]) -> torch.Tensor:
    stock = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([module(**stock(*pair, return_tensors="pt")).logits for pair in pairs])


def describe_rows(rows: Sequence[Row], draw: random.Random) -> Iterator[tuple[Row, str]]:
    """Yield each row with its difference, or the reason why it is refused."""
    for row in rows:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            module = make_model(folder, row)
            reason = why_refused(folder).partition(": ")[2]
            yield row, reason or f"{measure_difference(folder, module, draw):.1e}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    for row, found in describe_rows((*ENCODERS, *CLASSIFIERS), random.Random()):
        print(f"{row.class_name:36} {found}")
