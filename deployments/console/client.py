"""A small HTTP client of a running cluster, for the command line and the demo. Light: no Ray, no torch."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

import httpx
import typer

REQUEST_TIMEOUT_S: Final = 600.0
DEFAULT_URL: Final = "http://127.0.0.1:8000"

KEY_VARIABLE: Final = "ATELIER_API_KEY"

Url = Annotated[str | None, typer.Option(help="Where the cluster listens; default: the one that is up.")]
Key = Annotated[
    str | None, typer.Option(help=f"API key; default: ${KEY_VARIABLE}, which the list of processes does not show.")
]


class ClientError(Exception):
    """The cluster does not answer, or answers with an error; the message is the server's."""


@dataclass(frozen=True, slots=True)
class Images:
    """Image files in the requested format, and the rest of the server's answer."""

    files: list[bytes]
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """The tokens of a chat and of its answer. `is_cut`: the limit ended the answer.

    `generate_s` is the server's time for all tokens but the first, if it reports one.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    is_cut: bool
    generate_s: float | None


class Client:
    """The API of the cluster at `url`. All methods raise ClientError. `key` is by default $ATELIER_API_KEY, if set."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        key = key or os.environ.get(KEY_VARIABLE)
        if key and not re.fullmatch(r"[!-~]+", key):  # not shown: it may be a key all the same
            raise ClientError("the API key has characters that no key has (a line break, a space?)")
        headers = {"authorization": f"Bearer {key}"} if key else None
        try:
            # The cluster's address is asked directly: proxies of the environment are for the world outside. Its
            # certificates (SSL_CERT_FILE) hold here, too.
            self._http = httpx.Client(
                base_url=self.url,
                timeout=REQUEST_TIMEOUT_S,
                headers=headers,
                trust_env=False,
                verify=httpx.create_ssl_context(),
            )
        except httpx.InvalidURL as error:
            raise ClientError(f"{url!r} is no URL: {error}") from None

    def models(self) -> list[dict[str, Any]]:
        """Return the models and adapters that the cluster serves."""
        return self._checked("GET", "/v1/models?all=true", "data")["data"]

    def cluster(self) -> dict[str, Any]:
        """Return the state of nodes, replicas and models, as `/admin/cluster` shows it."""
        return self._checked("GET", "/admin/cluster", "cluster")

    def ended_requests(self, number: int | None = None) -> dict[str, Any]:
        """Return ended requests from a number on, and the next number; without a number, only that."""
        return self._checked(
            "GET", "/admin/requests", "next_number", params={} if number is None else {"after": number}
        )

    def register(self, entry: dict[str, Any], *, wait: bool = True) -> dict[str, Any]:
        """Return the model as it is listed. `entry` has the fields of a model or adapter in a cluster config."""
        return self._checked("POST", "/admin/models", "id", json=entry, params={"wait": wait})

    def register_workflow(self, body: dict[str, Any]) -> dict[str, Any]:
        """Serve a workflow as a pipeline. `body` has its id, its document and a description."""
        return self._checked("POST", "/admin/workflows", "id", json=body)

    def import_progress(self, model: str) -> tuple[int, int] | None:
        """Return the imported bytes of a model and their total; None if no import runs, or it is unknown."""
        with contextlib.suppress(ClientError, KeyError, TypeError):
            for one in self._checked("GET", "/admin/imports", "imports")["imports"]:
                if one["id"] == model:
                    return int(one["done_bytes"]), int(one["total_bytes"])
        return None

    def unregister(self, model: str, *, purge: bool = False) -> dict[str, Any]:
        """Stop serving a model; `purge` removes it from the store, too."""
        return self._checked("DELETE", f"/admin/models/{quote(model, safe='')}", "deleted", params={"purge": purge})

    def prefetch(self, model: str, tier: str) -> dict[str, Any]:
        """Load a model into memory ahead of its requests."""
        return self._checked("POST", f"/admin/models/{quote(model, safe='')}/prefetch", "nodes", json={"tier": tier})

    def pin(self, model: str, *, pinned: bool = True) -> dict[str, Any]:
        """Keep a model in memory where it is resident, or with `pinned` False let it be evicted again."""
        return self._checked("POST" if pinned else "DELETE", f"/admin/models/{quote(model, safe='')}/pin", "nodes")

    def pin_to(self, worker: str, model: str, *, pinned: bool = True) -> dict[str, Any]:
        """Pin a model to a worker, or end that. Return the orders in force."""
        return self.override(f"models/{quote(model, safe='')}/pin", worker, is_on=pinned)

    def override(self, what: str, worker: str | None, *, is_on: bool) -> dict[str, Any]:
        """Set or end an order: `freeze`, of one worker or of all, or `drain`. Return the orders in force."""
        where = f"workers/{quote(worker, safe='')}/{what}" if worker else what
        return self._checked("POST" if is_on else "DELETE", f"/admin/{where}", "pins")

    def decisions(self, count: int) -> dict[str, Any]:
        """Return the controller's last decisions, as `/admin/decisions` shows them."""
        return self._checked("GET", "/admin/decisions", "decisions", params={"max_decisions": count})

    def generate(self, **body: Any) -> Images:
        """Return images; `body` is that of `/v1/images/generations`."""
        details = self._post("/v1/images/generations", "data", body)
        return Images([base64.b64decode(item.pop("b64_json")) for item in details["data"]], details)

    def embed(self, **body: Any) -> dict[str, Any]:
        """Return embeddings; `body` is that of `/v1/embeddings`."""
        return self._post("/v1/embeddings", "data", body)

    def chat(self, **body: Any) -> dict[str, Any]:
        """Return a chat completion; `body` is that of `/v1/chat/completions`."""
        return self._post("/v1/chat/completions", "choices", body)

    def chat_stream(self, **body: Any) -> Iterator[str | ChatUsage]:
        """Yield the pieces of the answer, and its token counts at the end."""
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=asked) as response:
                if response.status_code != 200:
                    response.read()
                    raise ClientError(_message(response))
                is_cut, generate_s = False, None
                for line in response.iter_lines():
                    event = _event(line)
                    for choice in event.get("choices", ()):
                        is_cut = is_cut or choice.get("finish_reason") == "length"
                        if text := choice["delta"].get("content"):
                            yield text
                    if (generate_ms := event.get("timings_ms", {}).get("generate")) is not None:
                        generate_s = generate_ms / 1e3
                    if usage := event.get("usage"):
                        yield ChatUsage(usage["prompt_tokens"], usage["completion_tokens"], is_cut, generate_s)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _post(self, path: str, expected: str, body: dict[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in body.items() if value is not None}
        return self._checked("POST", path, expected, json=given)

    def _checked(self, method: str, path: str, expected: str, **options: Any) -> dict[str, Any]:
        """Return the answer, a JSON object with the field `expected`."""
        try:
            request = self._http.build_request(method, path, **options)
        except ValueError as error:  # a number that JSON has no word for
            raise ClientError(f"the request cannot be sent: {error}") from None
        try:
            response = self._http.send(request)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise ClientError(_message(response))
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or expected not in answer:
            raise ClientError(f"{request.url} did not answer as a cluster does: {response.text[:200]}")
        return answer

    def _unreachable(self, error: Exception) -> ClientError:
        return ClientError(
            f"no answer from {self.url}: {error}. `atelier up CONFIG` starts a cluster here, --url names one elsewhere"
        )


def find_client(url: str | None, key: str | None = None) -> Client:
    """Return a client of the cluster at `url`, or of the first one that is up on this machine."""
    from cluster.start.session_records import record_folder, running_sessions

    if url is None:
        sessions = running_sessions(record_folder())
        url = sessions[0].url if sessions else DEFAULT_URL
    return Client(url, key)


def _event(line: str) -> dict[str, Any]:
    """Return the event that a line of a stream has; an empty one for other lines. Raises ClientError for an error."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return {}
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ClientError(event["error"]["message"])
    return event


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered {response.status_code}: {response.text[:200]}"
