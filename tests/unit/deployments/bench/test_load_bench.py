"""Turns of the loaders of `atelier bench load`, and the files that each reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.seeding import seeded_rng
from safetensors.torch import save_file

from infra.bench.command import load_peers
from infra.bench.command.load import MODES, _copy_for, _draw_orders, _Loaded, _read_raw, _take_turns

NAMES = ["raw", "ours", "other", "third"]


def test_each_round_has_everybody_once_in_an_order_of_its_own() -> None:
    orders = _draw_orders(NAMES, 12, seed=4)
    assert set(orders) == set(MODES)
    rounds = [order for mode in MODES for order in orders[mode]]
    assert len(rounds) == 24
    assert all(sorted(order) == sorted(NAMES) for order in rounds)
    assert len({tuple(order) for order in rounds}) > 6
    assert orders == _draw_orders(NAMES, 12, seed=4) != _draw_orders(NAMES, 12, seed=5)


def test_each_round_is_told_when_it_ends() -> None:
    told: list[str] = []

    class Bench:
        def loaders(self) -> dict[str, Any]:
            return {"ours": lambda mode: self.load("ours", mode), "other": lambda mode: self.load("other", mode)}

        def load(self, name: str, mode: str) -> _Loaded:
            told.append(f"{name} {mode}")
            return _Loaded(2.0 if name == "ours" else 0.5, 10**9, 0, "")

    orders = {mode: [["ours", "other"], ["other", "ours"]] for mode in MODES}
    _take_turns(Bench(), orders, None, told.append)  # type: ignore[arg-type]
    for mode in MODES:
        assert told[told.index(f"ours {mode}") + 2] == f"round 1 of 2, {mode}, GB/s: ours 0.50, other 2.00"
    assert told[-1] == f"round 2 of 2, {MODES[-1]}, GB/s: ours 0.50, other 2.00"


@pytest.mark.parametrize("name", [name for name in load_peers.LOADERS if name != "diffusers"])
def test_each_peer_loads_the_same_tensors_from_files_of_its_own(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = {"a": torch.randn(17, 3), "b": torch.arange(50, dtype=torch.int16)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    folder = _copy_for(name, source, tmp_path)
    files = load_peers._weight_files(name, folder)
    assert not any(os.path.samefile(file, source / "model.safetensors") for file in files)
    (source / "model.safetensors").unlink()
    assert load_peers.digest(load_peers.LOADERS[name](files)) == load_peers.digest(tensors)


@pytest.mark.parametrize("nbytes", [4096, 3 * 4096 + 5, 10 * 4096])
def test_the_raw_disk_is_read_whole(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "file").write_bytes(seeded_rng().bytes(nbytes))
    assert _read_raw([tmp_path / "file"], 3, 4096).nbytes == nbytes
