"""Serve's access log: a rate of lines, the number of those that are missing, and all else untouched."""

from __future__ import annotations

import logging

import pytest

from cluster.logs import AccessLogFilter, bound_access_log


class Lines(logging.Handler):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("per_s", [5, 720])
def test_lines_of_an_hour_are_few_and_all_are_counted(per_s: int) -> None:
    now_s, kept = 0.0, Lines()
    logger = logging.Logger("test")
    logger.addHandler(kept)
    logger.addFilter(AccessLogFilter(lambda: now_s))
    number = 60 * per_s
    for line in range(number):
        logger.info("POST /v1/%s %d", "chat", line, extra={"serve_access_log": True})
        if line % 100 == 0:
            logger.info("something else")
        now_s += 1 / per_s
    others = [text for text in kept.texts if text == "something else"]
    lines = [text for text in kept.texts if text.startswith("POST /v1/chat")]
    assert len(others) == -(-number // 100)
    assert len(lines) == (number if per_s == 5 else pytest.approx(700, abs=5))
    left_out = sum(int(text.partition("(after ")[2].split()[0]) for text in lines if "left out" in text)
    assert left_out + len(lines) == pytest.approx(number, abs=per_s)


def test_it_is_bounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "filters", [])
    bound_access_log()
    bound_access_log()
    assert len(logger.filters) == 1
