"""The parts of `infra.bench peers` on encoders of texts: one forward here, in transformers and in graph engines."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import BertConfig, BertModel

from deployments.engines.text.forwards import token_vectors
from infra.bench.onnx_bert import INPUTS, OUTPUTS, onnx_bytes
from infra.bench.peers.openvino import compiled_model
from infra.bench.peers.settings import OURS, PeersSettings, Took, clocked, rows_of

Way = Callable[[], torch.Tensor]
Run = Callable[..., torch.Tensor]  # of ids and a mask


def measure_embedding(settings: PeersSettings) -> list[dict[str, Any]]:
    bert = _bert(settings)
    found = {"onnxruntime": _onnxruntime_of(bert), "OpenVINO": _openvino_of(bert, settings, "f32")}
    peers = {side: run for side, run in found.items() if run is not None}
    exact = copy.deepcopy(bert).double()
    rows = []
    for ids, mask in _texts(bert, settings.lengths):
        rows += _compared(exact, ids, mask, _ways(bert, ids, mask, peers), settings.rounds, most_off=1e-3)
    return rows


def measure_half(settings: PeersSettings) -> list[dict[str, Any]]:
    bert = _bert(settings)
    half = copy.deepcopy(bert).bfloat16()
    run_openvino = _openvino_of(bert, settings, "bf16")
    peers = {} if run_openvino is None else {"OpenVINO": run_openvino}
    rows = []
    for ids, mask in _texts(bert, settings.half_lengths):
        ways = _ways(half, ids, mask, peers) | {"ours in float32": partial(token_vectors, bert, ids, mask)}
        rows += _compared(bert, ids, mask, ways, settings.rounds, most_off=0.5)
    return rows


def _bert(settings: PeersSettings) -> BertModel:
    width = settings.encoder_width
    config = BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 32,
        num_hidden_layers=settings.encoder_layers,
    )
    return BertModel(config).eval().requires_grad_(False)


def _texts(bert: BertModel, lengths: Sequence[tuple[int, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for shape in lengths:
        ids = torch.randint(1, bert.config.vocab_size, shape)
        yield ids, torch.ones_like(ids)


def _ways(bert: BertModel, ids: torch.Tensor, mask: torch.Tensor, peers: Mapping[str, Run]) -> dict[str, Way]:
    return {
        OURS: lambda: token_vectors(bert, ids, mask),
        "transformers": lambda: bert(ids, mask).last_hidden_state,
        **{side: partial(run, ids, mask) for side, run in peers.items()},
    }


def _onnxruntime_of(bert: BertModel) -> Run | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_bytes(bert), options, providers=["CPUExecutionProvider"])

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        given = {name: one.numpy() for name, one in zip(INPUTS, tensors, strict=True)}
        return torch.from_numpy(session.run([OUTPUTS[0]], given)[0])

    return run


def _openvino_of(bert: BertModel, settings: PeersSettings, precision: str) -> Run | None:
    compiled = compiled_model(settings.judges, lambda openvino: openvino.Core().read_model(onnx_bytes(bert)), precision)
    if compiled is None:
        return None

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        given = {name: one.numpy() for name, one in zip(INPUTS, tensors, strict=True)}
        return torch.from_numpy(compiled(given)[OUTPUTS[0]].copy())

    return run


def _compared(
    exact: BertModel, ids: torch.Tensor, mask: torch.Tensor, ways: Mapping[str, Way], rounds: int, most_off: float
) -> list[dict[str, Any]]:
    """Time the ways in turn. Raises RuntimeError where one's result is another than that of the exact model."""
    case, expected = "{} x {} tokens".format(*ids.shape), exact(ids, mask).last_hidden_state
    times: dict[str, list[Took]] = {side: [] for side in ways}
    off = {side: float((run() - expected).abs().max()) for side, run in ways.items()}
    for side, most in off.items():
        if not most <= most_off:
            raise RuntimeError(f"{case}: {side} is off by {most:.1e}")
    for _ in range(rounds):
        for side, run in ways.items():
            times[side].append(clocked(run)[1])
    return rows_of(case, times, {side: f"off by {most:.1e}" for side, most in off.items()})
