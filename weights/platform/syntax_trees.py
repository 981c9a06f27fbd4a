"""Syntax trees of Python's texts, made by one thread at a time.

HAZARD: CPython 3.11 counts how deep a tree is for all threads together. Where a collection of garbage lets another
thread parse meanwhile, either of the two ends with SystemError. `inspect.signature` parses, and so does torch.
"""

from __future__ import annotations

import ast
import functools
import os
import threading
from typing import Any


def parse_in_turn() -> None:
    """Let the threads of this process wait for each other in `ast.parse`, whoever calls it."""
    parse = ast.parse
    if hasattr(parse, "__wrapped__"):
        return
    turn = threading.RLock()  # a collection of garbage within may parse, too

    @functools.wraps(parse)
    def parse_alone(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return parse(*args, **kwargs)

    def begin_anew() -> None:
        nonlocal turn
        turn = threading.RLock()

    os.register_at_fork(after_in_child=begin_anew)  # a thread that is not in the child may have the turn
    ast.parse = parse_alone
