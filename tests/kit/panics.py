"""The panics of libraries in Rust, which are no `Exception`."""

from __future__ import annotations


class Panic(BaseException):
    """Stand in for pyo3's PanicException, which cannot be raised from Python."""
