"""One run of a prompt: what its client is told on the way, and the history that is left of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deployments.ingress.comfy.bodies import PromptBody
from deployments.ingress.comfy.prompts import error_facts
from deployments.ingress.comfy.watching import Watches
from deployments.ingress.messages.running_job import RunningJob
from deployments.workflows.records import NodeError, Workflow

_MOST_PERCENT: Final = 99  # the rest is the answer
_MAX_STATES: Final = 64  # nodes whose state is told with that of the current one
_PREVIEW_METHODS: Final = ("auto", "latent2rgb", "taesd")


class PromptRun:
    """The events of one run, as `deployments.workflows.backend.Events`; `messages` are those that history keeps."""

    def __init__(self, body: PromptBody, key: str, workflow: Workflow, watches: Watches, job: RunningJob) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self._prompt_id = body.prompt_id or job.id
        self._client = body.client_id or None
        self._has_previews = body.extra_data.get("preview_method") in _PREVIEW_METHODS
        self._key = key
        self._workflow = workflow
        self._watches = watches
        self._job = job
        self._done: list[str] = []
        self._states: dict[str, dict[str, Any]] = {}

    @property
    def wants_previews(self) -> bool:
        """Return whether its client listens, and wants to see previews."""
        listening = self._watches.sockets.of(self._key, self._client)
        return any(self._has_previews or socket.takes_facts for socket in listening)

    def begin(self) -> None:
        """Say that it has begun."""
        is_first = self._watches.told.get(self._job.id) is None
        self._watches.told.note(self._job.id, False)
        self._note("execution_start", {}, is_sent=is_first)
        self._note("execution_cached", {"nodes": []}, is_sent=is_first)

    def executing(self, node: str) -> None:
        self._send("executing", {"node": node, "display_node": node})
        self._show_state(node, 0, 1, "running")
        self._note_progress(0.0)

    def progress(self, node: str, value: int, max: int, preview: npt.NDArray[np.uint8] | None) -> None:
        self._send("progress", {"value": value, "max": max, "node": node})
        self._show_state(node, value, max, "running")
        self._note_progress(value / max if max else 0.0)
        if preview is not None and self.wants_previews:
            facts = {**_facts_of(node), "display_node_id": node, "prompt_id": self._prompt_id}
            self._watches.sockets.show(self._key, self._client, preview, facts, to_all=self._has_previews)

    def executed(self, node: str, output: Mapping[str, Any] | None) -> None:
        self._done.append(node)
        self._show_state(node, 1, 1, "finished")
        if output is not None:
            self._send("executed", {"node": node, "display_node": node, "output": output})

    def succeed(self, shown: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Say that it is done, and return its history."""
        self._end("execution_success", {})
        return self._history(shown, is_good=True)

    def fail(self, error: NodeError) -> dict[str, Any]:
        """Say that a node failed, and return the history."""
        self._end("execution_error", error_facts(str(error), error.type, error.node, error.kind, self._done))
        return self._history({}, is_good=False)

    def interrupt(self) -> None:
        """Say that it was not wanted any more."""
        self._end("execution_interrupted", {"node_id": "", "node_type": "", "executed": self._done})

    def _end(self, type_: str, data: Mapping[str, Any]) -> None:
        self._note(type_, data)
        self._watches.told.note(self._job.id, True)

    def _note(self, type_: str, data: Mapping[str, Any], *, is_sent: bool = True) -> None:
        said = {**data, "prompt_id": self._prompt_id, "timestamp": int(time.time() * 1000)}
        self.messages.append((type_, said))
        if is_sent:
            self._send(type_, said)

    def _history(self, shown: Mapping[str, Mapping[str, Any]], *, is_good: bool) -> dict[str, Any]:
        facts = {node: {**_facts_of(node), "display_node": node, "parent_node": None} for node in shown}
        status = {"status_str": "success" if is_good else "error", "completed": is_good, "messages": self.messages}
        return {"outputs": shown, "status": status, "meta": facts}

    def _show_state(self, node: str, value: int, most: int, state: str) -> None:
        """Tell the state of the node, with that of the nodes before it."""
        facts = {**_facts_of(node), "display_node_id": node, "parent_node_id": None, "prompt_id": self._prompt_id}
        self._states[node] = {"value": value, "max": most, "state": state, **facts}
        if len(self._states) > _MAX_STATES:
            del self._states[next(iter(self._states))]
        self._send("progress_state", {"nodes": self._states})

    def _note_progress(self, part: float) -> None:
        """Take in the part of the current node that is done."""
        percent = int(100 * (len(self._done) + part) / max(1, len(self._workflow.nodes)))
        self._job.progress = min(_MOST_PERCENT, percent)
        self._job.changed.set()

    def _send(self, type_: str, data: Mapping[str, Any]) -> None:
        self._watches.sockets.send(self._key, self._client, type_, {**data, "prompt_id": self._prompt_id})


def _facts_of(node: str) -> dict[str, Any]:
    return {"node_id": node, "real_node_id": node}
