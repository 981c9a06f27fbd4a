"""Python's collector has little to do: libraries are frozen once they are imported, and it looks seldom."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

_MANY_MODULES = 400
# What an application over fakes, or a small model, is made of outlives several collections of Python's own pace, which
# were a third of the time of such tests. Whoever looks for what was left behind collects before that.
_MANY_OBJECTS = 50_000


class _Frozen:
    """The number of modules whose objects are frozen, of which the conftests of all folders know one."""

    num_modules = 0


def freeze_imported() -> None:
    """Freeze what is alive. Objects of tests are not: whoever calls is between modules of tests."""
    if len(sys.modules) > _Frozen.num_modules + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        _Frozen.num_modules = len(sys.modules)


def collect_seldom() -> None:
    """Freeze what collecting the tests has imported, and go on to collect, seldom.

    torch, diffusers, transformers, Ray and FastAPI are a million objects that live as long as the process. A
    collection would visit all of them, for most of a second, and tests that look for leaks ask for many collections.
    """
    freeze_imported()
    gc.set_threshold(_MANY_OBJECTS)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> Iterator[None]:
    """Freeze what the tests of a module have imported: both libraries of models load their parts when asked."""
    yield
    freeze_imported()
