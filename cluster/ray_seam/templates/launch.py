"""Started by Ray's raylet in place of Ray's own worker script: the worker becomes a copy of a template process.

The raylet has this process as its child, and it lives as long as the copy: when one of the two ends, or the raylet
does, the other one is ended. When there is no template, it does not answer or refuses, this process becomes an ordinary
worker. Imports next to nothing: it runs once for every process that Ray starts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from typing import Final, NoReturn

if __name__ == "__main__":  # by its path, where nothing else need be known
    sys.path[0] = os.path.abspath(__file__).removesuffix("/cluster/ray_seam/templates/launch.py")

from cluster.ray_seam.ray_files import worker_script
from cluster.ray_seam.templates.messages import FOLDER_VARIABLE, NAME_VARIABLE, CopyRequest, note_problem, receive_copy

_BASE: Final = "ray"  # as in `process_starts.py`, which imports more than this process needs
# A template answers when it has imported everything. The raylet waits 60 s for a worker, then it starts another one.
_ANSWER_TIMEOUT_S: Final = 30.0


def launch_worker(arguments: list[str]) -> NoReturn:
    """Be a worker of Ray with these arguments, by a copy of a template if there is one, until it ends."""
    parent = os.pidfd_open(os.getppid()) if FOLDER_VARIABLE in os.environ else -1
    copy = _copy_template(arguments)
    if copy is None:
        os.execv(sys.executable, [sys.executable, worker_script(), *arguments])  # noqa: S606  # what Ray asked for
    select.select([copy, parent], [], [])
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(copy, signal.SIGKILL)
    sys.exit(0)


def _copy_template(arguments: list[str]) -> int | None:
    """Return a handle of a copy of the template that this process asks for; None for none, for which it says why."""
    folder, name = os.environ.get(FOLDER_VARIABLE), os.environ.get(NAME_VARIABLE, _BASE)
    if not folder:
        return None
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_ANSWER_TIMEOUT_S)
        connection.connect(os.path.join(folder, name))
        CopyRequest.of_this_process(arguments).send(connection)
        copy = receive_copy(connection)
    except OSError as error:
        note_problem(folder, f"no copy of template {name!r}: {error}")
        return None
    connection.detach()  # open as long as this process lives: the kernel ends the copy when it is closed
    return copy


if __name__ == "__main__":
    launch_worker(sys.argv[1:])
