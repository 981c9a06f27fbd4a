"""Secrets of webhooks, at both ends of their length."""

from __future__ import annotations

import base64

import pytest

from deployments.ingress.jobs.signing import secret_bytes


@pytest.mark.parametrize(("num_bytes", "is_secret"), [(23, False), (24, True), (64, True), (65, False)])
def test_a_secret_has_24_to_64_bytes(num_bytes: int, is_secret: bool) -> None:
    content = bytes(range(num_bytes))
    secret = f"whsec_{base64.b64encode(content).decode()}"
    if is_secret:
        assert secret_bytes(secret) == content
    else:
        with pytest.raises(ValueError, match="base64 of 24 to 64 bytes"):
            secret_bytes(secret)
    with pytest.raises(ValueError, match="expected whsec_"):
        secret_bytes(secret.removeprefix("whsec_"))
