"""Threads that parse Python's texts at the same moment have the trees of their texts."""

from __future__ import annotations

import ast
import gc
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weights.platform.syntax_trees import parse_in_turn

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


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ast, "parse", inspect.unwrap(ast.parse))
    parse_in_turn()


@pytest.mark.usefixtures("turns", "collections_that_let_others_run")
def test_threads_that_parse_at_once_have_their_trees() -> None:
    """Calls of `ast.parse` alone sometimes end with SystemError in Python 3.11."""
    whole, found = len(ast.parse(SOURCE).body), list[int | str]()

    def parse() -> None:
        for _ in range(3):
            try:
                found.append(len(ast.parse(SOURCE).body))
                inspect.signature(object.__new__)
            except SystemError as error:
                found.append(str(error))

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [whole] * 12


@pytest.mark.usefixtures("turns")
def test_a_copy_of_a_process_parses_whoever_had_the_turn() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(str):
        def __bool__(self) -> bool:
            begun.set()
            return goes_on.wait(10)

    thread = threading.Thread(target=ast.parse, args=("1",), kwargs={"type_comments": Slow()})
    thread.start()
    assert begun.wait(10)
    if not (child := os.fork()):
        thread_of_child = threading.Thread(target=ast.parse, args=("1",), daemon=True)
        thread_of_child.start()
        thread_of_child.join(10)
        os._exit(thread_of_child.is_alive())
    goes_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("turns")
def test_turns_are_taken_once() -> None:
    parse = ast.parse
    parse_in_turn()
    assert ast.parse is parse
    with pytest.raises(SyntaxError):
        ast.parse("a b")
