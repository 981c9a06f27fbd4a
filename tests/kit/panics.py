"""What libraries in Rust raise when they give up: no `Exception`."""

from __future__ import annotations


class Panic(BaseException):
    """Stand in for pyo3's PanicException, which cannot be raised from Python."""
