"""The choice of how to read from a medium. Pure: what is known of the medium in, a decision out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from weights.records.errors import WeightsError

MediumKind = Literal["local", "nfs", "fuse", "tmpfs", "network", "unknown"]
MOUNTINFO: Final = Path("/proc/self/mountinfo")
_KINDS: Final[dict[str, MediumKind]] = {
    **dict.fromkeys(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay", "vfat"), "local"),
    **dict.fromkeys(("nfs", "nfs4"), "nfs"),
    **dict.fromkeys(("virtiofs", "fuseblk"), "fuse"),
    **dict.fromkeys(("tmpfs", "ramfs", "hugetlbfs", "devtmpfs"), "tmpfs"),
    **dict.fromkeys(("cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "ocfs2", "gfs2"), "network"),
}
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
BLOCK_ALIGNMENT: Final = 4096
MAX_THREADS: Final = 256
_MAX_BLOCK_BYTES: Final = 2**30
_MIB: Final = 2**20
_FORM: Final = re.compile(r"(direct|buffered):([0-9]{1,9}):([0-9]{1,9})(KiB|MiB|GiB)")
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Medium:
    """A mounted file system: `device` is what was mounted (`/dev/vda`, `server:/export`), `options` of both levels."""

    kind: MediumKind
    fs_type: str
    mount_point: str
    device: str
    options: tuple[str, ...] = ()


UNKNOWN: Final = Medium("unknown", "", "", "")


def medium_of(path: Path, mountinfo: str) -> Medium:
    """Return the medium of `path` (absolute, without symlinks). UNKNOWN when no line covers it.

    Lines that do not follow the format are passed over: the text is the kernel's, and reading works without it.
    """
    found = UNKNOWN
    for medium in _mounts(mountinfo):
        # Not shorter: of two mounts on one point, the later hides the earlier.
        if path.is_relative_to(medium.mount_point) and len(medium.mount_point) >= len(found.mount_point):
            found = medium
    return found


def nfs_advice(medium: Medium) -> str | None:
    """Suggest a change to an NFS mount for more bandwidth, or return None."""
    if medium.kind != "nfs" or any(option.startswith("nconnect=") for option in medium.options):
        return None
    return (
        f"{medium.mount_point} ({medium.device}) is mounted over a single connection; "
        "mounting it with `-o nconnect=8` lets reads use several"
    )


def _mounts(mountinfo: str) -> Iterator[Medium]:
    for line in mountinfo.split("\n"):
        fields = line.split(" ")
        try:
            end = fields.index("-", 6)  # optional fields, any number of them, stand before the hyphen
            fs_type, device, super_options = fields[end + 1 : end + 4]
        except ValueError:
            continue
        mount_point = _unescaped(fields[4])
        if not mount_point.startswith("/"):
            continue
        options = dict.fromkeys([*fields[5].split(","), *super_options.split(",")])
        yield Medium(_kind(fs_type), fs_type, mount_point, _unescaped(device), tuple(options))


def _kind(fs_type: str) -> MediumKind:
    return "fuse" if fs_type.startswith("fuse.") or fs_type == "fuse" else _KINDS.get(fs_type, "unknown")


def _unescaped(field: str) -> str:
    """Undo the kernel's octal escapes of blank, tab, newline, backslash and `#`."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)


@dataclass(frozen=True, slots=True)
class ReadStrategy:
    """A way to read a medium: `num_threads` extents at once, `block_bytes` per read, `direct` past the page cache."""

    direct: bool
    num_threads: int
    block_bytes: int

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'}:{self.num_threads}:{self.block_bytes // 1024}KiB"


class Probe(BaseModel):
    """Cold bandwidths of a medium in GB/s (10^9). `direct_gbps` None: the file system refuses O_DIRECT."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    direct_gbps: Rate | None
    buffered_gbps: Rate

    @property
    def peak_gbps(self) -> float:
        """Rate of the better way to read, 10^9 bytes per second."""
        return max(self.direct_gbps or 0.0, self.buffered_gbps)


# Large blocks, of an extent's usual size: a virtual disk loses half of its bandwidth to 1 MiB requests in flight
# together. More threads than reads are wanted in flight, as some of them verify and put.
# Over a network, more requests hide the way there and back.
DIRECT: Final[dict[MediumKind, ReadStrategy]] = {
    "local": ReadStrategy(direct=True, num_threads=12, block_bytes=32 * _MIB),
    "nfs": ReadStrategy(direct=True, num_threads=16, block_bytes=8 * _MIB),
    "network": ReadStrategy(direct=True, num_threads=16, block_bytes=8 * _MIB),
    "unknown": ReadStrategy(direct=True, num_threads=8, block_bytes=16 * _MIB),
}
# Buffered readers pay a copy each, so more of them; a FUSE server handles few requests at once.
_BUFFERED: Final[dict[MediumKind, ReadStrategy]] = {
    "local": ReadStrategy(direct=False, num_threads=8, block_bytes=8 * _MIB),
    "nfs": ReadStrategy(direct=False, num_threads=16, block_bytes=4 * _MIB),
    "network": ReadStrategy(direct=False, num_threads=16, block_bytes=4 * _MIB),
    "fuse": ReadStrategy(direct=False, num_threads=4, block_bytes=8 * _MIB),
    "tmpfs": ReadStrategy(direct=False, num_threads=4, block_bytes=8 * _MIB),
    "unknown": ReadStrategy(direct=False, num_threads=8, block_bytes=8 * _MIB),
}


def choose_strategy(medium: Medium, probe: Probe | None, override: ReadStrategy | None = None) -> ReadStrategy:
    """Return the override, else the faster way as probed, else the default of the medium's kind."""
    if override is not None:
        return override
    direct, buffered = DIRECT.get(medium.kind), _BUFFERED[medium.kind]
    if direct is None:
        return buffered
    if probe is None:
        return direct if medium.kind == "local" else buffered
    # At a near tie direct wins: it takes no processor time for copies and leaves the page cache to others.
    is_direct = probe.direct_gbps is not None and probe.direct_gbps >= 0.9 * probe.buffered_gbps
    return direct if is_direct else buffered


def parse_strategy(text: str) -> ReadStrategy:
    """Parse `direct:4:16MiB` or `buffered:8:4MiB`: mode, threads, bytes per read. Raises WeightsError."""
    match = _FORM.fullmatch(text)
    if match:
        num_threads, block_bytes = int(match[2]), int(match[3]) * _UNITS[match[4]]
        if (
            1 <= num_threads <= MAX_THREADS
            and 0 < block_bytes <= _MAX_BLOCK_BYTES
            and block_bytes % BLOCK_ALIGNMENT == 0
        ):
            return ReadStrategy(match[1] == "direct", num_threads, block_bytes)
    raise WeightsError(
        f"{text!r} is no way to read: expected direct|buffered:THREADS:BLOCK like `direct:4:16MiB`, with 1 to "
        f"{MAX_THREADS} threads and a block of 4 KiB to 1 GiB, a multiple of 4 KiB (KiB, MiB or GiB)"
    )
