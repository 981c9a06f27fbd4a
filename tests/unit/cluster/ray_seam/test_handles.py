"""Watchers of a deployment's replicas: they hear of those that run already, and of changes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

from cluster.ray_seam import handles


def test_watchers_hear_of_the_replicas_that_run_and_of_changes_of_their_deployment_alone() -> None:
    key, other = ("app of this test", "worker"), ("app of this test", "text_encoder")
    early, late = Mock(), Mock()
    handle = SimpleNamespace(app_name=key[0], deployment_name=key[1], options=Mock())
    handles.watch_replicas(handle, early)
    early.assert_not_called()  # nothing is known yet
    handle.options.assert_called_once_with()  # which makes the router that tells
    handles.tell(key, frozenset({"a"}))
    handles.tell(other, frozenset({"x"}))
    handles.watch_replicas(handle, late)
    handles.tell(key, frozenset({"a", "b"}))
    assert [call.args for call in early.call_args_list] == [(frozenset("a"),), (frozenset("ab"),)]
    assert late.call_args_list == early.call_args_list
