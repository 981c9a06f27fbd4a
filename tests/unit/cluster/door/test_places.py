"""Ports that can be bound."""

from __future__ import annotations

import socket

from cluster.door.places import why_taken


def test_a_port_is_taken_while_somebody_listens_and_free_behind_an_ended_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in why_taken("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            answering, _ = server.accept()
            answering.close()  # the server's end goes first, and its port rests
            assert client.recv(1) == b""
    assert why_taken("127.0.0.1", port) == ""
