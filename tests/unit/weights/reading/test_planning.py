"""One plan per device, a probe that is remembered, and what wins over it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from weights.platform.private_folder import cache_folder, temporary_folder
from weights.reading.planning import MIN_PROBED_BYTES, Disks, ReadPlanner, _ProbeCache
from weights.reading.strategy import DIRECT, Medium, Probe, ReadStrategy
from weights.records.errors import WeightsError

EXT4 = "27 1 254:0 / / rw - ext4 /dev/vda rw\n"
NFS = "27 1 0:40 / / rw - nfs4 filer:/export rw,vers=4.2\n"
TMPFS = "27 1 0:40 / / rw - tmpfs tmpfs rw\n"
PROBE = Probe(direct_gbps=1.0, buffered_gbps=2.0)
MEDIUM = Medium("local", "ext4", "/", "/dev/vda")


class FakeDisks(Disks):
    """One disk, mounted as `mountinfo` says; None where the kernel says nothing."""

    def __init__(self, result: Probe | None = PROBE, mountinfo: str | None = EXT4) -> None:
        self.result, self.mountinfo = result, mountinfo
        self.probed: list[Path] = []

    def mounts(self) -> str:
        if self.mountinfo is None:
            raise FileNotFoundError("/proc/self/mountinfo")
        return self.mountinfo

    def probe(self, file: Path) -> Probe | None:
        self.probed.append(file)
        return self.result


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Large enough to be probed; a hole, nothing on disk."""
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, MIN_PROBED_BYTES)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small"
    path.write_bytes(b"x")
    return path


@pytest.fixture
def planner(tmp_path: Path) -> Callable[..., ReadPlanner]:
    def build(disks: FakeDisks, **options: object) -> ReadPlanner:
        settings: dict = {"cache": tmp_path / "cache", "environ": {}, "disks": disks}
        return ReadPlanner(**settings | options)

    return build


def test_a_large_pack_is_probed_once_and_the_probe_outlives_the_process(planner, large: Path) -> None:
    first, second = FakeDisks(), FakeDisks()
    node = planner(first)
    plans = [node.plan(large) for _ in range(3)]
    assert first.probed == [large]
    assert plans[0].probe == PROBE
    assert plans[0].medium == Medium("local", "ext4", "/", "/dev/vda", ("rw",))
    assert not plans[0].strategy.direct
    assert planner(second).plan(large) == plans[0]
    assert second.probed == []


def test_a_small_pack_is_not_worth_a_probe_but_uses_one_that_is_known(planner, small: Path, large: Path) -> None:
    prober = FakeDisks()
    node = planner(prober)
    assert (node.plan(small).strategy, node.plan(small).probe) == (DIRECT["local"], None)
    assert prober.probed == []
    assert node.plan(large).probe == PROBE
    assert planner(prober).plan(small).probe == PROBE


@pytest.mark.parametrize(
    "options", [{"override": ReadStrategy(True, 2, 8192)}, {"environ": {"ATELIER_READ": "direct:2:8KiB"}}]
)
def test_an_override_wins_and_spares_the_probe(planner, large: Path, options: dict) -> None:
    prober = FakeDisks()
    assert planner(prober, **options).plan(large).strategy == ReadStrategy(True, 2, 8192)
    assert prober.probed == []


def test_the_parameter_wins_over_the_environment(planner, small: Path) -> None:
    options = {"override": ReadStrategy(True, 2, 8192), "environ": {"ATELIER_READ": "buffered:9:1MiB"}}
    assert planner(FakeDisks(), **options).plan(small).strategy.num_threads == 2


def test_a_malformed_environment_is_refused_at_once(planner) -> None:
    with pytest.raises(WeightsError, match="'fast'"):
        planner(FakeDisks(), environ={"ATELIER_READ": "fast"})


def test_memory_is_never_probed(planner, large: Path) -> None:
    prober = FakeDisks(mountinfo=TMPFS)
    assert not planner(prober).plan(large).strategy.direct
    assert prober.probed == []


def test_nfs_over_one_connection_brings_advice(planner, large: Path) -> None:
    plan = planner(FakeDisks(None, NFS)).plan(large)
    assert "nconnect" in (plan.advice or "")
    assert (plan.probe, plan.strategy.direct) == (None, False)


def test_what_cannot_be_found_out_gets_a_default(planner, small: Path, tmp_path: Path) -> None:
    assert planner(FakeDisks()).plan(tmp_path / "missing").medium.kind == "unknown"
    plan = planner(FakeDisks(mountinfo=None)).plan(small)
    assert (plan.medium.kind, plan.strategy.direct) == ("unknown", False)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"\xff\xfe", b'{"version": 2, "probes": {}}', b'{"probes": {"/dev/vda ext4": 1}}',
        b'{"probes": {"/dev/vda ext4": {"direct_gbps": -1, "buffered_gbps": 1}}}',
        b'{"probes": {"/dev/vda ext4": {"direct_gbps": 1, "buffered_gbps": NaN}}}', b" " * 2**21 + b"{}",
    ],
)  # fmt: skip
def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "probes.json").write_bytes(text)
    cache = _ProbeCache(tmp_path)
    assert cache.get_probe(MEDIUM) is None
    cache.put_probe(MEDIUM, PROBE)
    assert cache.get_probe(MEDIUM) == PROBE


def test_devices_and_file_systems_are_told_apart(tmp_path: Path) -> None:
    cache = _ProbeCache(tmp_path / "made" / "on demand")
    other = Probe(direct_gbps=None, buffered_gbps=7.0)
    cache.put_probe(MEDIUM, PROBE)
    cache.put_probe(Medium("local", "xfs", "/x", "/dev/vda"), other)
    assert cache.get_probe(MEDIUM) == PROBE
    assert cache.get_probe(Medium("local", "xfs", "/y", "/dev/vda")) == other
    assert cache.get_probe(Medium("local", "ext4", "/", "/dev/vdb")) is None
    assert [file.name for file in (tmp_path / "made" / "on demand").iterdir()] == ["probes.json"]


def test_a_cache_that_cannot_be_written_is_no_error(planner, large: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert planner(FakeDisks()).plan(large).probe == PROBE


def test_the_cache_lies_where_the_desktop_specification_says() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/atelier")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/atelier")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/atelier")
    assert cache_folder({}) == temporary_folder()


def test_a_cache_that_somebody_else_may_have_made_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = _ProbeCache(cache_folder({}))
    cache.put_probe(MEDIUM, PROBE)
    assert cache.get_probe(MEDIUM) == PROBE
    folder = temporary_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert cache.get_probe(MEDIUM) is None
    folder.rename(tmp_path / "theirs")
    folder.symlink_to(tmp_path / "theirs")
    before = (tmp_path / "theirs/probes.json").read_bytes()
    cache.put_probe(MEDIUM, Probe(direct_gbps=None, buffered_gbps=7.0))
    assert (tmp_path / "theirs/probes.json").read_bytes() == before
    assert cache.get_probe(MEDIUM) is None
