"""What a file lies on, from the text of /proc/self/mountinfo (format: proc_pid_mountinfo(5))."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

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
    """The medium of `path`, which is absolute and without symlinks. UNKNOWN when no line covers it.

    Lines that do not follow the format are passed over: the text is the kernel's, and reading works without it.
    """
    found = UNKNOWN
    for medium in _mounts(mountinfo):
        # Not shorter: of two mounts on one point, the later hides the earlier.
        if path.is_relative_to(medium.mount_point) and len(medium.mount_point) >= len(found.mount_point):
            found = medium
    return found


def nfs_advice(medium: Medium) -> str | None:
    """What to change about an NFS mount for more bandwidth, or None."""
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
    """The kernel writes blank, tab, newline, backslash and `#` as a backslash and three octal digits."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)
