"""Percentiles beside numpy's, and memory maps beside what the process did."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest

from infra.bench.command.figures import Parts, percentile, private_bytes, pss_bytes, summary

MAPS = """\
7f0000000000-7f0000200000 rw-s 00000000 00:1a 7                          /dev/shm/plasmaAbc (deleted)
Size:               2048 kB
Rss:                1024 kB
Pss:                 256 kB
Pss_Dirty:            12 kB
7f0000300000-7f0000400000 rw-p 00000000 00:00 0
Size:               1024 kB
Pss:                1024 kB
7f0000500000-7f0000600000 rw-s 00000000 00:1a 8                          /dev/shm/plasmaDef (deleted)
Pss:                   4 kB
"""


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95, 1.0])
def test_a_percentile_is_a_sample_that_this_share_is_not_above(share: float) -> None:
    samples = [random.random() for _ in range(random.randint(1, 60))]
    assert percentile(samples, share) == np.percentile(samples, share * 100, method="inverted_cdf")


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs samples"):
        percentile([], 0.5)


def test_a_summary_has_median_range_and_number() -> None:
    samples = [random.random() for _ in range(30)]
    found = summary(samples)
    assert (found["low"], found["high"], found["n"]) == (min(samples), max(samples), 30)
    assert found["p50"] == pytest.approx(np.median(samples))


def test_the_pss_of_a_file_is_summed_over_its_mappings_and_no_others() -> None:
    assert pss_bytes(MAPS, "plasma") == 260 * 1024


def test_a_file_that_nobody_maps_has_no_pss() -> None:
    assert pss_bytes(MAPS, "weights") == 0


def test_the_pss_of_a_mapping_is_what_was_touched_of_it(tmp_path: Path) -> None:
    (tmp_path / "shared").write_bytes(bytes(64 * mmap.PAGESIZE))
    with (tmp_path / "shared").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = b"x" * len(memory)
        assert pss_bytes(Path(f"/proc/{os.getpid()}/smaps").read_text(), str(tmp_path / "shared")) == len(memory)


def test_private_memory_grows_by_what_is_written() -> None:
    rollup = Path(f"/proc/{os.getpid()}/smaps_rollup")
    before = private_bytes(rollup.read_text())
    with mmap.mmap(-1, 2**28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        assert private_bytes(rollup.read_text()) - before == pytest.approx(
            len(memory), rel=0.1
        )  # others of this process write less


def test_parts_that_are_done_are_counted_as_their_results_go_by() -> None:
    told: list[tuple[int, int]] = []
    parts = Parts(2, lambda done, total: told.append((done, total)))
    assert [parts.done("a"), parts.done(7)] == ["a", 7]
    assert told == [(1, 2), (2, 2)]
    assert Parts(1, None).done([]) == []
