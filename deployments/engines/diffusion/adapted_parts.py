"""The parts of a pipeline that LoRAs may change, and their names in the LoRAs' files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

# The denoisers of file layers whose names say only that they are a denoiser's.
_DENOISERS: Final = ("transformer", "transformer_2", "unet")
_ENCODERS: Final[Mapping[str, Sequence[str]]] = {
    "text_encoder": ("te", "te1", "clip_l", "clip_h"),
    "text_encoder_2": ("te2", "clip_g"),
    "text_encoder_3": ("te3",),
}
# Parts of files' paths and ids that name the two denoisers of Wan 2.2: no tensor tells them apart.
_OF_STAGES: Final = {"high_noise": 0, "low_noise": 1}


class AdaptedParts(Protocol):
    """A pipeline's parts for LoRAs. `lora_encoders` are components beside the denoiser, with their names in files."""

    @property
    def class_name(self) -> str: ...

    @property
    def denoiser_name(self) -> str: ...

    @property
    def lora_encoders(self) -> Mapping[str, Sequence[str]]: ...


@dataclass(frozen=True, slots=True)
class StockParts:
    """The `AdaptedParts` of a pipeline that diffusers runs, one for each of its denoisers."""

    class_name: str
    denoiser_name: str
    lora_encoders: Mapping[str, Sequence[str]]


def stock_parts(class_name: str, components: Collection[str], *, is_divided: bool = False) -> tuple[StockParts, ...]:
    """Return the parts of a pipeline with these components: none without a denoiser of a name used in files.

    A file's layers of a denoiser are for each of them, unless the file `is_divided`: then each has its own prefix.
    """
    denoisers = [name for name in _DENOISERS if name in components]
    encoders = {name: aliases for name, aliases in _ENCODERS.items() if name in components}
    found = []
    for name in denoisers:
        others = [other for other in denoisers if other != name]
        beside: Mapping[str, Sequence[str]] = dict.fromkeys(others, ()) if is_divided else {name: others}
        found.append(StockParts(class_name, name, {**encoders, **beside}))
    return tuple(found)


def is_divided(names: Collection[str]) -> bool:
    """Return whether the names of a file's tensors tell two denoisers apart."""
    return any(name.startswith("transformer_2.") for name in names)


def stage_of(name: str) -> int | None:
    """Return the number of the denoiser, of two, that an adapter with this id or file name is for; None for both."""
    plain = name.lower().replace("-", "_").replace(" ", "_").replace("noise", "_noise").replace("__", "_")
    said = {stage for word, stage in _OF_STAGES.items() if word in plain}
    return said.pop() if len(said) == 1 else None
