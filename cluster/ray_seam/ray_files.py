"""The places of Ray's objects and of the scripts of its workers, and the modules that its processes import.

Ray is not imported.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Final

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  where its object store is
SERVE_MODULES: Final = tuple(f"ray.serve._private.{part}" for part in ("controller", "haproxy", "proxy", "replica"))


def worker_script() -> str:
    """Return the path of Ray's own worker script."""
    return os.path.join(_ray_folder(), "_private", "workers", "default_worker.py")


def setup_script() -> str:
    """Return the path of Ray's own script that prepares a runtime environment."""
    return os.path.join(_ray_folder(), "_private", "workers", "setup_worker.py")


def _ray_folder() -> str:
    found = importlib.util.find_spec("ray")
    assert found is not None  # it has started this process
    assert found.origin is not None
    return os.path.dirname(found.origin)
