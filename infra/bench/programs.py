"""`infra.bench programs`: stored programs as they run and compiled, what a fine-tune costs them, what requests share.

Times are CPU milliseconds of one thread, sides in turn, so that other work on the machine changes little.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Final

import diffusers
import onnxruntime
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.export import Dim
from transformers import BertConfig, BertModel

from configs.batching import BatchingConfig
from deployments.batching.batcher import Batcher
from deployments.engines.programs.bound import BoundProgram, BoundPrograms, ServedProgram
from deployments.engines.programs.rows import ProgramJob, jobs_of, run_jobs
from infra.bench.onnx_bert import onnx_bytes
from weights.operations.intake import import_model
from weights.programs.exported import externalize_program
from weights.programs.signature import COMPONENT
from weights.programs.storing import program_tensors
from weights.storage.store import WeightStore

MODELS: Final = Path(__file__).parents[1] / "demo/models"
COMPILE_S: Final = 1800
MEET_S: Final = 300
CLIENTS: Final = 20
_ROWS, _LENGTH = 64, 128
_MIN_CALLS: Final = 5
PARTS: Final = {  # what each tells, and what it should be
    "merging": "merging: forwards that requests of many clients share",
    "bert": "bert: compiled / module at most 0.8",
    "rebind": "rebind: CPU ms of a switch to a fine-tune, compiled at most 2",
    "unet": "unet: compiled / module at most 0.5",
    "shared": "shared: memory of two processes / that of their weights, at most 1.02",
}
_OF_BERTS: Final = {"merging", "bert", "rebind"}
_WAYS: Final = ("module", "program", "compiled", "ONNX", "onnxruntime")
_RATIOS: Final = {
    "compiled / module": ("compiled", "module"),
    "/ program": ("compiled", "program"),
    "ONNX / onnxruntime": ("ONNX", "onnxruntime"),
}
Tensors = Mapping[str, torch.Tensor]


class _Unet(nn.Module):
    """A UNet by the names of its inputs, as an owner would export it."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        added = {"text_embeds": pooled, "time_ids": ids}
        found: torch.Tensor = self.unet(sample, timestep, text, added_cond_kwargs=added, return_dict=False)[0]
        return found


class Programs:
    """A store with programs, bound as a replica does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = WeightStore(folder / "store")
        self.graphs = BoundPrograms(packages=folder / "compiled")
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}

    def export(self, name: str, module: nn.Module, inputs: Tensors, sizes: Any) -> None:
        with torch.no_grad():
            program = torch.export.export(module, (), dict(inputs), dynamic_shapes=sizes)
        externalize_program(self.store, name, program)

    def bind(self, name: str, graphs: BoundPrograms | None = None) -> ServedProgram:
        """Return the program over its tensors, which are read once."""
        manifest = self.store.manifest(name)
        if name not in self.tensors:
            self.tensors[name] = program_tensors(self.store, name, None)
        graphs = graphs or self.graphs
        return graphs.bind(manifest.components[COMPONENT], self.store.skeleton(manifest), self.tensors[name])

    def compiled(self, name: str) -> tuple[BoundProgram, float]:
        """Return the program compiled, and the seconds that it took. Raises RuntimeError with what was in the way."""
        self.graphs.compile(self.store.manifest(name).components[COMPONENT])
        begin_s = time.perf_counter()
        program = self.bind(name)
        assert isinstance(program, BoundProgram)
        if program.compiled is None or not program.compiled.ended.wait(COMPILE_S) or program.compiled.run is None:
            raise RuntimeError(f"{name} is not compiled: {program.compiled.reason if program.compiled else 'strides'}")
        return program, time.perf_counter() - begin_s


def measure_programs(
    seconds: float, seed: int, names: Collection[str] = PARTS.keys()
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Measure part by part: yield the name of each and its rows. A speed takes about so many seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(Path(folder))
        parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "merging": lambda: [asyncio.run(_merging(programs.bind("bert")))],
            "bert": lambda: _bert_speeds(programs, berts["bert"], seconds),
            "rebind": lambda: [_rebinds(programs)],
            "unet": lambda: [_unet_speed(programs, seconds)],
            "shared": lambda: [_shared(programs)],
        }
        berts = {} if _OF_BERTS.isdisjoint(names) else _put_berts(programs)
        for name in names:
            yield name, parts[name]()


def _put_berts(programs: Programs) -> dict[str, BertModel]:
    """Store two fine-tunes of the demo's BERT, with random weights, in both formats."""
    config = BertConfig.from_pretrained(MODELS / "texts-bert", dtype="float32")
    berts = {name: BertModel(config).eval() for name in ("bert", "tuned")}
    ids = {"input_ids": torch.randint(1, 6000, (3, 5)), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    sizes = {0: Dim("rows", min=1, max=_ROWS), 1: Dim("length", min=1, max=_LENGTH)}
    for name, bert in berts.items():
        programs.export(name, bert, ids, dict.fromkeys(ids, sizes))
        path = programs.folder / f"{name}-onnx.onnx"
        path.write_bytes(onnx_bytes(bert))
        import_model(programs.store, path.stem, path)
    return berts


def _unet_inputs(unet: nn.Module, rows: int) -> dict[str, torch.Tensor]:
    config: Any = unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": torch.randn(rows, config.in_channels, 8, 8),
        "timestep": torch.tensor(500.0),
        "text": torch.randn(rows, 16, config.cross_attention_dim),
        "pooled": torch.randn(rows, pooled),
        "ids": torch.rand(rows, 6),
    }


def _bert_speeds(programs: Programs, bert: BertModel, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each size: the least and the median milliseconds of each way."""
    plain = programs.bind("bert", BoundPrograms())
    compiled, compile_s = programs.compiled("bert")
    ours = programs.bind("bert-onnx")
    session = _plain_session(programs.folder / "bert-onnx.onnx")
    rows = []
    for size in ((1, 16), (8, 32), (32, 64)):
        ids = torch.randint(1, 6000, size)
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arrays = {name: tensor.numpy() for name, tensor in texts.items()}
        ways: dict[str, Callable[[], Any]] = {
            "module": partial(bert, **texts),
            "program": partial(plain, texts),
            "compiled": partial(compiled, texts),
            "ONNX": partial(ours, texts),
            "onnxruntime": partial(session.run, None, arrays),
        }
        rows.append(_row(f"BERT, {size[0]} x {size[1]} tokens", ways, seconds / 3, compile_s))
    return rows


def _unet_speed(programs: Programs, seconds: float) -> dict[str, Any]:
    unet = _Unet(diffusers.UNet2DConditionModel.from_pretrained(MODELS / "digits-sdxl/unet").float()).eval()
    given = _unet_inputs(unet.unet, 2)
    programs.export("unet", unet, given, None)
    plain = programs.bind("unet", BoundPrograms())
    compiled, compile_s = programs.compiled("unet")
    ways: dict[str, Callable[[], Any]] = {
        "module": partial(unet, **given),
        "program": partial(plain, given),
        "compiled": partial(compiled, given),
    }
    return _row("UNet, 2 rows of 64 px", ways, seconds, compile_s)


def _plain_session(path: Path) -> Any:
    """Return onnxruntime as its users have it, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _row(name: str, ways: Mapping[str, Callable[[], Any]], seconds: float, compile_s: float) -> dict[str, Any]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    end_s = time.perf_counter() + seconds
    with torch.no_grad():
        for run in (*ways.values(), *ways.values()):
            run()
        while len(times["module"]) < _MIN_CALLS or time.perf_counter() < end_s:
            for way, run in ways.items():
                begin_s = time.thread_time()
                run()
                times[way].append((time.thread_time() - begin_s) * 1e3)
    medians = {way: statistics.median(found) for way, found in times.items()}
    least = {way: min(found) for way, found in times.items()}
    return {"program": name, "calls": len(times["module"]), "ms": medians, "least_ms": least, "compile_s": compile_s}


def _rebinds(programs: Programs) -> dict[str, float]:
    """Return the CPU ms of a switch to a fine-tune whose tensors the node holds: the least of many."""
    plain = BoundPrograms()
    kinds = {"exported": ("tuned", plain), "compiled": ("tuned", programs.graphs), "ONNX": ("tuned-onnx", plain)}
    programs.compiled("tuned")
    found = {}
    for kind, (name, graphs) in kinds.items():
        programs.bind(name, graphs)
        times = []
        for _ in range(20):
            begin_s = time.thread_time()
            programs.bind(name, graphs)
            times.append((time.thread_time() - begin_s) * 1e3)
        found[kind] = min(times)
    return found


async def _merging(program: ServedProgram) -> dict[str, int]:
    """Return how many forwards twenty clients' requests of 1, 4 and 8 rows took, which all came at once."""
    forwards = 0

    async def run_batch(jobs: Sequence[ProgramJob]) -> Sequence[Tensors]:
        nonlocal forwards
        forwards += 1
        return await asyncio.to_thread(run_jobs, jobs)

    batcher: Batcher[ProgramJob, Tensors] = Batcher(run_batch, BatchingConfig())
    requests = [
        jobs_of(program, {"input_ids": torch.randint(1, 6000, ((1, 4, 8)[number % 3], 12))})
        for number in range(CLIENTS)
    ]
    await asyncio.gather(*(batcher.submit(jobs, group=jobs[0].group) for jobs in requests))
    await batcher.close()
    return {"requests": CLIENTS, "rows": sum(map(len, requests)), "forwards": forwards}


class _Table(nn.Module):
    """A program that is mostly weights, all of which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2**18, 256))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features @ self.table.T).amax(1, keepdim=True)


def _shared(programs: Programs) -> dict[str, float]:
    """Return the memory of two processes over one program's weights, plain and compiled, of what the weights are."""
    programs.export("table", _Table(), {"features": torch.rand(3, 256)}, {"features": {0: Dim("rows", min=1, max=8)}})
    programs.compiled("table")
    weights = programs.folder / "weights"
    tensors = program_tensors(programs.store, "table", None)
    nbytes = tensors["table"].nbytes
    torch.from_file(str(weights), shared=True, size=nbytes // 4).copy_(tensors["table"].flatten())
    return {way: _memory_of_two(programs.folder, nbytes, way == "compiled") / nbytes for way in ("program", "compiled")}


def _memory_of_two(folder: Path, nbytes: int, is_compiled: bool) -> int:
    """Return the bytes that two processes take for the shared weights and the program. Raises what either does."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(2, context) as pool:
        barrier = manager.Barrier(2)
        try:
            holding = [pool.submit(_hold, folder, nbytes, is_compiled, barrier) for _ in range(2)]
            return sum(one.result() for one in as_completed(holding))
        finally:
            barrier.abort()  # where the other may wait for one that failed


def _hold(folder: Path, nbytes: int, is_compiled: bool, barrier: threading.Barrier) -> int:
    """Bind the program to the shared weights and run it; return the memory that it took, while both hold it."""
    torch.set_num_threads(1)
    programs = Programs(folder)
    programs.tensors["table"] = {"table": torch.zeros(2**18, 256)}
    _run_table(programs, is_compiled)  # what a first call of any program leaves behind is not of this one
    del programs.tensors["table"]
    barrier.wait(MEET_S)
    before = psutil.Process().memory_full_info().pss
    table = torch.from_file(str(folder / "weights"), shared=True, size=nbytes // 4).view(2**18, 256)
    programs.tensors["table"] = {"table": table}
    _run_table(programs, is_compiled)
    barrier.wait(MEET_S)
    took = psutil.Process().memory_full_info().pss - before
    barrier.wait(MEET_S)
    return int(took)


def _run_table(programs: Programs, is_compiled: bool) -> None:
    program = programs.compiled("table")[0] if is_compiled else programs.bind("table")
    program({"features": torch.rand(2, 256)})


def print_part(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a part as a table."""
    table = Table(
        *(rows[0] if name not in ("bert", "unet") else ("median CPU ms", "calls", *_WAYS, *_RATIOS, "compile s"))
    )
    for row in rows:
        if name not in ("bert", "unet"):
            table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
            continue
        times = row["ms"]
        table.add_row(
            row["program"],
            str(row["calls"]),
            *(f"{times[way]:.3f}" if way in times else "" for way in _WAYS),
            *(f"{times[one] / times[other]:.2f}" if one in times else "" for one, other in _RATIOS.values()),
            f"{row['compile_s']:.0f}",
        )
    Console(width=180).print(PARTS[name], table)
