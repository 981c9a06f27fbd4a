"""For all tests: random draws that a failure can repeat, a browser, no waits for a disk, and the same half precision on
every processor.
"""

import os

pytest_plugins = ["kit.seeding", "kit.browser", "kit.unsynced", "kit.drawing", "kit.shares", "kit.times"]
# With AMX a product in half precision is another beside other rows (docs/operations/limits.md).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
