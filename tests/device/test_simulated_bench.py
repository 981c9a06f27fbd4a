"""The counts of `atelier bench switch` on the simulated link, beside sums over the manifests."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from kit.hosting import DEMO

from infra.bench.command.switch_simulated import FLUX, LINKS_GBPS, SWITCHES, TUNED, WAYS, _Pipelines, simulated_tables


def test_bytes_of_a_switch_are_those_that_differ(device: torch.device, module: Any, tmp_path: Path) -> None:
    link = module.memory_of(device)

    def moved_bytes(work: Callable[[], Any]) -> int:
        link.reset_link()
        work()
        return int(link.uploaded_bytes + link.downloaded_bytes)

    pipelines = _Pipelines(DEMO, tmp_path)
    first, second = (
        {
            ref.sha256: ref.nbytes
            for own in pipelines._manifests[name].components.values()
            for ref in own.tensors.values()
        }
        for name in (FLUX, TUNED)
    )
    different_bytes = sum(nbytes for hash_, nbytes in second.items() if hash_ not in first)
    assert pipelines.switch(FLUX, TUNED, moved_bytes) == different_bytes > 0
    assert moved_bytes(lambda: pipelines.upload(TUNED)) >= sum(second.values())
    gc.collect()


def test_the_table_has_a_row_for_every_way_and_its_seconds() -> None:
    counts = {name: dict.fromkeys(WAYS, 10**9) for name in SWITCHES}
    switches, overhead = simulated_tables({"switches": counts, "op_us": {"add": {"cpu": 1.0, "sim": 20.0}}})
    assert switches.row_count == len(WAYS) * len(SWITCHES)
    for gbps, column in zip(LINKS_GBPS, switches.columns[3:], strict=True):
        assert [float(cell) for cell in column._cells] == pytest.approx([1000 / gbps] * switches.row_count, abs=1e-3)
    assert overhead.row_count == 1
