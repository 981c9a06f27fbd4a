"""The tiles of a large image, or of a long video, decoded by all ranks of a replica: the bits of one rank's tiles.

The VAE's own tiling runs twice on rank 0: once to see which tiles its decoder is called for, and once more with the
results, which the ranks have computed a share each of.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from deployments.engines.costs.memory_limits import is_out_of_memory
from deployments.engines.nn.forwards import replaced_forwards
from deployments.engines.ranks.following import RankChannel
from deployments.engines.ranks.group import Plan, RankGroup, RankLost, forms_of
from deployments.engines.ranks.outcomes import gather_results

# Classes whose decoder sees a tile alone, and nothing of the one before: of families; and of other pipelines, where
# diffusers' own code goes by tiles without being asked: all others of its VAEs decode in one piece.
TILED_CLASSES: Final = frozenset({"AutoencoderKL"})
VIDEO_CLASSES: Final = frozenset({"AutoencoderKLAllegro", "AutoencoderKLHunyuanVideo"})
_CAUSAL: Final = "AutoencoderKLHunyuanVideo"  # its first latent is one frame

logger = logging.getLogger(__name__)


class LeadingTiles:
    """The tiles of rank 0's `vae`, of which the others have the same."""

    def __init__(self, ranks: RankChannel, vae: Any) -> None:
        self._ranks, self._vae = ranks, vae
        self._dtype = next(vae.parameters()).dtype

    def run(self, vae: Any, decode: Callable[[], Any]) -> Any:
        """Return `decode()`, which may call the decoder for each tile. Raises another rank's error, or RankLost."""
        if vae is not self._vae or not self._is_as_built():  # what is in another dtype is rank 0's alone
            return decode()
        tiles: list[torch.Tensor] = []

        def note(tile: torch.Tensor) -> torch.Tensor:
            tiles.append(tile)
            return tile.new_zeros(_decoded_shape(vae, tile))

        with replaced_forwards({vae.decoder: note}):
            found = decode()
        if len(tiles) < 2:
            return decode() if tiles else found
        self._ranks.say({"forms": forms_of(tiles), "threads": torch.get_num_threads()})
        self._ranks.group.spread(tiles)
        decoded = iter(_decoded_by_all(self._ranks.group, vae, tiles))
        with replaced_forwards({vae.decoder: partial(_next_of, decoded)}):
            return decode()

    def _is_as_built(self) -> bool:
        weight = next(self._vae.parameters())
        return weight.dtype == self._dtype and not torch.is_autocast_enabled(weight.device.type)


class TilesFollower:
    """The tiles of another rank. Call it with each plan of its channel."""

    def __init__(self, group: RankGroup, vae: Any) -> None:
        self._group, self._vae = group, vae

    def __call__(self, plan: Plan) -> None:
        """Decode this rank's share. An error of its own is rank 0's to know. Raises RankLost."""
        tiles = [one.to(self._vae.device) for one in self._group.receive(plan["forms"])]
        if torch.get_num_threads() != plan["threads"]:
            torch.set_num_threads(plan["threads"])
        try:
            with torch.no_grad():
                _decoded_by_all(self._group, self._vae, tiles)
        except RankLost:
            raise
        except Exception as error:
            logger.warning("tiles of another rank failed: %s", error)


def _next_of(decoded: Iterator[torch.Tensor], tile: torch.Tensor) -> torch.Tensor:
    return next(decoded)


def _decoded_shape(vae: Any, tile: torch.Tensor) -> tuple[int, ...]:
    frames: tuple[int, ...] = ()
    if tile.dim() == 4:
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
    else:
        scale, each, count = vae.spatial_compression_ratio, vae.config.temporal_compression_ratio, tile.shape[2]
        frames = ((count - 1) * each + 1 if type(vae).__name__ == _CAUSAL else count * each,)
    return len(tile), vae.config.out_channels, *frames, tile.shape[-2] * scale, tile.shape[-1] * scale


def _decoded_by_all(group: RankGroup, vae: Any, tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all decoded tiles, of which this rank decodes its share: each has every nth one."""
    count = group.size("cfg") * group.size("sequence")
    number = group.place.cfg * group.size("sequence") + group.place.sequence

    def own() -> torch.Tensor:
        found = [vae.decoder(tile).flatten() for tile in tiles[number::count]]
        return torch.cat(found) if found else tiles[0].new_empty(0)

    def of_sequence() -> torch.Tensor:
        return torch.cat(gather_results(group, "sequence", own, is_out_of_memory))

    whole = torch.cat(gather_results(group, "cfg", of_sequence, is_out_of_memory))
    order = [place for first in range(count) for place in range(first, len(tiles), count)]
    shapes = [_decoded_shape(vae, tiles[place]) for place in order]
    parts = torch.split(whole, [math.prod(shape) for shape in shapes])
    decoded = {place: part.view(shape) for place, part, shape in zip(order, parts, shapes, strict=True)}
    return [decoded[place] for place in range(len(tiles))]
