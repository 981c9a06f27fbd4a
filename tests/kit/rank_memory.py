"""Processes that each build their part of a language model over one mapped file, and what of it is in memory."""

from __future__ import annotations

import json
import os
import re
import signal
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from deployments.engines.llm.models.registry import create_model, load_config
from deployments.engines.llm.models.stored_slices import stored_slices
from deployments.engines.native.library import load_kernels
from deployments.engines.nn.packed_linear import PackedEmbedding, PackedLinear
from deployments.engines.ranks.layout import RankLayout
from weights.formats.checkpoint import read_checkpoint
from weights.loading.views import mapped_tensors
from weights.records.dtypes import BLOCK_SIZES


def mapped_bytes(file: Path) -> tuple[int, list[range]]:
    """Return this process's share of a mapped file's memory, and where it is mapped."""
    share, places, is_here = 0, [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = line.endswith(str(file))
            if is_here:
                places.append(range(int(found[1], 16), int(found[2], 16)))
        elif is_here and line.startswith("Pss:"):
            share += int(line.split()[1]) * 1024
    return share, places


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a decoder, packed ones too."""
    found = [*module.state_dict().values()]
    for one in module.modules():
        if isinstance(one, PackedLinear | PackedEmbedding):
            found += [part for part in (one.packed.data, one.packed.scales) if part is not None]
    return found


def build(model: Path, rank: int, count: int) -> torch.nn.Module:
    """Return a rank's part, over the slices that it reads."""
    folder, whole, _ = mapped_tensors(model)
    (component,) = read_checkpoint(model).components
    dtypes = {name: tensor.dtype for name, tensor in component.tensors.items()}
    own = {}
    for name, tensor in whole.items():
        own[name] = tensor
        if (part := stored_slices(folder, dtypes, rank, count).get(name)) is not None:
            elements, nbytes = BLOCK_SIZES.get(dtypes[name], (1, 1)) if part.dimension else (1, 1)
            start, stop = (edge // elements * nbytes for edge in (part.start, part.stop))
            own[name] = tensor.narrow(part.dimension, start, stop - start)
    group: Any = SimpleNamespace(
        layout=RankLayout(tensor=count),
        size=lambda axis: count,
        place=SimpleNamespace(tensor=rank),
        all_reduce=torch.clone,  # nothing is computed
    )
    return create_model(load_config(folder), own, torch.device("cpu"), ranks=group).module


def memory_of_ranks(model: Path, count: int) -> list[tuple[int, int]]:
    """Return, for each rank, its share of the file's bytes in memory, and the bytes of its tensors that lie elsewhere.

    A page that n processes have mapped counts a nth. The processes are copies of this one, so it imports for all.
    """
    file = model if model.is_file() else next(model.glob("*.safetensors"))
    load_kernels()
    ready, go, end, results = os.pipe(), os.pipe(), os.pipe(), [os.pipe() for _ in range(count)]
    children = []
    for rank in range(count):
        if child := os.fork():
            children.append(child)
            continue
        try:
            module = build(model, rank, count)
            for tensor in tensors_of(module):
                tensor.sum()  # now its pages are mapped
            os.write(ready[1], b"1")
            os.read(go[0], 1)  # all others have mapped theirs, and still have them
            share, places = mapped_bytes(file)
            elsewhere = [one for one in tensors_of(module) if not any(one.data_ptr() in place for place in places)]
            os.write(results[rank][1], json.dumps([share, sum(one.nbytes for one in elsewhere)]).encode())
            os.read(end[0], 1)
        except BaseException:
            traceback.print_exc()
            os.write(ready[1], b"0")
        os._exit(0)
    try:
        marks = [os.read(ready[0], 1) for _ in range(count)]
        assert marks == [b"1"] * count, "a rank failed"
        os.write(go[1], b"1" * count)
        return [tuple(json.loads(os.read(reader, 4096))) for reader, _ in results]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for pipe in (ready, go, end, *results):
            os.close(pipe[0])
            os.close(pipe[1])
