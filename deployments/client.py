"""A small HTTP client of a running cluster, for the command line and the demo. Light: no Ray, no torch."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_TIMEOUT_S = 600.0


class ClientError(Exception):
    """The cluster did not answer, or answered with an error; the message is what the server said."""


@dataclass(frozen=True, slots=True)
class Images:
    """Files of the format asked for, and everything else that the server said."""

    files: list[bytes]
    details: dict[str, Any]


class Client:
    """Talks to one cluster at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S)

    def models(self) -> list[dict[str, Any]]:
        return self._get("/v1/models")["data"]

    def cluster(self) -> dict[str, Any]:
        return self._get("/admin/cluster")

    def generate(self, **body: Any) -> Images:
        details = self._post("/v1/images/generations", body)
        return Images([base64.b64decode(item.pop("b64_json")) for item in details["data"]], details)

    def embed(self, **body: Any) -> dict[str, Any]:
        return self._post("/v1/embeddings", body)

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._post("/v1/chat/completions", body)

    def chat_stream(self, **body: Any) -> Iterator[str]:
        """Pieces of the answer."""
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise ClientError(_message(response))
                for line in response.iter_lines():
                    yield from _pieces(line)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _get(self, path: str) -> dict[str, Any]:
        return self._checked("GET", path)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._checked("POST", path, json={key: value for key, value in body.items() if value is not None})

    def _checked(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise ClientError(_message(response))
        return response.json()

    def _unreachable(self, error: Exception) -> ClientError:
        return ClientError(f"no answer from {self.url}: {error}. Is the cluster up? (`atelier status`)")


def _pieces(line: str) -> Iterator[str]:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ClientError(event["error"]["message"])
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            yield text


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} answered {response.status_code}: {response.text[:200]}"
