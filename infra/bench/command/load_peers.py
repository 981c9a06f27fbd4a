"""A load by one loader, in a process of its own: `python -m infra.bench.command.load_peers NAME FOLDER {cold,warm}`.

Prints one JSON object: seconds until every tensor of the folder's weight files is in memory with every byte touched,
the bytes, the process's peak RSS, and a digest of all tensors (taken after the clock stopped).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash

Tensors = Mapping[str, torch.Tensor]


def _load_mmap(files: list[Path]) -> Tensors:
    """Load with safetensors' defaults: a mapping, whose pages are read when they are touched."""
    from safetensors.torch import load_file

    return _touched({name: tensor for file in files for name, tensor in load_file(file).items()})


def _load_runai(files: list[Path]) -> Tensors:
    """Load with runai-model-streamer's defaults; it lends tensors, so owned ones are requested."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in files], device="cpu", owned=True)
        return dict(streamer.get_tensors())


def _load_fastsafetensors(files: list[Path]) -> Tensors:
    """Load with fastsafetensors without GPU direct storage, into host memory."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [str(file) for file in files]})
    buffers = loader.copy_files_to_device()
    _KEEP.append((loader, buffers))
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}


def _load_tensorizer(files: list[Path]) -> Tensors:
    """Load tensorizer's own format (written before, beside the weights), by default without hash checks."""
    from tensorizer import TensorDeserializer

    deserializer = TensorDeserializer(str(files[0]), device="cpu")
    _KEEP.append(deserializer)
    return dict(deserializer.items())


def _load_torch_mmap(files: list[Path]) -> Tensors:
    """Load a .pt file of the same tensors with torch.load(mmap=True)."""
    return _touched(torch.load(files[0], mmap=True, weights_only=True))  # noqa: TID251  our own file


def _load_diffusers(files: list[Path]) -> Tensors:
    """Load the model folder with diffusers' from_pretrained, as its users do."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel.from_pretrained(files[0].parent, torch_dtype=torch.bfloat16)
    _KEEP.append(model)
    return _touched(model.state_dict())


LOADERS: dict[str, Callable[[list[Path]], Tensors]] = {
    "safetensors-mmap": _load_mmap,
    "runai-model-streamer": _load_runai,
    "fastsafetensors": _load_fastsafetensors,
    "tensorizer": _load_tensorizer,
    "torch-mmap": _load_torch_mmap,
    "diffusers": _load_diffusers,
}
OWN_FORMATS = {"tensorizer": "peer.tensors", "torch-mmap": "peer.pt"}  # files that are written for them before
_MODULES = {"runai-model-streamer": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}
_MODULES |= {"tensorizer": "tensorizer", "diffusers": "diffusers", "safetensors-mmap": "safetensors.torch"}
_KEEP: list[object] = []  # loaders that own what they lend: they must outlive the digest


def _weight_files(name: str, folder: Path) -> list[Path]:
    """Return the files that a loader reads: the stock ones, or its own."""
    return [folder / OWN_FORMATS[name]] if name in OWN_FORMATS else sorted(folder.glob("*.safetensors"))


def drop_cache(files: list[Path]) -> None:
    """Take the files out of the page cache. Works for clean pages that nobody maps, without privileges."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fill_cache(files: list[Path]) -> None:
    """Read the files once, so that the page cache has them."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def peak_rss_bytes(pid: int) -> int:
    """Return a process's peak since its exec; getrusage would count its parent's at the fork."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def digest(tensors: Tensors) -> str:
    """Hash names, dtypes, shapes and all bytes; equal for equal weights, whoever loaded them."""
    total = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _touched(tensors: Tensors) -> Tensors:
    """Touch every byte, as the first use would: lazy loaders have read nothing yet."""
    for tensor in tensors.values():
        np.bitwise_or.reduce(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().view(np.uint8))
    return tensors


def _print_load(name: str, folder: str, mode: str) -> None:
    """Import first, load on the clock."""
    torch.set_num_threads(1)
    files = _weight_files(name, Path(folder))
    __import__(_MODULES.get(name, "torch"))
    if name == "diffusers":
        from diffusers import FluxTransformer2DModel  # noqa: F401  its import takes seconds and is lazy
    (drop_cache if mode == "cold" else fill_cache)(files)
    start = time.perf_counter()
    tensors = LOADERS[name](files)
    seconds = time.perf_counter() - start
    figures = {
        "seconds": seconds,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "peak_rss_bytes": peak_rss_bytes(os.getpid()),
        "digest": digest(tensors),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some loaders end noisily; the figures are out


if __name__ == "__main__":
    _print_load(*sys.argv[1:])
