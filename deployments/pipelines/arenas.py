"""Device memory for the intermediate tensors of segments, allocated before requests come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class ArenaPool:
    """`num_arenas` runs at once have an arena each; all segments share them, so each is as large as the largest needs.

    Further runs, and those of a segment nobody has prepared, get temporary memory, which is counted.
    """

    def __init__(self, num_arenas: int, device: torch.device) -> None:
        self.num_temporary = 0
        self.nbytes = 0
        self._num_arenas = num_arenas
        self._device = device
        self._free: list[torch.Tensor] = []

    def prepare(self, nbytes: int) -> None:
        """Have arenas for runs that need so much. Smaller ones that are in use are not taken back."""
        if nbytes > self.nbytes:
            self.nbytes = nbytes
            self._free = [self._allocated(nbytes) for _ in range(self._num_arenas)]

    @contextlib.contextmanager
    def arena(self, nbytes: int) -> Iterator[torch.Tensor]:
        """At least `nbytes` of uint8."""
        if self._free and 0 < nbytes <= self.nbytes:
            taken = self._free.pop()
        else:
            self.num_temporary += nbytes > 0
            taken = self._allocated(nbytes)
        try:
            yield taken
        except BaseException:
            # A thread or kernel of the run that failed may still write here: this memory is nobody's any more.
            if len(taken) == self.nbytes > 0 and len(self._free) < self._num_arenas:
                self._free.append(self._allocated(self.nbytes))
            raise
        if len(taken) == self.nbytes > 0 and len(self._free) < self._num_arenas:
            self._free.append(taken)

    def _allocated(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
