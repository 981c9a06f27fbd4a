"""Workspaces in the books of a replica: pieces of which several models' largest counts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.modules.parts import distinct_bytes, workspace_pieces

SIZES = st.integers(0, 2**36)


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES)
def test_of_two_the_larger_counts(one: int, other: int) -> None:
    both = distinct_bytes(workspace_pieces(one), workspace_pieces(other))
    assert both == distinct_bytes(workspace_pieces(max(one, other)))
    assert max(one, other) <= both <= max(one, other) * 9 / 8 + 2**16
    assert len(workspace_pieces(one)) < 300
