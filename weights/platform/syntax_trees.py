"""Syntax trees of Python's texts, parsed by one thread at a time.

HAZARD: CPython counts how deep a tree is for all threads together. Where a collection of garbage lets another thread
parse meanwhile, either of the two ends with SystemError.
"""

from __future__ import annotations

import ast
import threading
from typing import Final

_PARSING: Final = threading.RLock()  # a collection of garbage within may parse, too


def parsed_module(source: str) -> ast.Module:
    """Return the tree of a file. Raises as `ast.parse` does."""
    with _PARSING:
        return ast.parse(source)


def parsed_expression(source: str) -> ast.expr:
    """Return the tree of an expression. Raises as `ast.parse` does."""
    with _PARSING:
        return ast.parse(source, mode="eval").body
