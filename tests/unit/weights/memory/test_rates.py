"""Rates of link and host: measured once on a machine, and remembered as long as what they depend on is the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weights.memory import rates
from weights.memory.block_plan import Rates
from weights.memory.rates import _rates_key, _remembered_rates


def drawn() -> Rates:
    return Rates(random.uniform(1, 1e12), random.uniform(1, 1e12), random.uniform(1, 1e15))


def never() -> Rates:
    raise AssertionError("it is remembered")


def test_what_was_measured_is_remembered_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "rates.json"
    first, second = drawn(), drawn()
    assert _remembered_rates("one", file, lambda: first) == first
    assert _remembered_rates("two", file, lambda: second) == second
    assert (_remembered_rates("one", file, never), _remembered_rates("two", file, never)) == (first, second)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"one": 3}',
        b"\xff",
        b'{"one": {"link_bytes_per_s": 1.0, "host_bytes_per_s": 2.0}}',
        b"0",
        b"NaN",
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path: Path, damage: bytes) -> None:
    file, found = tmp_path / "rates.json", drawn()
    file.write_bytes(damage)
    assert _remembered_rates("one", file, lambda: found) == found
    assert _remembered_rates("one", file, never) == found


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), "fast", None, 2**5000])
def test_rates_that_cannot_be_are_measured_again(tmp_path: Path, value: object) -> None:
    file, found = tmp_path / "rates.json", drawn()
    kept = {"link_bytes_per_s": 1.0, "host_bytes_per_s": 1.0, "host_flops_per_s": value}
    file.write_text(json.dumps({"one": kept}))
    assert _remembered_rates("one", file, lambda: found) == found


def test_a_folder_that_cannot_be_written_costs_a_measurement_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    first, second = drawn(), drawn()
    for found in (first, second):
        assert _remembered_rates("one", tmp_path / "file" / "rates.json", lambda found=found: found) == found  # type: ignore[misc]


def test_rates_are_the_work_of_a_measurement_by_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((2.0, 4.0, 8.0))
    monkeypatch.setattr(rates, "_least_s", lambda work: (work(), next(seconds))[1])
    found, nbytes, multiply_adds = rates._measure(torch.device("cpu")), 4 * 2048 * 2048, 64 * 2048 * 2048
    assert found == Rates(nbytes / 2, nbytes / 4, 2 * multiply_adds / 8)


def test_the_fastest_of_three_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 5.0, 10.0, 12.0, 20.0, 23.0))
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert rates._least_s(lambda: None) == 2.0


def test_the_key_names_the_processor_the_threads_and_the_device() -> None:
    cpu, before = torch.device("cpu"), torch.get_num_threads()
    key = _rates_key(cpu)
    assert torch.__version__ in key
    assert key.endswith(", cpu")
    torch.set_num_threads(before + 1)
    try:
        assert _rates_key(cpu) != key
    finally:
        torch.set_num_threads(before)
