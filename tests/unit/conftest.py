"""For all unit tests: logs are as before after each, and Python's collector has little to do."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest
from kit.collector import collect_seldom
from kit.collector import frozen_imports as frozen_imports
from kit.process_state import unchanged_process as unchanged_process
from kit.unsynced import keep_folders_in_memory

_SERVERS = ("ray.serve", "uvicorn", "uvicorn.access", "uvicorn.asgi", "uvicorn.error")  # loggers that they set up
gc.disable()  # until all is imported
keep_folders_in_memory()
# Before torch is loaded, and for the processes of tests: models this small are slower on more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before Ray is loaded: a thread that outlives its test would begin one with `ray.get`, whose end ends this process.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def pytest_collection_finish() -> None:
    collect_seldom()


@pytest.fixture(autouse=True)
def logs_of_this_process() -> Iterator[None]:
    """Take out what an actor, a replica or a server, made by a test in this process, has put into its logs."""
    root, serve = logging.getLogger(), logging.getLogger("ray.serve")
    before, filters = list(root.handlers), list(serve.filters)
    servers = [(one, one.level, one.propagate, list(one.handlers)) for one in map(logging.getLogger, _SERVERS)]
    yield
    for logger, level, logger.propagate, logger.handlers in servers:
        if logger.level != level:  # to set it looks at all loggers
            logger.setLevel(level)
    for handler in [
        one for one in root.handlers if one not in before and type(one).__module__ == "cluster.process.logs"
    ]:
        root.removeHandler(handler)
    serve.filters[:] = filters


@pytest.fixture(autouse=True)
def no_ray_of_its_own() -> Iterator[None]:
    """Fail a test that began a Ray: its end takes this process with it."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
        pytest.fail("the test began a Ray of its own")
