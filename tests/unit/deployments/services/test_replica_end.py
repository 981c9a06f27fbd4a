"""A replica ends at once, with its reason in the log and its own status."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from deployments.replicas.replica_end import ReplicaEnd


def test_a_replica_says_why_it_ends_and_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "_exit", calls.append)
    monkeypatch.setattr(logging, "shutdown", lambda: calls.append("logs are written"))
    ReplicaEnd().now("rank 2 is lost")
    assert calls == ["logs are written", 70]
    assert "the replica ends: rank 2 is lost" in caplog.text
