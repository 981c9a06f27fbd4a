"""For all tests: random draws that a failure can repeat, a browser, no waits for a disk, and the same half precision on
every processor.
"""

import os

# Before numpy is loaded: copies of a process have none of its threads (kit/forks.py).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_KIT = (
    "seeding",
    "browser",
    "unsynced",
    "certificates",
    "drawing",
    "times",
    "shares",
    "forks",
    "kernels",
    "log_handlers",
    "line_contexts",
)
pytest_plugins = [f"kit.{name}" for name in _KIT]
# With AMX a product in half precision is another beside other rows (docs/operations/limits.md).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
