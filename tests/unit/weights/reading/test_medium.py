"""The medium that a path lies on, from fixed texts and from mounts made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weights.reading.strategy import MOUNTINFO, Medium, medium_of, nfs_advice

TEXT = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 25 0:27 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=24684092k
40 27 0:40 / /models rw,relatime shared:1 master:2 - nfs4 filer:/export/models rw,vers=4.2,nconnect=8,rsize=1048576
41 27 0:41 / /models/slow rw,relatime - nfs filer:/export/slow rw,vers=3
42 27 0:42 / /mnt/my\040disk rw - fuse.sshfs me@host:/a\040b rw,user_id=0
43 27 0:43 / /var/lib/layers rw - overlay overlay rw,lowerdir=/l,upperdir=/u
44 27 0:44 / /cluster rw - lustre 10.0.0.1@tcp:/fs rw
45 27 0:45 / /odd rw - neverheard odd rw
46 27 0:46 / /vm rw - virtiofs share rw
47 27 0:47 / /tab\011and\134back rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "fs_type", "mount_point", "device"),
    [
        ("/home/x", "local", "ext4", "/", "/dev/vda"),
        ("/dev/shm/a", "tmpfs", "tmpfs", "/dev/shm", "tmpfs"),
        ("/models", "nfs", "nfs4", "/models", "filer:/export/models"),
        ("/models/slow/m/pack", "nfs", "nfs", "/models/slow", "filer:/export/slow"),
        ("/models/slower", "nfs", "nfs4", "/models", "filer:/export/models"),
        ("/mnt/my disk/pack", "fuse", "fuse.sshfs", "/mnt/my disk", "me@host:/a b"),
        ("/mnt/my", "local", "ext4", "/", "/dev/vda"),
        ("/var/lib/layers/x", "local", "overlay", "/var/lib/layers", "overlay"),
        ("/cluster/x", "network", "lustre", "/cluster", "10.0.0.1@tcp:/fs"),
        ("/odd/x", "unknown", "neverheard", "/odd", "odd"),
        ("/vm/x", "fuse", "virtiofs", "/vm", "share"),
        ("/tab\tand\\back/x", "local", "xfs", "/tab\tand\\back", "/dev/sdb"),
    ],
)
def test_the_longest_mount_point_that_leads_to_a_path_is_its_medium(
    path: str, kind: str, fs_type: str, mount_point: str, device: str
) -> None:
    found = medium_of(Path(path), TEXT)
    assert (found.kind, found.fs_type, found.mount_point, found.device) == (kind, fs_type, mount_point, device)


def test_options_are_those_of_the_mount_and_of_the_file_system() -> None:
    assert medium_of(Path("/models/x"), TEXT).options == (
        "rw", "relatime", "vers=4.2", "nconnect=8", "rsize=1048576"
    )  # fmt: skip


def test_the_later_of_two_mounts_on_one_point_hides_the_earlier() -> None:
    text = TEXT + "50 27 0:50 / /models rw - tmpfs none rw\n"
    assert medium_of(Path("/models/x"), text).kind == "tmpfs"
    assert medium_of(Path("/models/slow/x"), text).kind == "nfs"


@pytest.mark.parametrize(
    "text", ["", "\n\n", "rubbish", "1 2 3 / / rw", "1 2 3 / / rw - ext4", "1 2 3 / here rw - a b c"]
)
def test_lines_of_another_form_say_nothing(text: str) -> None:
    assert medium_of(Path("/x"), text).kind == "unknown"
    assert medium_of(Path("/x"), text + "\n" + TEXT) == medium_of(Path("/x"), TEXT)


def test_this_machine_has_a_medium_for_its_root() -> None:
    assert medium_of(Path("/"), MOUNTINFO.read_text()).mount_point == "/"


def test_a_single_connection_is_advised_against_only_on_nfs() -> None:
    advice = nfs_advice(medium_of(Path("/models/slow/x"), TEXT))
    assert advice is not None
    for word in ("/models/slow", "filer:/export/slow", "nconnect"):
        assert word in advice
    assert nfs_advice(medium_of(Path("/models/x"), TEXT)) is None
    assert nfs_advice(medium_of(Path("/home"), TEXT)) is None


def escaped(text: str) -> str:
    return "".join(f"\\{ord(char):03o}" if char in " \t\n\\#" else char for char in text)


part = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/", include_characters="\t\n"), min_size=1
)
names = part.filter(lambda name: name not in (".", ".."))
points = st.lists(names, max_size=4).map(lambda names: "/" + "/".join(names))
words = st.text("abcdefghij0123456789=._", min_size=1, max_size=8)
mounts = st.builds(
    Medium,
    kind=st.just("unknown"),
    fs_type=words.map(lambda word: f"z{word}"),
    mount_point=points,
    device=names,
    options=st.lists(words, min_size=1, max_size=3, unique=True).map(tuple),
)


@given(st.lists(st.tuples(mounts, st.lists(words, max_size=3)), min_size=1, max_size=6), points, st.text(max_size=80))
def test_whatever_is_mounted_is_found_again(mounted: list[tuple[Medium, list[str]]], below: str, noise: str) -> None:
    lines = [noise.replace(" - ", " ")] + [
        f"{number} 1 0:{number} / {escaped(medium.mount_point)} {medium.options[0]} "
        + "".join(f"{optional} " for optional in optionals)
        + f"- {medium.fs_type} {escaped(medium.device)} {','.join(medium.options)}"
        for number, (medium, optionals) in enumerate(mounted)
    ]
    wanted = mounted[0][0].mount_point
    path = Path(wanted) / below.lstrip("/")
    # Independent of the code under test: compare the parts of paths.
    covering = [
        medium
        for medium, _ in mounted
        if path.parts[: len(Path(medium.mount_point).parts)] == Path(medium.mount_point).parts
    ]
    deepest = max(len(Path(medium.mount_point).parts) for medium in covering)
    expected = [medium for medium in covering if len(Path(medium.mount_point).parts) == deepest][-1]
    assert medium_of(path, "\n".join(lines)) == expected


@given(st.text(), points)
def test_no_text_at_all_makes_it_fail(text: str, path: str) -> None:
    assert medium_of(Path(path), text).kind in {"local", "nfs", "fuse", "tmpfs", "network", "unknown"}
