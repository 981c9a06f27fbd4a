"""Becomes HAProxy, in place of whom Serve starts it: HAProxy then ends with the process that started it.

An orphan would keep the port. Imports next to nothing: it runs at every reload.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>
_NO_REUSE: Final = "-dR"  # without it, two HAProxies that know nothing of each other would share a port


def _become_haproxy(parent: int, program: str, arguments: list[str]) -> None:
    """Be HAProxy from now on; the kernel stops it softly when `parent` ends: it finishes what it has, and no more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)
    os.execv(program, [program, *arguments, *([] if _NO_REUSE in arguments else [_NO_REUSE])])  # noqa: S606


if __name__ == "__main__":
    _become_haproxy(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
