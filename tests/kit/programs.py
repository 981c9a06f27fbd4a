"""Small programs for tests: a BERT of transformers and a classifier above it, of any few rows and lengths."""

from __future__ import annotations

import io
import json
import warnings
from typing import Any

import onnx
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import BertConfig, BertModel

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
        num_hidden_layers=2,
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


class _Positional(nn.Module):
    """A BERT whose inputs are known by their places, as ONNX's exporter wants them."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.bert(input_ids, attention_mask)
        return found.last_hidden_state, found.pooler_output


def onnx_bert(module: BertModel) -> onnx.ModelProto:
    """Export a BERT as `export_bert` does, to ONNX, with its ranges."""
    example = torch.randint(1, VOCABULARY, (3, 5))
    inputs, outputs = ["input_ids", "attention_mask"], ["last_hidden_state", "pooler_output"]
    sizes = {name: {0: "rows", 1: "length"} for name in (*inputs, outputs[0])} | {outputs[1]: {0: "rows"}}
    mask = torch.ones_like(example)
    mask[0, 3:] = 0  # the tracer takes the way of its example: without padding there is no mask
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter without onnxscript, and of the tracer
        torch.onnx.export(
            _Positional(module).eval(),  # what it was before, the whole of it is afterwards
            (example, mask),
            file,
            input_names=inputs,
            output_names=outputs,
            dynamic_axes=sizes,
            dynamo=False,
        )
    model = onnx.load_model_from_string(file.getvalue())
    ranges = {"rows": (1, MAX_ROWS), "length": (1, MAX_LENGTH)}
    onnx.helper.set_model_props(model, {"ranges": json.dumps(ranges)})
    return model
