"""The signatures of webhooks, as Standard Webhooks says. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac

from cluster.jobs.records import Webhook
from deployments.records.errors import InvalidRequest


def signed_headers(webhook: Webhook, id_: str, timestamp_s: int, payload: bytes) -> dict[str, str]:
    """Return the headers that Standard Webhooks asks for: the HMAC of id, time and payload by the secret."""
    signed = f"{id_}.{timestamp_s}.".encode() + payload
    digest = hmac.new(secret_bytes(webhook.secret), signed, hashlib.sha256).digest()
    return {
        "content-type": "application/json",
        "user-agent": "atelier",
        "webhook-id": id_,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def secret_bytes(secret: str) -> bytes:
    """Return the bytes of a secret, which is base64 behind `whsec_`. Raises ValueError."""
    found = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    if not secret.startswith("whsec_") or not 24 <= len(found) <= 64:
        raise ValueError("expected whsec_ and base64 of 24 to 64 bytes")
    return found


def checked_secret(secret: str | None, field: str) -> str:
    """Return a client's secret. Raises InvalidRequest."""
    try:
        secret_bytes(secret or "")
    except ValueError as error:
        raise InvalidRequest(f"{field}: the secret that signs webhooks: {error}", field) from None
    return secret or ""
