"""Streams of replicas that tests read piece by piece."""

from __future__ import annotations

from typing import Any

from deployments.replicas.output_channel import OutputChannel


def stream_pieces(calls: Any, method: str, *arguments: Any, **options: Any) -> OutputChannel[Any]:
    """Return the pieces of a generator method, through ReplicaCalls or RetriedCalls."""

    async def receive(pieces: OutputChannel[Any]) -> None:
        await calls.receive_stream(method, *arguments, on_piece=pieces.send, **options)

    return OutputChannel(receive)
