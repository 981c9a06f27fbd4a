"""The loads of models by replicas, as the directory shows them. Lives on one event loop."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from cluster.records.load_failures import LoadFailures, named_error
from cluster.registry.watched_directory import WatchedDirectory


class ModelLoads:
    """The replicas that could not load a model, by model and version.

    The directory shows a model as unavailable when no replica is left that may load it. Requests are still tried.
    """

    def __init__(self, directory: WatchedDirectory) -> None:
        self._directory = directory
        self._failures = LoadFailures()
        self._running: frozenset[str] = frozenset()  # the known replicas

    async def report_attach(self, model: str, version: str, replica: str, node: str, error: str | None) -> None:
        """Take in that a replica could not load a version of a model, or could again (None).

        The directory shows the model as unavailable when no replica is left that may. Requests are still tried.
        """
        if error is None:
            self._failures.note_load(model, version, replica)
        else:
            self._failures.note_failure(model, version, replica, time.monotonic(), named_error(replica, node, error))
        self._show(model, version)

    def follow_replicas(self, running: Collection[str]) -> None:
        """Set the running replicas: failures of ended ones no longer count."""
        shown = self._failures.models()
        self._running = frozenset(running)
        self._failures.keep_replicas(running)
        for model, version in shown:
            self._show(model, version)

    def forget_model(self, model: str) -> None:
        """Forget a model that has gone, or gets a new version."""
        self._failures.forget_model(model)

    def _show(self, model: str, version: str) -> None:
        record = self._directory.get(model)
        if not (
            record and record.serves and record.state in ("ready", "unavailable") and record.fingerprint == version
        ):
            return
        error = self._failures.why_unavailable(model, version, self._running)
        if error or record.state == "unavailable":
            shown = replace(record, state="unavailable" if error else "ready", error=error)
            if shown != record:
                self._directory.apply(shown)
