"""Places of a decoder's layers: on devices, or on the host, whose memory has all of them. Pure.

Devices are filled from the last layer on: what is behind the layers (a norm, the head) is on the first device, the
layers before those that it has room for on the next, so that a token's activations cross each border once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weights.records.errors import BudgetExceeded, WeightsError
from weights.residency.sizes import shown_bytes

GpuLayers = int | str  # "auto", so many of the last ones, or a regular expression of whole names
AUTO: Final = "auto"
_LAYER: Final = re.compile(r"(?:model\.)?(?:layers|blk)\.([0-9]{1,6})\.")
_EMBEDDING: Final = re.compile(r"(?:model\.)?(?:embed_tokens|token_embd)\.")
_CACHE_STEPS: Final = 256  # the largest caches are found up to such a part of them
_HEADS: Final = ("lm_head.", "output.weight")


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The bytes of a decoder on a device: of the weights of each layer, of what else is there, and the bytes of the KV
    caches and tables of 0, 1, ... layers. `what` names the rest.
    """

    layers: Sequence[int]
    rest_bytes: int
    caches: Sequence[int]
    what: str = ""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The place of each layer: the number of a device, 0 for that of the head, None for the host."""

    places: tuple[int | None, ...]

    def on(self, place: int | None) -> tuple[int, ...]:
        """Return the layers that are there."""
        return tuple(layer for layer, found in enumerate(self.places) if found == place)

    @property
    def is_whole(self) -> bool:
        """Return whether all layers are where the head is."""
        return all(place == 0 for place in self.places)

    def __str__(self) -> str:
        return " ".join("host" if place is None else str(place) for place in self.places)


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor of a decoder belongs to, by its name in a checkpoint or a GGUF file."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def host_names(names: Collection[str], plan: LayerPlan) -> frozenset[str]:
    """Return the tensors that stay in host memory: those of its layers, and the embedding, unless that is the head too
    or all layers are where that is.

    A row of it is looked up for each token, where the token ids are.
    """
    on_host = {layer for layer, place in enumerate(plan.places) if place is None}
    has_head = any(name.startswith(_HEADS) for name in names)
    has_embedding = not plan.is_whole and has_head
    return frozenset(name for name in names if layer_of(name) in on_host or (has_embedding and _EMBEDDING.match(name)))


def decoder_sizes(sizes: Mapping[str, int], num_layers: int, caches: Sequence[int]) -> DecoderSizes:
    """Return the sizes of a decoder with tensors of these bytes, split between host and device."""
    layers = [0] * num_layers
    for name, nbytes in sizes.items():
        if (layer := layer_of(name)) is not None and layer < num_layers:
            layers[layer] += nbytes
    hosts = host_names(sizes, LayerPlan((None,) * num_layers))
    rest = {name: nbytes for name, nbytes in sizes.items() if name not in hosts}
    return DecoderSizes(layers, sum(rest.values()), caches, ", ".join(sorted(rest)))


def plan_layers(
    sizes: DecoderSizes, budgets: Sequence[int], wanted: GpuLayers, model: str, *, has_host: bool = True
) -> LayerPlan:
    """Return the device of each of `model`'s layers, for devices with these bytes each.

    `auto` takes as many of the last layers as have room. Raises WeightsError for a wish that no layer fits, and for one
    that leaves layers to the host where that computes none (`has_host`), and BudgetExceeded naming layers and bytes for
    one that has no room, and where not even the rest has.
    """
    device = 0
    needed = sizes.rest_bytes + sizes.caches[0]
    if needed > budgets[device]:
        raise BudgetExceeded(
            f"{model!r}: {sizes.what} need {shown_bytes(needed)} on the device even where all layers are elsewhere; "
            f"its budget is {shown_bytes(budgets[device])}"
        )
    names = _wanted_layers(len(sizes.layers), wanted, model)
    if not has_host and len(names) < len(sizes.layers):
        raise WeightsError(
            f"gpu_layers {wanted!r} leaves layers of {model!r} to the host, and cpu is not among the devices"
        )
    places: list[int | None] = [None] * len(sizes.layers)
    weights_bytes, count = sizes.rest_bytes, 0
    for layer in reversed(names):
        while device < len(budgets) and weights_bytes + sizes.layers[layer] + sizes.caches[count + 1] > budgets[device]:
            device, weights_bytes, count = device + 1, 0, 0
        if device == len(budgets):
            if wanted == AUTO and has_host:
                break
            raise BudgetExceeded(_no_room(sizes, budgets, names, wanted, model))
        weights_bytes, count = weights_bytes + sizes.layers[layer], count + 1
        places[layer] = device
    return LayerPlan(tuple(places))


def largest_caches(
    sizes_of: Callable[[int], DecoderSizes], budgets: Sequence[int], least: int, host_bytes: int | None
) -> int:
    """Return the bytes of KV caches that have room beside the layers, at least `least`.

    `sizes_of` gives the sizes of a decoder whose caches have so many bytes in all. They grow as long as no other layer
    goes to the host and the host's caches fit `host_bytes`, which is None when the host computes no layers.
    """

    def num_on_host(cache_bytes: int) -> int | None:
        sizes = sizes_of(cache_bytes)
        try:
            hosts = len(plan_layers(sizes, budgets, AUTO, "", has_host=host_bytes is not None).on(None))
        except BudgetExceeded:
            return None
        return hosts if not hosts or sizes.caches[hosts] <= (host_bytes or 0) else None

    fewest, found, beyond = num_on_host(least), least, sum(budgets) + (host_bytes or 0) + 1
    while fewest is not None and beyond - found > max(1, found // _CACHE_STEPS):
        middle = (found + beyond) // 2
        found, beyond = (middle, beyond) if num_on_host(middle) == fewest else (found, middle)
    return found


def _wanted_layers(num_layers: int, wanted: GpuLayers, model: str) -> list[int]:
    has = f"{model!r} has {num_layers} layers, layers.0 to layers.{num_layers - 1}"
    if wanted == AUTO:
        return list(range(num_layers))
    if isinstance(wanted, int):
        if wanted > num_layers:
            raise WeightsError(f"gpu_layers is {wanted}, but {has}")
        return list(range(num_layers - wanted, num_layers))
    found = [layer for layer in range(num_layers) if re.fullmatch(wanted, f"layers.{layer}")]
    if not found:
        raise WeightsError(f"gpu_layers {wanted!r} is the name of no layer: {has}")
    return found


def _no_room(sizes: DecoderSizes, budgets: Sequence[int], layers: Sequence[int], wanted: GpuLayers, model: str) -> str:
    needed = sizes.rest_bytes + sum(sizes.layers[layer] for layer in layers) + sizes.caches[len(layers)]
    each = f" on each of {len(budgets)} devices" if len(budgets) > 1 else ""
    return (
        f"gpu_layers {wanted!r} of {model!r}: layers {', '.join(map(str, layers))} and {sizes.what} need "
        f"{shown_bytes(needed)} with their KV cache; the budget is {shown_bytes(budgets[0])}{each}"
    )
