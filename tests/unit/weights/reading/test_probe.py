"""The probe: both ways measured, and what a medium cannot do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weights.reading.planning import PROBE_BYTES, _probe_file


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "pack"
    path.touch()
    os.truncate(path, 2 * PROBE_BYTES)
    return path


def seconds(*steps: float):
    """A clock that shows these times, one per call."""
    return iter(steps).__next__


def test_both_ways_are_measured_in_bytes_per_second(pack: Path) -> None:
    probe = _probe_file(pack, seconds(0.0, 1.0, 10.0, 14.0))
    assert probe is not None
    assert probe.direct_gbps == pytest.approx(PROBE_BYTES / 1e9)
    assert probe.buffered_gbps == pytest.approx(PROBE_BYTES / 4 / 1e9)
    assert probe.peak_gbps == probe.direct_gbps


def test_a_part_that_stays_in_the_page_cache_is_not_measured(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.reading.planning.cached_pages", lambda fd, start, nbytes: 1)
    assert _probe_file(pack) is None


def test_where_direct_reading_is_refused_the_probe_says_so(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: object, flags: int, *rest: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    probe = _probe_file(pack, seconds(0.0, 1.0))
    assert probe is not None
    assert (probe.direct_gbps, probe.buffered_gbps) == (None, pytest.approx(PROBE_BYTES / 1e9))


def test_what_cannot_be_measured_has_no_probe(pack: Path, tmp_path: Path) -> None:
    assert _probe_file(tmp_path / "missing") is None
    (tmp_path / "empty").touch()
    assert _probe_file(tmp_path / "empty") is None
    assert _probe_file(pack, lambda: 1.0) is None  # a clock that stands still
