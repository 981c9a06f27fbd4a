"""The log lines of a cluster's processes: in which form, how much of it, and no prompts.

Replicas write into Serve's files, the control plane's actors to their standard error, which Ray keeps. Serve's access
log is bounded: a line for each request and each call would be gigabytes a day. Messages of exceptions repeat what a
library was given, a prompt say, and then in quotes: that is left out.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Final

from configs.cluster import LogFormat

_LINES_PER_S: Final = 10.0
_BURST: Final = 100.0  # lines
_SERVE: Final = "ray.serve"
_TEXT: Final = "%(levelname)s %(asctime)s %(name)s -- %(message)s"
_QUOTES: Final = "'\"`"
_LEFT_OUT: Final = "'...'"
_MAX_MESSAGE: Final = 500  # characters of an exception's message
_MAX_CHAIN: Final = 10  # exceptions that led to each other


def configure_logs(form: LogFormat) -> None:
    """Let this process, a replica, a proxy or an actor, write its logs so. A second time does nothing."""
    bound_access_log()
    root = logging.getLogger()
    if any(isinstance(known, _OwnLines | _IntoServesFile) for known in root.handlers):
        return
    serve = logging.getLogger(_SERVE)
    is_replica = any(isinstance(known, logging.handlers.MemoryHandler) for known in serve.handlers)
    root.addHandler(_IntoServesFile(serve) if is_replica else _OwnLines(form))


def serve_logging(form: LogFormat) -> dict[str, Any]:
    """Return the options of Serve for its own logs: nothing where they are text."""
    return {"logging_config": {"encoding": "JSON"}} if form == "json" else {}


def bound_access_log() -> None:
    """Bound the access log of this process, and keep prompts out of it. A second time does nothing."""
    logger = logging.getLogger(_SERVE)
    if not any(isinstance(known, _AccessLogFilter) for known in logger.filters):
        logger.addFilter(_AccessLogFilter())
        logger.addFilter(_without_texts)


class _AccessLogFilter(logging.Filter):
    """Lets lines about requests pass up to a rate; the next line that passes says how many did not."""

    def __init__(self) -> None:
        super().__init__()
        self._seen_s = 0.0
        self._lines = _BURST
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if not getattr(record, "serve_access_log", False):
            return True
        passed_s = max(0.0, record.created - self._seen_s)  # the wall clock may have been set back
        self._lines = min(_BURST, self._lines + passed_s * _LINES_PER_S)
        self._seen_s = record.created
        if self._lines < 1:
            self._num_left_out += 1
            return False
        self._lines -= 1
        if self._num_left_out:
            record.msg, record.args = f"{record.getMessage()} (after {self._num_left_out} that are left out)", ()
            self._num_left_out = 0
        return True


def _without_texts(record: logging.LogRecord) -> bool:
    """Write the exception of a record without what its messages have in quotes; the record is always written."""
    if record.exc_info and isinstance(error := record.exc_info[1], BaseException):
        record.exc_text = "\n".join(_traceback_lines(error))  # where there is one, formatters take it
    return True


def _traceback_lines(error: BaseException) -> Iterator[str]:
    """Yield the lines of a traceback, of what led to the exception first."""
    chain = [error]
    while len(chain) < _MAX_CHAIN:
        last = chain[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or before in chain:
            break
        chain.append(before)
    for one in reversed(chain):
        yield "Traceback (most recent call last):"
        yield "".join(traceback.format_tb(one.__traceback__)).rstrip("\n")
        yield f"{type(one).__module__}.{type(one).__qualname__}: {_unquoted(str(one))}"


def _unquoted(message: str) -> str:
    """Return a message without what lies between its first quote and its last: an apostrophe may be either."""
    places = [place for place, character in enumerate(message) if character in _QUOTES]
    if places:
        end = places[-1] + 1 if len(places) > 1 else len(message)
        message = message[: places[0]] + _LEFT_OUT + message[end:]
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."


class _IntoServesFile(logging.Handler):
    """Gives records to Serve's logger, whose file has the id of the request with each."""

    def __init__(self, serve: logging.Logger) -> None:
        super().__init__()
        self._serve = serve

    def emit(self, record: logging.LogRecord) -> None:
        """Hand the record on, to Serve's own handlers alone: what it propagates would come here again."""
        if not record.name.startswith(_SERVE) and self._serve.filter(record):
            for handler in self._serve.handlers:
                handler.handle(record)


class _OwnLines(logging.Handler):
    """Writes records to what is the standard error then."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self.addFilter(_without_texts)
        self.setFormatter(_JsonLines() if form == "json" else logging.Formatter(_TEXT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        sys.stderr.write(f"{self.format(record)}\n")


class _JsonLines(logging.Formatter):
    """A JSON object a line, with the names that Serve's own lines have."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "filename": record.filename,
            "lineno": record.lineno,
            "process": record.process,
        }
        return json.dumps(line | ({"exc_text": record.exc_text} if record.exc_text else {}))
