"""The benchmark of deltas: what it makes of a pair of models keeps what makes them a pair."""

from __future__ import annotations

import torch

from infra.bench.deltas import _repeated, _to_int8


def test_a_larger_pair_differs_as_the_given_one() -> None:
    base = {"w": torch.randn(20, 30), "b": torch.randn(7)}
    tuned = {name: torch.where(torch.rand(tensor.shape) < 0.3, 0.0, tensor) for name, tensor in reversed(base.items())}
    large = [_repeated(tensors, 10 * 4 * 607) for tensors in (base, tuned)]
    assert [found["w"].shape for found in large] == [(200, 30)] * 2
    assert [found["b"].shape for found in large] == [(70,)] * 2
    for name in base:
        num_equal = int((base[name] == tuned[name]).sum())
        assert int((large[0][name] == large[1][name]).sum()) == 10 * num_equal


def test_int8_is_near_what_was_given() -> None:
    given = {"w": torch.randn(8, 64), "norm": torch.randn(64)}
    stored = _to_int8(given)
    assert stored["w"].dtype == torch.int8
    found = stored["w"].float() * stored["w_scale"][:, None]
    assert torch.all((found - given["w"]).abs() <= 0.51 * stored["w_scale"][:, None])
