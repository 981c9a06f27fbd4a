"""The results of ranks that compute apart: a rank that fails says why to the others, and the group goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from deployments.engines.ranks.group import RankGroup, RankLost
from deployments.engines.ranks.layout import Axis

_FRAME: Final = 1024  # bytes of what is said of a result
_MAX_WORDS: Final = 150  # characters of an error


class RankFailed(RuntimeError):
    """Another rank failed at its part; its group goes on."""


def gather_results(
    group: RankGroup,
    axis: Axis,
    compute: Callable[[], torch.Tensor],
    is_out_of_memory: Callable[[BaseException], bool],
) -> list[torch.Tensor]:
    """Return the results of each peer along an axis, by their places: each computes its own, of one dtype.

    Raises:
        Exception: the own computation's, or RankFailed for another rank's; torch.OutOfMemoryError for one of memory.
        RankLost: as all collectives do.
    """
    failure: Exception | None = None
    try:
        own = compute()
        said: Mapping[str, Any] = {"shape": list(own.shape)}
    except RankLost:
        raise
    except Exception as error:
        failure, own = error, torch.empty(0)
        said = {"error": f"{type(error).__name__}: {error}"[:_MAX_WORDS], "is_memory": is_out_of_memory(error)}
    frames = group.gather(_framed(said), axis)
    if failure is not None:
        raise failure
    results = [json.loads(frame.numpy().tobytes().rstrip(b"\0")) for frame in frames]
    for rank, result in zip(group.layout.peers(group.rank, axis), results, strict=True):
        if "error" in result:
            kind = torch.OutOfMemoryError if result["is_memory"] else RankFailed
            raise kind(f"rank {rank}: {result['error']}")
    sizes = [torch.Size(result["shape"]) for result in results]
    most = max(size.numel() for size in sizes)
    parts = group.gather(torch.nn.functional.pad(own.flatten(), (0, most - own.numel())), axis)
    return [part[: size.numel()].view(size) for part, size in zip(parts, sizes, strict=True)]


def _framed(said: Mapping[str, Any]) -> torch.Tensor:
    body = json.dumps(said).encode()
    return torch.frombuffer(bytearray(body.ljust(_FRAME, b"\0")), dtype=torch.uint8)
