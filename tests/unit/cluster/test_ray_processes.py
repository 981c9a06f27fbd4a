"""A private Ray starts without processes that one node has no use for."""

from __future__ import annotations

import pytest
from ray._private.node import Node

from cluster.session import _UNNEEDED, _without_unneeded_processes


def test_they_are_left_out_in_the_block_only() -> None:
    """This Ray has these methods, and they are back when the block ends, by an error as well."""
    before = {name: Node.__dict__[name] for name in _UNNEEDED}
    with _without_unneeded_processes():
        assert all(getattr(Node, name)(object()) is None for name in _UNNEEDED)
    assert {name: Node.__dict__[name] for name in _UNNEEDED} == before
    with pytest.raises(ZeroDivisionError), _without_unneeded_processes():
        _ = 1 / 0
    assert {name: Node.__dict__[name] for name in _UNNEEDED} == before
