"""Started by Ray's raylet for workers with a runtime environment: applies it, and goes on as `launch.py`.

Ray's own imports all of Ray for this, and then starts the worker, which imports it again. HAZARD: the raylet knows this
file by its name: it leaves it out of the command of workers without a runtime environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Final

if __name__ == "__main__":  # by its path, where nothing else need be known
    sys.path[0] = os.path.abspath(__file__).removesuffix("/cluster/ray_seam/templates/setup_worker.py")

from cluster.ray_seam.ray_files import setup_script, worker_script
from cluster.ray_seam.templates.launch import launch_worker

_CONTEXT: Final = "--serialized-runtime-env-context="
_LANGUAGE: Final = "--language="


def _main(arguments: list[str]) -> None:
    """Apply the runtime environment of the arguments, and be the worker that the others ask for."""
    context = json.loads(next((one.removeprefix(_CONTEXT) for one in arguments if one.startswith(_CONTEXT)), "{}"))
    variables = context.pop("env_vars", None) or {}
    is_plain = context.pop("py_executable", sys.executable) == sys.executable and not any(context.values())
    launcher = next((number for number, one in enumerate(arguments) if one.endswith("launch.py")), None)
    if not is_plain or launcher is None or f"{_LANGUAGE}PYTHON" not in arguments:
        if launcher is not None:
            arguments[launcher] = worker_script()
        os.execv(sys.executable, [sys.executable, setup_script(), *arguments])  # noqa: S606  # what Ray asked for
    for name, value in variables.items():  # as Ray does
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    launch_worker([one for one in arguments[launcher + 1 :] if not one.startswith((_CONTEXT, _LANGUAGE))])


if __name__ == "__main__":
    _main(sys.argv[1:])
