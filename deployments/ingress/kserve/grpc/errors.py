"""From errors to gRPC status codes, by way of the one table that HTTP has: `deployments/ingress/errors.py`."""

from __future__ import annotations

import logging
from typing import Final

from grpc import StatusCode

from deployments.errors import ServiceError
from deployments.ingress.errors import TABLE, unwrap

logger = logging.getLogger("atelier.ingress")

MAX_DETAIL_CHARS: Final = 2_000  # details travel in a header, and clients take 8 KiB of headers by default
# Where Triton has a code for the case, it is this one.
CODES: Final[dict[int, StatusCode]] = {
    400: StatusCode.INVALID_ARGUMENT,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.FAILED_PRECONDITION,
    413: StatusCode.INVALID_ARGUMENT,  # RESOURCE_EXHAUSTED would ask to be tried again
    422: StatusCode.FAILED_PRECONDITION,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


def status_of(error: Exception) -> tuple[StatusCode, str]:
    """Code and text for the client. What the table does not know is INTERNAL, and its details go to the log only."""
    error = unwrap(error)
    for class_, status, _, _ in TABLE:
        if isinstance(error, class_):
            lost = "the replica that worked on this request is gone; try again"
            return CODES[status], _short(str(error) if isinstance(error, ServiceError) else lost)
    logger.error("unexpected error", exc_info=error)
    return StatusCode.INTERNAL, "internal error; the server's log has the details"


def _short(text: str) -> str:
    return text if len(text) <= MAX_DETAIL_CHARS else text[: MAX_DETAIL_CHARS - 3] + "..."
