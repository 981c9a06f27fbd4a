"""Values that go to other ranks as JSON and tensors."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deployments.engines.ranks.packing import NotPlain, packed, unpacked


@dataclass(frozen=True)
class Pair:
    up: torch.Tensor
    rest: Any = None


KINDS = {"Pair": Pair}


def drawn(depth: int) -> Any:
    """A value of every kind; lists and tuples, empty ones too, are told apart."""
    plain = [None, True, random.random(), random.randrange(-9, 9), "tensor", torch.rand(2)]
    if not depth or random.random() < 0.2:
        return random.choice(plain)
    parts = [drawn(depth - 1) for _ in range(random.randrange(4))]
    return random.choice([parts, tuple(parts), dict(zip("abc", parts, strict=False)), Pair(torch.rand(3), parts)])


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Pair):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_values_come_back_from_json_and_tensors() -> None:
    for _ in range(100):
        value, tensors = drawn(4), [torch.zeros(1)]
        form = json.loads(json.dumps(packed(value, tensors, KINDS)))
        assert same(unpacked(form, tensors, KINDS), value)
        assert not tensors[0].any()  # those that were there stay in their places


@pytest.mark.parametrize("value", [object(), [{1: "a name that is none"}], {"a": b"bytes"}, Pair(torch.rand(1))])
def test_what_is_neither_plain_nor_of_a_known_kind_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        packed(value, [])
