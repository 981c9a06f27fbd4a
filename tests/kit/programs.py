"""Small programs for tests: a BERT of transformers and a classifier above it, of any few rows and lengths."""

from __future__ import annotations

import json
from typing import Any

import onnx
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import BertConfig, BertModel

from infra.bench.onnx_bert import onnx_bytes

MAX_ROWS, MAX_LENGTH, VOCABULARY, WIDTH, NUM_CLASSES = 8, 48, 60, 16, 3


class Classifier(nn.Module):
    """A layer above the pooled vector of a text: (rows, WIDTH) -> (rows, NUM_CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.dense(features)}


def tiny_bert(vocabulary: int = VOCABULARY) -> BertModel:
    """Return a BERT with random weights."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=MAX_LENGTH,
    )
    return BertModel(config).eval()


def export_bert(module: nn.Module) -> ExportedProgram:
    """Export a BERT with `input_ids` and `attention_mask`."""
    example = torch.randint(1, VOCABULARY, (3, 5))
    sizes = {0: Dim("rows", min=1, max=MAX_ROWS), 1: Dim("length", min=1, max=MAX_LENGTH)}
    inputs: dict[str, Any] = {"input_ids": example, "attention_mask": torch.ones_like(example)}
    return torch.export.export(module, (), inputs, dynamic_shapes=dict.fromkeys(inputs, sizes))


def export_classifier(module: nn.Module, min_rows: int = 1) -> ExportedProgram:
    """Export a classifier of features."""
    sizes = ({0: Dim("rows", min=min_rows, max=MAX_ROWS)},)
    return torch.export.export(module, (torch.rand(3, WIDTH),), dynamic_shapes=sizes)


def onnx_bert(module: BertModel) -> onnx.ModelProto:
    """Export a BERT as `export_bert` does, to ONNX, with its ranges."""
    model = onnx.load_model_from_string(onnx_bytes(module))
    ranges = {"rows": (1, MAX_ROWS), "length": (1, MAX_LENGTH)}
    onnx.helper.set_model_props(model, {"ranges": json.dumps(ranges)})
    return model
