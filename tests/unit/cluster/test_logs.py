"""Logs: a rate of lines of access, the number of those that are missing, JSON, and no prompts in exceptions."""

from __future__ import annotations

import json
import logging
import logging.handlers
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from cluster.process.logs import _AccessLogFilter, _without_texts, bound_access_log, configure_logs


class Lines(logging.Handler):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("per_s", [5, 720])
def test_lines_of_an_hour_are_few_and_all_are_counted(per_s: int) -> None:
    kept = Lines()
    logger = logging.Logger("test")
    logger.addHandler(kept)
    logger.addFilter(_AccessLogFilter())
    number = 60 * per_s
    now_s = 1e9
    for line in range(number):
        facts = {"name": "test", "levelno": logging.INFO, "created": now_s}
        said = {"msg": "POST /v1/%s %d", "args": ("chat", line), "serve_access_log": True}
        logger.handle(logging.makeLogRecord(facts | said))
        if line % 100 == 0:
            logger.handle(logging.makeLogRecord(facts | {"msg": "something else"}))
        now_s += 1 / per_s
    others = [text for text in kept.texts if text == "something else"]
    lines = [text for text in kept.texts if text.startswith("POST /v1/chat")]
    assert len(others) == -(-number // 100)
    assert len(lines) == (number if per_s == 5 else pytest.approx(700, abs=5))
    left_out = sum(int(text.partition("(after ")[2].split()[0]) for text in lines if "left out" in text)
    assert left_out + len(lines) == pytest.approx(number, abs=per_s)


def test_a_wall_clock_that_is_set_back_stops_no_lines_for_long() -> None:
    bound = _AccessLogFilter()

    def passes(created: float) -> bool:
        return bound.filter(logging.makeLogRecord({"msg": "", "created": created, "serve_access_log": True}))

    assert sum(passes(1e9) for _ in range(200)) == 100
    assert not passes(1e9 - 3600)
    assert passes(1e9 - 3599)


def test_it_is_bounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "filters", [])
    bound_access_log()
    bound_access_log()
    assert len(logger.filters) == 2


MARKER = "marker of a prompt"


class Strict(BaseModel):
    """Refuses everything but a number."""

    prompt: int


def chained() -> None:
    try:
        raise KeyError(MARKER)
    except KeyError as error:
        raise RuntimeError("the step failed") from error


def circular() -> None:
    first, second = ValueError(f"'{MARKER}'"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def raises(error: Exception) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "left"),
    [
        (lambda: Strict(prompt=MARKER), "pydantic_core._pydantic_core.ValidationError: 1 validation error"),
        (raises(ValueError(f"can't encode {MARKER!r}")), "builtins.ValueError: can'...'"),
        (raises(ValueError(f'it\'s no {MARKER!r}, is "it"?')), "builtins.ValueError: it'...'?"),
        (raises(ValueError(f"begins with '{MARKER}")), "builtins.ValueError: begins with '...'"),
        (raises(RuntimeError("CUDA out of memory: 12 MiB")), "builtins.RuntimeError: CUDA out of memory: 12 MiB"),
        (chained, "builtins.RuntimeError: the step failed"),
        (circular, "builtins.ValueError: '...'"),
    ],
)
def test_an_exception_is_written_without_what_it_quotes(fail: Callable[[], Any], left: str) -> None:
    try:
        fail()
    except Exception as error:
        record = logging.LogRecord(
            "a", logging.ERROR, "f", 1, "it failed", (), (type(error), error, error.__traceback__)
        )
    assert _without_texts(record)
    text = logging.Formatter().format(record)
    assert left in text
    assert "in test_an_exception_is_written_without_what_it_quotes" in text
    assert MARKER not in text


SCRIPT = """
import logging
from cluster.process.logs import configure_logs
configure_logs(FORM)
configure_logs(FORM)
logging.getLogger("atelier.keeper").warning("%s extents", 3)
try:
    raise ValueError("'a prompt'")
except ValueError:
    logging.getLogger("anybody").exception("it failed")
"""


def lines_of(form: str) -> list[str]:
    """Return the lines that an actor's process writes."""
    script = SCRIPT.replace("FORM", repr(form))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_an_actor_writes_a_json_object_a_line() -> None:
    first, second = (json.loads(line) for line in lines_of("json"))
    assert (first["levelname"], first["logger"], first["message"]) == ("WARNING", "atelier.keeper", "3 extents")
    assert (second["levelname"], second["message"]) == ("ERROR", "it failed")
    assert second["exc_text"].endswith("builtins.ValueError: '...'")


def test_an_actor_writes_lines_of_text() -> None:
    lines = lines_of("text")
    assert lines[0].startswith("WARNING ")
    assert lines[0].endswith(" atelier.keeper -- 3 extents")
    assert lines[-1] == "builtins.ValueError: '...'"


def test_a_replica_writes_into_serves_file(monkeypatch: pytest.MonkeyPatch) -> None:
    root, serve, kept = logging.getLogger(), logging.getLogger("ray.serve"), Lines()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(serve, "filters", [])
    monkeypatch.setattr(serve, "handlers", [logging.handlers.MemoryHandler(1, target=kept)])
    configure_logs("json")
    configure_logs("json")
    logging.getLogger("atelier.ingress").error("unexpected error")
    serve.info("of Serve")
    for handler in serve.handlers:
        handler.flush()
    assert kept.texts == ["unexpected error", "of Serve"]
