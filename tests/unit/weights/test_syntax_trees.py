"""Threads that parse Python's texts at the same moment have the trees of their texts."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weights.platform.syntax_trees import parsed_expression, parsed_module

SOURCE = Path(ast.__file__).read_text("utf-8")


@pytest.fixture
def collections_that_let_others_run() -> Iterator[None]:
    def let_others_run(phase: str, _: dict[str, int]) -> None:
        time.sleep(0)

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(100)
    gc.callbacks.append(let_others_run)
    yield
    gc.callbacks.remove(let_others_run)
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("collections_that_let_others_run")
def test_threads_that_parse_at_once_have_their_trees() -> None:
    """Calls of `ast.parse` alone sometimes end with SystemError in Python 3.11."""
    whole, found = len(ast.parse(SOURCE).body), list[int | str]()

    def parse() -> None:
        for _ in range(6):
            try:
                found.append(len(parsed_module(SOURCE).body))
            except SystemError as error:
                found.append(str(error))

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [whole] * 24


def test_an_expression_is_one() -> None:
    assert ast.dump(parsed_expression("1 + a")) == ast.dump(ast.parse("1 + a", mode="eval").body)
    with pytest.raises(SyntaxError):
        parsed_expression("a = 1")
