"""Trains the text classifier: python infra/demo/train_texts.py [--data FOLDER] -> models/texts-bert, models/texts-head.

A small BERT with mean pooling, and one linear layer above it that tells tweets, movie reviews, product reviews and
editorials apart (texts_data.py). The two are stored as two models, because they are served as two steps of a pipeline.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import BertWordPieceTokenizer
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, BertTokenizer

from model_folder import MODELS_DIR, store_model
from texts_data import DATA_DIR, KINDS, Example, fetch, load_split, write_held_out_sample
from training_loop import argument_parser, seed_everything, train

STEPS = 2000
BATCH = 64
VOCABULARY = 6000
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WIDTH = 128
MAX_TOKENS = 128
LEARNING_RATE = 1e-3
HIDDEN_SHARE = 0.4  # of a training text's tokens: so that no single word decides
DROPOUT = 0.3
LABEL_SMOOTHING = 0.05
# Batches of about equal length, cut from a pool this many times as large: a third of the padding.
POOL = 8

Rows = list[tuple[int, ...]]


class Classifier(nn.Module):
    """BERT, mean pooling, linear head: (B, L) token ids, padded with `pad`, -> (B, number of kinds) logits."""

    def __init__(self, tokenizer: BertTokenizer) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=MAX_TOKENS,
            hidden_dropout_prob=DROPOUT,
            pad_token_id=tokenizer.pad_token_id,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(WIDTH, len(KINDS))
        self.pad = tokenizer.pad_token_id

    def forward(self, ids: torch.Tensor, hidden_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden_ids` replace `ids`, with some tokens masked."""
        mask = (ids != self.pad).long()
        states = self.bert(ids if hidden_ids is None else hidden_ids, attention_mask=mask).last_hidden_state
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.dropout(pooled))


def train_tokenizer(texts: list[str]) -> BertTokenizer:
    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(texts, vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    # The trainer numbers letters in an order that changes from run to run.
    pieces = [*SPECIAL_PIECES, *sorted(trainer.get_vocab().keys() - set(SPECIAL_PIECES))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=MAX_TOKENS)


def tokenize(tokenizer: BertTokenizer, examples: list[Example]) -> Rows:
    found = tokenizer([text for text, _ in examples], truncation=True, max_length=MAX_TOKENS)["input_ids"]
    return [tuple(ids) for ids in found]


def padded(rows: Rows, pad: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def batches(rows: Rows, kinds: list[int], pad: int, draw: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Without end: token ids (B, L) and kinds (B,), each kind equally often, although there are more movie reviews."""
    of_kind = [[row for row, kind in zip(rows, kinds, strict=True) if kind == number] for number in range(len(KINDS))]
    while True:
        pool = [
            (draw.choice(some), number)
            for number, some in enumerate(of_kind)
            for _ in range(BATCH * POOL // len(KINDS))
        ]
        pool.sort(key=lambda drawn: len(drawn[0]))
        starts = list(range(0, len(pool), BATCH))
        draw.shuffle(starts)
        for start in starts:
            batch = pool[start : start + BATCH]
            yield padded([row for row, _ in batch], pad), torch.tensor([kind for _, kind in batch])


@torch.inference_mode()
def balanced_accuracy(model: Classifier, rows: Rows, kinds: list[int]) -> float:
    """Mean over the kinds of the share that is right."""
    model.eval()
    parts = [padded(rows[start : start + 4 * BATCH], model.pad) for start in range(0, len(rows), 4 * BATCH)]
    is_right = torch.cat([model(part).argmax(-1) for part in parts]) == torch.tensor(kinds)
    model.train()
    return sum(float(is_right[torch.tensor(kinds) == kind].float().mean()) for kind in set(kinds)) / len(set(kinds))


def store(model: Classifier, tokenizer: BertTokenizer, bert: Path, head: Path) -> None:
    """The layouts of sentence-transformers, in bf16: an encoder with mean pooling, and a Dense module."""
    tokenizer.save_pretrained(bert)
    store_model(model.bert, bert)
    stage = "sentence_transformers.models."
    stages = [("", stage + "Transformer"), ("1_Pooling", stage + "Pooling")]
    _write_json(
        bert / "modules.json",
        [{"idx": idx, "name": str(idx), "path": path, "type": type_} for idx, (path, type_) in enumerate(stages)],
    )
    _write_json(bert / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    _write_json(bert / "1_Pooling" / "config.json", pooling)
    dense = {
        "in_features": WIDTH,
        "out_features": len(KINDS),
        "bias": True,
        "activation_function": "torch.nn.modules.linear.Identity",
        "id2label": dict(enumerate(KINDS)),
    }
    _write_json(head / "config.json", dense)
    tensors = {f"linear.{name}": value.to(torch.bfloat16) for name, value in model.head.state_dict().items()}
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    (head / "model.safetensors").chmod(0o644)  # safetensors writes its file for the owner only


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argument_parser(__doc__ or "", STEPS, MODELS_DIR)
    parser.add_argument("--data", type=Path, default=DATA_DIR, help="fetched when not there; default: %(default)s")
    options = parser.parse_args()
    draw, _ = seed_everything(options.seed, options.threads)
    split = load_split(fetch(options.data))
    tokenizer = train_tokenizer([text for text, _ in split.train])
    model = Classifier(tokenizer)
    kinds = {part: [kind for _, kind in getattr(split, part)] for part in ("train", "validation")}
    rows = {part: tokenize(tokenizer, getattr(split, part)) for part in kinds}
    source = batches(rows["train"], kinds["train"], model.pad, draw)

    def loss_of_batch() -> torch.Tensor:
        ids, targets = next(source)
        is_word = ids > max(tokenizer.all_special_ids)
        is_hidden = is_word & (torch.rand(ids.shape) < HIDDEN_SHARE)
        logits = model(ids, torch.where(is_hidden, tokenizer.mask_token_id, ids))
        return F.cross_entropy(logits, targets, label_smoothing=LABEL_SMOOTHING)

    def report() -> None:
        print(f"validation: {balanced_accuracy(model, rows['validation'], kinds['validation']):.2%} right")

    train("texts", model.parameters(), loss_of_batch, options.steps, LEARNING_RATE, checkpoint=report)
    report()
    store(model, tokenizer, options.out / "texts-bert", options.out / "texts-head")
    write_held_out_sample(split.test)
    print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
