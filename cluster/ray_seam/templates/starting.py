"""The template processes of a private Ray: started before it, pointed out to its raylet, ended after it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from cluster.ray_seam.ray_files import setup_script, worker_script
from cluster.ray_seam.template_records import Template, say_ordinary
from cluster.ray_seam.templates import launch, setup_worker
from cluster.ray_seam.templates.messages import FOLDER_VARIABLE, NAME_VARIABLE
from weights.platform.private_folder import private_folder, temporary_folder

_BACKLOG: Final = 64
_END_TIMEOUT_S: Final = 5.0
# HAZARD: Ray's library keeps what it finds when it is loaded, whatever a copy's environment says. A worker is of a
# job: here of the first driver's, and others get ordinary workers. And it ends with the raylet's process: here with
# this one, whose end is also the raylet's; `launch.py` watches the raylet.
_JOB: Final = {"RAY_JOB_ID": "01000000"}
_NO_PRESTART: Final = {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}  # of no job yet
_MAIN: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "import cluster.ray_seam.templates.template as template; template._main()"
)


@contextlib.contextmanager
def workers_by_templates(template: Template) -> Iterator[None]:
    """Run a template, and those that build on it, and let a Ray that starts in the block start its workers by them.

    Ray 2.60 has no option for it: the raylet gets other scripts for its workers.
    """
    with _running_templates(template):
        if FOLDER_VARIABLE not in os.environ:
            yield
            return
        from cluster.ray_seam.processes import worker_scripts  # imports Ray, as the templates do by now

        of_ray = worker_script(), setup_script()
        with worker_scripts((launch.__file__, setup_worker.__file__), of_ray, say_ordinary):
            yield


@contextlib.contextmanager
def _running_templates(template: Template, script: str | None = None) -> Iterator[None]:
    """Run a template, and those that build on it, for the length of the block. Copies run `script`, or Ray's workers'.

    Where they cannot run, this says so, and nothing changes.
    """
    try:
        _check_platform()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_environment(_NO_PRESTART))
            folder = stack.enter_context(_started(template, script or worker_script()))
            stack.enter_context(_environment({FOLDER_VARIABLE: str(folder)}))
            running = stack.pop_all()
    except OSError as error:
        say_ordinary(str(error))
        running = contextlib.ExitStack()
    with running:
        yield


def template_environment(name: str) -> dict[str, str]:
    """Return the environment of actors that are to be copies of that template; empty when none runs."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return {NAME_VARIABLE: name} if folder and os.path.exists(os.path.join(folder, name)) else {}


def _check_platform() -> None:
    """Raise OSError where templates do not work."""
    if sys.platform != "linux":
        raise OSError(f"there are none on {sys.platform}")
    os.close(os.pidfd_open(os.getpid()))  # Linux 5.3


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which its children inherit, for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _started(template: Template, script: str) -> Iterator[Path]:
    """Start the templates, whose copies run `script`, and yield the folder of their sockets. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir=private_folder(temporary_folder())))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        listeners = {name: stack.enter_context(socket.socket(socket.AF_UNIX)) for name in template.names()}
        for name, listener in listeners.items():
            listener.bind(str(folder / name))
            listener.listen(_BACKLOG)
        descriptors = {name: listener.fileno() for name, listener in listeners.items()}
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(descriptors.values()),
            # Without what libraries have set behind Python's back: Ray starts its processes so.
            env=dict(os.environ) | _JOB | {"RAY_RAYLET_PID": str(os.getpid())},
        )
        stack.callback(_end, process)
        for listener in listeners.values():
            listener.close()
        settings = {
            "template": asdict(template),
            "listeners": descriptors,
            "script": script,
            "folder": str(folder),
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        yield folder


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the standard input of the templates, which ends all of them."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # in the middle of an import
        process.kill()
        process.wait()
