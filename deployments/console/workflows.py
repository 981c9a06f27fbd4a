"""A client of ComfyUI's routes, as a cluster answers them: send a workflow, wait for it, fetch its files."""

from __future__ import annotations

import json
import mimetypes
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from deployments.console.client import Client, ClientError

_PAUSE_S: Final = 0.3  # from one look at the history to the next
_SHOWN_ERRORS: Final = 20
_MAX_BYTES: Final = 2**26  # of a file


def read_document(file: Path) -> Any:
    """Return the content of a workflow's file. Raises ClientError."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ClientError(f"{file} has more than {_MAX_BYTES >> 20} MiB: no workflow is as large")
        return json.loads(file.read_bytes())
    except OSError as error:
        raise ClientError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ClientError(f"{file} is no JSON: {error}") from None


class WorkflowClient(Client):
    """A client that runs workflows. Methods raise ClientError."""

    def begin(self, prompt: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Send a workflow in the API's form; return its id, and what is wrong with outputs that do not run."""
        try:
            response = self._http.post("/prompt", json={"prompt": prompt, "extra_data": extra})
        except (httpx.HTTPError, ValueError) as error:
            raise self._unreachable(error) from error
        answer = _object(response)
        faults = list(node_faults(answer.get("node_errors"), prompt))
        if not response.is_success or "prompt_id" not in answer:
            raise ClientError("\n".join([_message_of(response, answer), *faults[:_SHOWN_ERRORS]]))
        return str(answer["prompt_id"]), faults

    def ended(self, prompt_id: str) -> dict[str, Any]:
        """Wait until a workflow has ended, and return what its nodes show, by their ids."""
        path = f"/history/{quote(prompt_id, safe='')}"
        while prompt_id not in (found := self._checked_object(path)):
            time.sleep(_PAUSE_S)
        entry = found[prompt_id]
        status = entry.get("status", {})
        if status.get("status_str") != "success":
            raise ClientError(_failure(status))
        return dict(entry.get("outputs", {}))

    def interrupt(self, prompt_id: str) -> None:
        """End a workflow that runs."""
        self._http.post("/interrupt", json={"prompt_id": prompt_id})

    def file(self, saved: Mapping[str, str]) -> bytes:
        """Return a file that a node has saved."""
        wanted = {name: saved.get(name, "") for name in ("filename", "subfolder", "type")}
        try:
            response = self._http.get("/view", params=wanted)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise ClientError(_message_of(response, _object(response)))
        return response.content

    def upload(self, path: Path) -> str:
        """Upload an image, and return the name that LoadImage knows it by."""
        media = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        try:
            response = self._http.post("/upload/image", files={"image": (path.name, path.read_bytes(), media)})
        except OSError as error:
            raise ClientError(f"{path}: {error.strerror}") from None
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        answer = _object(response)
        if not response.is_success or "name" not in answer:
            raise ClientError(_message_of(response, answer))
        folder = answer.get("subfolder")
        return f"{folder}/{answer['name']}" if folder else str(answer["name"])

    def _checked_object(self, path: str) -> dict[str, Any]:
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise ClientError(_message_of(response, _object(response)))
        return _object(response)


def node_faults(errors: Any, prompt: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each fault of a node in an answer."""
    for node, found in errors.items() if isinstance(errors, Mapping) else ():
        title = prompt.get(node, {}).get("_meta", {}).get("title", "")
        kind = found.get("class_type", "")
        shown = kind if title in ("", kind) else f"{title} ({kind})"
        for error in found.get("errors", ()):
            details = f": {error['details']}" if error.get("details") else ""
            yield f"node {node}, {shown}: {error.get('message', '')}{details}"


def _failure(status: Mapping[str, Any]) -> str:
    for event, data in status.get("messages", ()):
        if event == "execution_error":
            node = f"node {data['node_id']}, {data.get('node_type', '')}: " if data.get("node_id") else ""
            return node + str(data.get("exception_message") or "the workflow failed")
        if event == "execution_interrupted":
            return "the workflow was interrupted"
    return "the workflow failed"


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _message_of(response: httpx.Response, answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    if isinstance(error, Mapping) and error.get("message"):
        return str(error["message"])
    return f"{response.request.url} answered {response.status_code}: {response.text[:200]}"
