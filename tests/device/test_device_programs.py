"""Stored programs on a device: bit for bit what the host computes (on a simulated one)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.programs import MAX_LENGTH, VOCABULARY, export_bert, tiny_bert
from torch import nn
from torch.export import Dim, ExportedProgram

from deployments.engines.programs.bound import BoundProgram, BoundPrograms
from deployments.engines.programs.rows import jobs_of, run_jobs
from weights.programs.exported import externalize_program
from weights.programs.signature import COMPONENT
from weights.programs.storing import program_tensors
from weights.storage.store import WeightStore


class Counting(nn.Module):
    """Makes a tensor itself, on the device that it was exported on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + torch.arange(x.shape[1], device=x.device)


def bound(store: WeightStore, program: ExportedProgram, device: torch.device) -> list[BoundProgram]:
    """Return the program on the host and on the device."""
    manifest = externalize_program(store, "m", program)
    tensors, graphs = program_tensors(store, "m", None), BoundPrograms()
    places = [tensors, {name: tensor.to(device) for name, tensor in tensors.items()}]
    folder = store.skeleton(manifest)
    return [graphs.bind(manifest.components[COMPONENT], folder, place) for place in places]


def assert_equal(found: torch.Tensor, expected: torch.Tensor, device: torch.device) -> None:
    assert found.device == device
    if device.type == "sim":
        assert torch.equal(found.cpu(), expected)
    else:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("bert", marks=pytest.mark.long), "counting"])
def test_a_program_gives_what_it_gives_on_the_host(tmp_path: Path, device: torch.device, kind: str) -> None:
    if kind == "bert":
        program = export_bert(tiny_bert())
        requests = [{"input_ids": torch.randint(0, VOCABULARY, (2, length))} for length in (7, 8, MAX_LENGTH)]
    else:
        program = torch.export.export(Counting(), (torch.rand(3, 5),), dynamic_shapes=({0: Dim("n", max=9)},))
        requests = [{"x": torch.rand(rows, 5)} for rows in (1, 4)]
    here, there = bound(WeightStore(tmp_path / "store"), program, device)
    assert here.module is not there.module
    expected = run_jobs([job for inputs in requests for job in jobs_of(here, inputs)])
    found = run_jobs([job for inputs in requests for job in jobs_of(there, inputs)])
    for ours, theirs in zip(found, expected, strict=True):
        for name, tensor in ours.items():
            assert_equal(tensor, theirs[name], device)
