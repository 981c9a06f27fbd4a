"""`infra.bench peers`: what a forward costs here and in the engines that others would take, in one run.

Times are processor time of one thread, sides in turn, medians, so that other work on the machine changes little. The
weights are random, the same on both sides, and results are compared. A peer that is not installed has no row.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.engines.records.protocol import SamplingParams, TextRequest
from deployments.engines.text.forwards import token_vectors
from infra.bench.llm_files import write_tokenizer
from infra.bench.onnx_bert import INPUTS, OUTPUTS, onnx_bytes

PARTS: Final = {
    "embedding": "texts of MiniLM's shape, float32: CPU ms of a forward",
    "half": "the same in bfloat16, and how far results are off those of float32",
    "bfloat16": "a bfloat16 decoder: CPU ms of a prompt, and of a token behind it",
    "prefix": "prompts at once: CPU ms until all have a token, and prompt tokens computed",
}
OURS: Final = "Atelier"
_VOCABULARY: Final = 4096
Way = Callable[[], torch.Tensor]
Run = Callable[..., torch.Tensor]  # of ids and a mask


@dataclass(frozen=True, slots=True)
class PeersSettings:
    """Rounds of each figure, and the sizes: of the encoder, and those of the decoder, by default TinyLlama's layers."""

    rounds: int = 9
    encoder_width: int = 384
    encoder_layers: int = 6
    lengths: Sequence[tuple[int, int]] = ((1, 5), (1, 16), (1, 64), (8, 32))  # texts, and tokens of each
    half_lengths: Sequence[tuple[int, int]] = ((1, 16), (8, 32), (64, 32))
    openvino: Path = Path(".judges/openvino")  # `make judge-openvino`
    decoder_width: int = 2048
    decoder_layers: int = 4
    num_prompt: int = 256
    num_shared: int = 512
    num_own: int = 32
    num_requests: int = 8


def measure_peers(
    settings: PeersSettings, seed: int, parts: Collection[str] = tuple(PARTS)
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Measure part after part, and yield the rows of each. Raises RuntimeError where two sides give other results."""
    measures = {
        "embedding": _measure_embedding,
        "half": _measure_half,
        "bfloat16": _measure_bfloat16,
        "prefix": _measure_prefix,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in (known for known in PARTS if known in parts):
            torch.manual_seed(seed)
            yield name, measures[name](settings)
    finally:
        torch.set_num_threads(threads)


def print_part(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of a part."""
    table = Table("case", "side", "CPU ms", "peer's / ours", "beside", title=PARTS[name])
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(row["case"], row["side"], f"{row['cpu_ms']:.2f}", ratio, row["beside"])
    Console(width=120).print(table)


def _measure_embedding(settings: PeersSettings) -> list[dict[str, Any]]:
    bert = _bert(settings)
    found = {"onnxruntime": _onnxruntime_of(bert), "OpenVINO": _openvino_of(bert, settings.openvino, "f32")}
    peers = {side: run for side, run in found.items() if run is not None}
    rows = []
    for ids, mask in _texts(bert, settings.lengths):
        ways = _ways(bert, ids, mask, peers)
        rows += _compared("{} x {} tokens".format(*ids.shape), ways, settings.rounds, most_off=1e-3)
    return rows


def _measure_half(settings: PeersSettings) -> list[dict[str, Any]]:
    bert = _bert(settings)
    half = copy.deepcopy(bert).bfloat16()
    run_openvino = _openvino_of(bert, settings.openvino, "bf16")
    peers = {} if run_openvino is None else {"OpenVINO": run_openvino}
    rows = []
    for ids, mask in _texts(bert, settings.half_lengths):
        exact = bert(ids, mask).last_hidden_state
        ways = _ways(half, ids, mask, peers) | {"ours in float32": partial(token_vectors, bert, ids, mask)}
        compared = _compared("{} x {} tokens".format(*ids.shape), ways, settings.rounds, most_off=0.5)
        for row in compared:
            off = float((ways[row["side"]]() - exact).abs().max())
            rows.append(row | {"beside": f"off by {off:.1e}"})
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


def _openvino_of(bert: BertModel, folder: Path, precision: str) -> Run | None:
    """Return the model as the OpenVINO in a folder runs it, which computes with our numpy; None if there is none."""
    if not folder.is_dir():
        return None
    sys.path.append(str(folder))
    try:
        openvino: Any = importlib.import_module("openvino")
    finally:
        sys.path.remove(str(folder))
    core = openvino.Core()
    options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": precision}
    compiled = core.compile_model(core.read_model(onnx_bytes(bert)), "CPU", options)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        given = {name: one.numpy() for name, one in zip(INPUTS, tensors, strict=True)}
        return torch.from_numpy(compiled(given)[OUTPUTS[0]].copy())

    return run


def _measure_bfloat16(settings: PeersSettings) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as name:
        folder = _write_decoder(Path(name), settings)
        engine, stock = _engine(folder, settings), _stock(folder)
        prompts = iter(torch.randint(2, _VOCABULARY, (4 * settings.rounds + 8, settings.num_prompt)))
        times: dict[str, list[tuple[float, float]]] = {OURS: [], "transformers": []}
        for number in range(settings.rounds + 1):  # the first one warms up
            prompt = next(prompts)
            for side, took in ((OURS, _ours(engine, prompt, str(number))), ("transformers", stock(prompt))):
                times[side] += [took] if number else []
    rows = []
    for place, case in enumerate((f"prompt of {settings.num_prompt}", "token behind it")):
        medians = {side: statistics.median(one[place] for one in found) * 1e3 for side, found in times.items()}
        rows += [_row(case, side, ms, medians[OURS]) for side, ms in medians.items()]
    return rows


def _measure_prefix(settings: PeersSettings) -> list[dict[str, Any]]:
    """Our own ways beside each other: prompts that begin alike, and as long ones that do not."""
    begins: dict[str, list[tuple[float, int]]] = {"begin alike": [], "begin otherwise": []}
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as name:
        engine = _engine(_write_decoder(Path(name), settings), settings)
        for number in range(max(3, settings.rounds // 3)):
            for way, found in begins.items():
                shared = torch.randint(2, _VOCABULARY, (1, settings.num_shared)).expand(settings.num_requests, -1)
                if way == "begin otherwise":
                    shared = torch.randint(2, _VOCABULARY, shared.shape)
                own = torch.randint(2, _VOCABULARY, (settings.num_requests, settings.num_own))
                found.append(_at_once(engine, torch.cat([shared, own], dim=1), f"{way} {number}"))
    medians = {way: statistics.median(took for took, _ in found) * 1e3 for way, found in begins.items()}
    case = f"{settings.num_requests} x ({settings.num_shared} + {settings.num_own})"
    return [
        _row(case, way, ms, medians["begin alike"]) | {"beside": f"{begins[way][-1][1]} tokens computed"}
        for way, ms in medians.items()
    ]


def _write_decoder(folder: Path, settings: PeersSettings) -> Path:
    width = settings.decoder_width
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=settings.decoder_layers,
        num_attention_heads=max(4, width // 64),
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, _VOCABULARY)
    return folder


def _engine(folder: Path, settings: PeersSettings) -> LLMEngine:
    return LLMEngine(folder, load_file(folder / "model.safetensors"), LLMEngineConfig(kv_cache_bytes=2**28))


def _stock(folder: Path) -> Callable[[torch.Tensor], tuple[float, float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def run(prompt: torch.Tensor) -> tuple[float, float]:
        begin_s = time.process_time()
        found = model(prompt[None], use_cache=True, logits_to_keep=1)
        between_s = time.process_time()
        model(found.logits[:, -1].argmax(-1, keepdim=True), past_key_values=found.past_key_values, use_cache=True)
        return between_s - begin_s, time.process_time() - between_s

    return run


def _ours(engine: LLMEngine, prompt: torch.Tensor, name: str) -> tuple[float, float]:
    engine.add_request(TextRequest(name, tuple(prompt.tolist()), SamplingParams(2, 0.0, ignore_eos=True)))
    times = []
    while engine.has_work:
        begin_s = time.process_time()
        deltas = engine.step()
        times.append((time.process_time() - begin_s, bool(deltas)))
    first = next(place for place, (_, has_token) in enumerate(times) if has_token)
    return sum(took for took, _ in times[: first + 1]), sum(took for took, _ in times[first + 1 :])


def _at_once(engine: LLMEngine, prompts: torch.Tensor, name: str) -> tuple[float, int]:
    """Return the CPU seconds until all of the prompts have their token, and how many of their tokens were computed."""
    for number, prompt in enumerate(prompts.tolist()):
        request = TextRequest(f"{name} {number}", tuple(prompt), SamplingParams(1, 0.0, ignore_eos=True))
        engine.add_request(request)
    begin_s, num_cached = time.process_time(), 0
    while engine.has_work:
        num_cached += sum(delta.num_cached_tokens or 0 for delta in engine.step())
    return time.process_time() - begin_s, prompts.numel() - num_cached


def _compared(case: str, ways: Mapping[str, Way], rounds: int, most_off: float) -> list[dict[str, Any]]:
    """Time the ways in turn. Raises RuntimeError where one's result is another than ours."""
    times: dict[str, list[float]] = {side: [] for side in ways}
    expected = ways[OURS]()
    for side, run in ways.items():
        off = float((run() - expected).abs().max())
        if off > most_off:
            raise RuntimeError(f"{case}: {side} differs by {off:.1e}")
    for _ in range(rounds):
        for side, run in ways.items():
            begin_s = time.process_time()
            run()
            times[side].append(time.process_time() - begin_s)
    medians = {side: statistics.median(found) * 1e3 for side, found in times.items()}
    return [_row(case, side, ms, medians[OURS]) for side, ms in medians.items()]


def _row(case: str, side: str, cpu_ms: float, ours_ms: float) -> dict[str, Any]:
    return {"case": case, "side": side, "cpu_ms": cpu_ms, "ratio": cpu_ms / ours_ms, "beside": ""}
