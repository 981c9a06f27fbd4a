"""Networks that enlarge images, told by the names and shapes of their tensors: ESRGAN's RRDBNet, SRVGGNetCompact.

Nothing else describes them: trainers write bare state dicts, under `params_ema` or `params`, and an RRDBNet has had
three sets of names. All become those of Real-ESRGAN here. Sources of the structures: "ESRGAN" (arXiv 1809.00219,
section 3.1), "Real-ESRGAN" (arXiv 2107.10833, section 3.3), and the published checkpoints.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from weights.formats.untrusted import shown
from weights.records.errors import FormatError

LIBRARY: Final = "upscaler"  # of the component, whose class is a `kind` below
RRDB: Final = "RRDBNet"
COMPACT: Final = "SRVGGNetCompact"
_NESTS: Final = ("params_ema.", "params.")
_COLORS: Final = 3
_MAX_SCALE: Final = 8
_MAX_BLOCKS: Final = 256
_NUM_DENSE: Final = 3  # dense blocks of a residual-in-residual one
_NUM_CONVS: Final = 5  # of a dense block
# ESRGAN's own names, and those of the same network as one list of layers: Real-ESRGAN's.
_RENAMED: Final = (
    (re.compile(r"^(?:RRDB_trunk|model\.1\.sub)\.(\d+)\.RDB(\d)\.conv(\d)(?:\.0)?\."), r"body.\1.rdb\2.conv\3."),
    (re.compile(r"^trunk_conv\."), "conv_body."),
    (re.compile(r"^upconv(\d)\."), r"conv_up\1."),
    (re.compile(r"^HRconv\."), "conv_hr."),
    (re.compile(r"^model\.0\."), "conv_first."),
    (re.compile(r"^model\.1\.sub\.\d+\."), "conv_body."),
)
_COMPACT_BEGINS: Final = frozenset({"body.0.weight", "body.0.bias", "body.1.weight", "body.2.weight"})
_LISTED: Final = re.compile(r"^model\.(\d+)\.(weight|bias)$")  # behind the blocks: enlarging, and two layers at the end

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpscalerNet:
    """The structure of a network. It reads blocks of `shrink` x `shrink` pixels as one, and writes `growth` x `growth`
    for each. `num_grown` channels are those that a layer of an RRDBNet's dense blocks adds."""

    kind: str
    num_features: int
    num_blocks: int
    growth: int
    shrink: int = 1
    num_grown: int = 0

    @property
    def scale(self) -> int:
        """Return the factor by which its images are wider and higher."""
        return self.growth // self.shrink

    @property
    def radius(self) -> int:
        """Return the distance in pixels within which an image's pixels affect one of the result."""
        if self.kind == COMPACT:
            return self.num_blocks + 2  # a layer of 3 x 3 each
        return self.shrink * (self.num_blocks * _NUM_DENSE * _NUM_CONVS + 5)


def is_upscaler(names: Collection[str]) -> bool:
    """Return whether tensors of these names are an upscaling network's, as far as names tell."""
    renamed = {_renamed(_bare(name)) for name in names}
    return _is_rrdb(renamed) or (renamed >= _COMPACT_BEGINS and all(name.startswith("body.") for name in renamed))


def upscaler_tensors(path: Path, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return a file's tensors by Real-ESRGAN's names. Raises FormatError for two of one name."""
    renamed = {_renamed(_bare(name)): tensor for name, tensor in tensors.items()}
    listed = sorted({int(found[1]) for name in renamed if (found := _LISTED.match(name))})
    layers = {number: f"conv_up{place}" for place, number in enumerate(listed[:-2], 1)}
    layers |= dict(zip(listed[-2:], ("conv_hr", "conv_last"), strict=False))

    def plain(name: str) -> str:
        match = _LISTED.match(name)
        return f"{layers[int(match[1])]}.{match[2]}" if match else name

    plainly = {plain(name): tensor for name, tensor in renamed.items()}
    if len(plainly) != len(tensors):
        raise FormatError(f"{path}: several tensors of an upscaler have one name")
    return plainly


def read_upscaler(path: Path, shapes: Mapping[str, Shape]) -> UpscalerNet:
    """Return the structure that these tensors, by Real-ESRGAN's names, have.

    Raises FormatError naming the tensor that is missing, of another shape, or of a structure that is not known here.
    """
    describe = _describe_rrdb if _is_rrdb(shapes.keys()) else _describe_compact
    try:
        net = describe(shapes)
    except (KeyError, ValueError, IndexError) as error:
        raise FormatError(f"{path}: an upscaler whose sizes make no network: {shown(str(error))}") from None
    expected = expected_shapes(net)
    for name in sorted(expected.keys() ^ shapes.keys()):
        what = "is missing" if name in expected else "has no place"
        raise FormatError(f"{path}: tensor {shown(name)} {what} in a {net.kind} of {net.num_blocks} blocks")
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise FormatError(
                f"{path}: tensor {shown(name)} has shape {list(shapes[name])}, expected {list(shape)} in a {net.kind} "
                f"of {net.num_blocks} blocks and {net.num_features} channels"
            )
    return net


def expected_shapes(net: UpscalerNet) -> dict[str, Shape]:
    """Return the shapes of a network's tensors, by name."""
    width = net.num_features
    if net.kind == COMPACT:
        shapes = _conv("body.0", _COLORS, width) | {"body.1.weight": (width,)}
        for place in range(1, net.num_blocks + 1):
            shapes |= _conv(f"body.{2 * place}", width, width) | {f"body.{2 * place + 1}.weight": (width,)}
        return shapes | _conv(f"body.{2 * net.num_blocks + 2}", width, _COLORS * net.growth**2)
    shapes = _conv("conv_first", _COLORS * net.shrink**2, width) | _conv("conv_body", width, width)
    for block in range(net.num_blocks):
        for dense in range(1, _NUM_DENSE + 1):
            for place in range(1, _NUM_CONVS + 1):
                into = width if place == _NUM_CONVS else net.num_grown
                read = width + (place - 1) * net.num_grown
                shapes |= _conv(f"body.{block}.rdb{dense}.conv{place}", read, into)
    for place in range(1, net.growth.bit_length()):
        shapes |= _conv(f"conv_up{place}", width, width)
    return shapes | _conv("conv_hr", width, width) | _conv("conv_last", width, _COLORS)


def _conv(name: str, num_in: int, num_out: int) -> dict[str, Shape]:
    return {f"{name}.weight": (num_out, num_in, 3, 3), f"{name}.bias": (num_out,)}


def _bare(name: str) -> str:
    for nest in _NESTS:
        name = name.removeprefix(nest)
    return name


def _renamed(name: str) -> str:
    for pattern, new in _RENAMED:
        if pattern.match(name):
            return pattern.sub(new, name)
    return name


def _is_rrdb(names: Collection[str]) -> bool:
    return "body.0.rdb1.conv1.weight" in names and "conv_first.weight" in names


def _describe_rrdb(shapes: Mapping[str, Shape]) -> UpscalerNet:
    width, num_read = shapes["conv_first.weight"][:2]
    shrink = math.isqrt(num_read // _COLORS)
    num_blocks = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("body."))
    num_grown = shapes["body.0.rdb1.conv1.weight"][0]
    growth = 2 ** sum(name.startswith("conv_up") and name.endswith(".weight") for name in shapes)
    return _checked(UpscalerNet(RRDB, width, num_blocks, growth, shrink, num_grown))


def _describe_compact(shapes: Mapping[str, Shape]) -> UpscalerNet:
    last = max(int(name.split(".")[1]) for name in shapes if name.startswith("body."))
    growth = math.isqrt(shapes[f"body.{last}.weight"][0] // _COLORS)
    return _checked(UpscalerNet(COMPACT, shapes["body.0.weight"][0], last // 2 - 1, growth))


def _checked(net: UpscalerNet) -> UpscalerNet:
    if net.shrink not in (1, 2, 4) or net.growth % net.shrink or not 1 <= net.scale <= _MAX_SCALE:
        raise ValueError(
            f"blocks of {net.shrink} pixels become {net.growth}, and scales of 1 to {_MAX_SCALE} are known"
        )
    if not 0 < net.num_blocks <= _MAX_BLOCKS or net.num_features < 1:
        raise ValueError(f"{net.num_blocks} blocks of {net.num_features} channels")
    return net
