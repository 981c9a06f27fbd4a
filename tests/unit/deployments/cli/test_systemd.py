"""Messages to a service manager: a socket stands in its place."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deployments.cli.cluster import tell_systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_a_state_comes_as_one_message(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@{tmp_path.name}-{tmp_path.parent.name}" if abstract else str(tmp_path / "s")
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1) if abstract else name)
        manager.settimeout(10)
        tell_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "nonsense", "/there/is/none"])
def test_without_a_manager_nothing_happens(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    tell_systemd("READY=1")
