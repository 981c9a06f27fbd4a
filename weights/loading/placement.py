"""Where extents go: seen where the provider has them, copied, or uploaded to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from weights.errors import WeightsError
from weights.loading.external_memory import bytes_tensor
from weights.loading.loaded_files import LoadedFiles
from weights.manifest import ExtentRef
from weights.provider import ExtentProvider

# What is in memory twice, as bytes and as what becomes of them; wide enough for the parallel reads of a provider.
WINDOW_BYTES: Final = 512 * 2**20


class ExtentSource:
    """Extents as 1-D uint8 tensors on a device. `will_copy`: the caller makes private memory of everything anyway."""

    def __init__(
        self, provider: ExtentProvider, device: str, loaded: LoadedFiles | None, *, will_copy: bool = False
    ) -> None:
        is_private = device == "cpu-private"
        self._provider = provider
        self._device = target = torch.device("cpu") if is_private else _device(device)
        self._loaded = None if is_private else loaded  # memory that may be written is nobody else's
        self._place: Callable[[torch.Tensor], torch.Tensor] | None = None
        if target.type != "cpu":
            self._place = lambda base: base.to(target)
        elif is_private and not will_copy:
            self._place = torch.clone

    def load(self, extents: Sequence[ExtentRef]) -> dict[str, torch.Tensor]:
        """By extent id. Raises what the provider raises."""
        if not extents:
            return {}
        by_location = {f"{extent.pack}@{extent.offset}:{extent.id}": extent for extent in extents}

        def load(locations: Sequence[str]) -> dict[str, torch.Tensor]:
            found = self._fetch([by_location[location] for location in locations])
            return {location: found[by_location[location].id] for location in locations}

        if self._loaded is None:
            bases = load(list(by_location))
        else:
            bases = self._loaded.get_all(str(self._device), list(by_location), load)
        return {by_location[location].id: base for location, base in bases.items()}

    def _fetch(self, extents: Sequence[ExtentRef]) -> dict[str, torch.Tensor]:
        if self._place is None:
            return _tensors(self._provider, extents)
        bases = {}
        for window in windows(extents):
            for id_, base in _tensors(self._provider, window).items():
                bases[id_] = self._place(base)
        return bases


def windows(extents: Sequence[ExtentRef], max_bytes: int = WINDOW_BYTES) -> Iterator[list[ExtentRef]]:
    """Runs of extents of at most `max_bytes`, or of one extent."""
    window: list[ExtentRef] = []
    for extent in extents:
        if window and sum(held.nbytes for held in window) + extent.nbytes > max_bytes:
            yield window
            window = []
        window.append(extent)
    if window:
        yield window


def _tensors(provider: ExtentProvider, extents: Sequence[ExtentRef]) -> dict[str, torch.Tensor]:
    buffers = provider.fetch(extents)
    return {extent.id: bytes_tensor(buffers[extent.id]) for extent in extents}


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise WeightsError(f"cannot load onto device {name!r} (known: cpu, cpu-private, cuda, cuda:<n>)")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise WeightsError(f"cannot load onto device {name!r}: {count} CUDA devices here")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device
