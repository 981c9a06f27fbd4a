"""A BERT as an ONNX model: the bench of programs measures it, and tests serve it."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import nn
from transformers import BertModel

INPUTS = ("input_ids", "attention_mask")
OUTPUTS = ("last_hidden_state", "pooler_output")


class _Positional(nn.Module):
    """A BERT whose inputs are known by their places, as ONNX's exporter wants them."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.bert(input_ids, attention_mask)
        return found.last_hidden_state, found.pooler_output


def onnx_bytes(bert: BertModel) -> bytes:
    """Return a BERT as an ONNX model of INPUTS and OUTPUTS, of any number of rows and any length."""
    file: Any = io.BytesIO()  # the exporter takes files, which its annotations do not say
    ids = torch.randint(1, bert.config.vocab_size, (3, 5))
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0  # the tracer takes the way of its example: without padding there is no mask
    axes = {name: {0: "rows", 1: "length"} for name in (*INPUTS, OUTPUTS[0])} | {OUTPUTS[1]: {0: "rows"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter without onnxscript, and of the tracer
        torch.onnx.export(
            _Positional(bert).eval(),  # what it was before, the whole of it is afterwards
            (ids, mask),
            file,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_axes=axes,
            dynamo=False,
        )
    return bytes(file.getvalue())
