"""A template process: it has imported what a kind of worker needs, and becomes workers by copying itself.

A template is a copy itself, of the one it builds on, which starts it again when it is killed, and which becomes the
parent of its copies then. Where the kernel has no process to give, it says so: who asked starts the ordinary way, and
the next one who asks may get a copy again.

Nothing but imports may have happened in it: only one thread goes on in a copy, and CUDA does not work in the copy of a
process that has begun it. A template that finds more has no copies made, and says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from cluster.ray_seam.template_records import Template
from cluster.ray_seam.templates.messages import (
    FOLDER_VARIABLE,
    NAME_VARIABLE,
    CopyRequest,
    answer_as_copy,
    note_problem,
)
from cluster.ray_seam.templates.process_files import record_process, remove_process

_REQUEST_TIMEOUT_S: Final = 5.0
_MAX_STARTS: Final = 4  # of one template
_PR_SET_CHILD_SUBREAPER: Final = 36  # <sys/prctl.h>
_IMPORT_FAILED: Final = 3  # an exit code
_MANY: Final = 4096  # bytes, one for a child that has ended
_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",  # or libraries start threads at import
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or who asks for a GPU opens it
}
# Variables that a copy may have other values of than its template had at import: Ray sets them when it starts itself
# or a worker, and reads them later than at import, or again in a copy. All others must be the same, so that whatever
# reads its environment at import has found what it would in a process of its own.
_MAY_DIFFER: Final = {
    *_ENVIRONMENT,
    *(FOLDER_VARIABLE, NAME_VARIABLE),
    *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS"),
    *("RAY_RAYLET_PID", "RAY_ROTATION_BACKUP_COUNT", "RAY_ROTATION_MAX_BYTES", "RAY_USAGE_STATS_ENABLED"),
    *("RAY_event_stats", "RAY_task_events_report_interval_ms", "RAY_worker_niceness", "SPT_NOENV"),
    *("OLDPWD", "PWD", "SHLVL", "_"),
}


class _TemplateProcess:
    """This process as a template. `listeners` are the sockets of this one and of those that build on it, by name.

    `environment` is what its imports may read, and `folder` is where problems are noted.
    """

    def __init__(self, listeners: Mapping[str, socket.socket], environment: Mapping[str, str], folder: str) -> None:
        self._listeners = dict(listeners)
        self._environment = dict(environment)
        self._folder = folder
        self._selector: selectors.BaseSelector
        self._further: dict[int, Template] = {}  # those that build on this one, by process
        self._starts: dict[str, int] = {}
        self._unstarted: dict[str, Template] = {}  # for which there was no process, by the names they have sockets of
        self._twins: str | None = None  # nobody knows yet

    def run(self, template: Template) -> CopyRequest | None:
        """Be this template until the standard input ends; then return None. In a copy, return its request."""
        while True:  # once for every template that this process becomes, each being a copy of the one before
            os.environ.update(template.environment)
            self._environment |= template.environment
            _import_all(template, self._folder)
            self._twins = None
            with contextlib.suppress(OSError):
                self._twins = _ids_of_twins() if template.name else ""
            gc.freeze()  # a collection in a copy would write to every page that it shares with the others
            if template.name:
                record_process(self._folder, "template", template.name, os.getpid())
            become = self._make_copies(template)
            if not isinstance(become, Template):
                return become
            template = become

    def _make_copies(self, template: Template) -> Template | CopyRequest | None:
        """Copy this process for what builds on it, then for requests. Return None at the end of the standard input.

        In a copy, return what it becomes.
        """
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        ended = self._watch_children()
        self._starts = {}
        self._further = {}
        self._unstarted = {}
        for further in template.further:
            if self._start_template(further):
                return further
        kept = {template.name, *(further.name for further in template.further), *self._unstarted}
        for name in self._listeners.keys() - kept:
            self._listeners.pop(name).close()  # who asks one that has ended shall see it
        if template.name:
            self._selector.register(self._listeners[template.name], selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                become: Template | CopyRequest | None = None
                if key.fd == 0:
                    return None
                if key.fd == ended:
                    os.read(ended, _MANY)
                    become = self._reap_children()
                elif (name := self._name_of(key.fd)) in self._unstarted:
                    become = self._start_late(name)
                elif name == template.name:
                    become = self._answer_next(name)
                if become is not None:
                    return become

    def _watch_children(self) -> int:
        """Return a pipe that can be read when a child has ended, or an orphan whose parent was a template."""
        ended, ending = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(ended, selectors.EVENT_READ, ending)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # its default writes nothing into the pipe
        signal.set_wakeup_fd(ending)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return ended

    def _fork(self, purpose: str) -> int | None:
        """Copy this process. Return None, and say so, when the kernel has no process or no memory to give."""
        try:
            return os.fork()
        except OSError as error:
            note_problem(self._folder, f"no {purpose}: {error.strerror}")
            return None

    def _start_template(self, further: Template) -> bool:
        """Copy this process for a template that builds on it. Return whether this is the copy."""
        process = self._fork(f"template {further.name!r} for now")
        if process == 0:
            self._leave(further.names())
            return True
        if process is None:  # until somebody asks for it
            for name in further.names():
                self._unstarted[name] = further
                self._selector.register(self._listeners[name], selectors.EVENT_READ)
        else:
            self._further[process] = further
            self._starts[further.name] = self._starts.get(further.name, 0) + 1
        return False

    def _start_late(self, name: str) -> Template | None:
        """Start the template that somebody asks for: in the copy, return it. Its own answer is that there is none."""
        further = self._unstarted[name]
        for one in further.names():
            del self._unstarted[one]
            self._selector.unregister(self._listeners[one])
        if self._start_template(further):
            return further
        if name in self._unstarted:
            self._answer_next(name)
        return None

    def _name_of(self, descriptor: int) -> str:
        return next((name for name, listener in self._listeners.items() if listener.fileno() == descriptor), "")

    def _answer_next(self, name: str) -> CopyRequest | None:
        """Answer the next request, to this template or one that has no process. In the copy, return it."""
        connection = self._listeners[name].accept()[0]
        connection.settimeout(_REQUEST_TIMEOUT_S)
        try:
            request, streams = CopyRequest.receive(connection)
        except (OSError, ValueError, TypeError):
            connection.close()
            return None
        process: int | None = None
        problem = "it has no process" if name in self._unstarted else self._why_no_copy(request)
        if problem:
            note_problem(self._folder, f"no copy of a template: {problem}")
        elif _is_waited_for(connection):  # else it has waited too long, and is an ordinary worker now
            process = self._fork(f"copy of template {name!r}")
        if process is None:
            with contextlib.suppress(OSError):
                connection.sendall(b"n")
        elif process:
            record_process(self._folder, "copy", name, process)
        else:
            self._leave(())
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            try:
                answer_as_copy(connection)  # not the template, which may be killed between the two
            except OSError:
                os._exit(0)
        connection.close()
        for stream in streams:
            os.close(stream)
        return request if process == 0 else None

    def _why_no_copy(self, request: CopyRequest) -> str:
        """Return why there is none for this request, "" when there is."""
        try:
            if self._twins is None:
                self._twins = _ids_of_twins()
        except OSError as error:
            return f"it cannot be tried: {error.strerror}"
        return self._twins or _why_no_copy(self._environment, request.environment)

    def _reap_children(self) -> Template | None:
        """Forget the children that have ended. A template that was killed is started again: in the copy, return it."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if not process:
                return None
            remove_process(self._folder, process)
            template = self._further.pop(process, None)
            if template is None or not template.name:
                continue
            if not os.WIFSIGNALED(status) or self._starts[template.name] >= _MAX_STARTS:
                self._listeners.pop(template.name).close()
                if (code := os.waitstatus_to_exitcode(status)) != _IMPORT_FAILED:  # which it has said itself
                    note_problem(self._folder, f"no template {template.name!r} any more: it ended with {code}")
                continue
            alone = replace(template, further=())  # those that build on it go on, and have its imports
            if self._start_template(alone):
                return alone

    def _leave(self, names: Sequence[str]) -> None:
        """Close, in a copy, what belongs to the template. Keep the sockets of these."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:  # the two ends of a pipe
                os.close(key.fd)
                os.close(key.data)
        self._selector.close()
        for name in self._listeners.keys() - set(names):
            self._listeners.pop(name).close()


def _import_all(template: Template, folder: str) -> None:
    for name in template.imports:
        module, _, attribute = name.partition(":")
        try:
            with _python_draws_class_ids():
                found = importlib.import_module(module)
                if attribute:
                    getattr(found, attribute)
        except Exception as error:
            # A worker that needs it fails as well, in its own words.
            note_problem(folder, f"no template {template.name!r}: {module} cannot be imported: {error!r}")
            os._exit(_IMPORT_FAILED)


def _ids_of_twins() -> str:
    """Return why two copies of this process would give the same ids to what they make with Ray; "" when they do not.

    Raises OSError when it cannot be copied now.
    """
    if not _has_ray():
        return ""
    first, second = _drawn_in_copy().split(), _drawn_in_copy().split()
    if not first or len(first) != len(second) or set(first) & set(second):
        return "its imports have begun Ray's generator of ids"
    return ""


def _drawn_in_copy() -> bytes:
    """Return ids that the first and another thread of a copy of this process draw. Raises OSError without a copy."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            drawn = [_draw_id()]
            thread = threading.Thread(target=lambda: drawn.append(_draw_id()))
            thread.start()
            thread.join()
            os.write(writing, " ".join(drawn).encode())
        finally:
            os._exit(0)  # or it would go on as a template
    os.close(writing)
    with open(reading, "rb") as file:
        drawn_there = file.read()
    os.waitpid(process, 0)
    if not drawn_there:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return drawn_there


def _is_waited_for(connection: socket.socket) -> bool:
    """Return whether the other side is still there: it sends nothing more."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    finally:
        connection.settimeout(_REQUEST_TIMEOUT_S)


def _why_no_copy(own: Mapping[str, str], asked: Mapping[str, str]) -> str:
    """Return why this process, which had that environment at its imports, is not copied for the other one.

    "" when it is.
    """
    names = [name for name in (own.keys() | asked.keys()) - _MAY_DIFFER if own.get(name) != asked.get(name)]
    if names:
        return f"the environment has other values of {', '.join(sorted(names))}"
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"its imports have started {num_threads - 1} threads"
    opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    if any(file.startswith("/dev/nvidia") for file in opened):
        return "its imports have opened a GPU"
    return ""


def _has_ray() -> bool:
    """Return whether this process has imported Ray, and so its compiled library."""
    return "ray" in sys.modules


@contextlib.contextmanager
def _python_draws_class_ids() -> Iterator[None]:
    """Let actor classes that are defined in the block have ids of the system's randomness.

    HAZARD: Ray's library draws ids of tasks and objects from one generator, which begins with the first draw. Copies
    made after that would draw the same ids as each other. The class of an actor draws its id when it is defined.
    """
    actor: Any = sys.modules.get("ray.actor")
    if actor is None:
        yield
        return
    drawing = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: drawing(os.urandom(drawing.size())))
    try:
        yield
    finally:
        actor.ActorClassID = drawing


def _draw_id() -> str:
    """Return an id of Ray's generator, in hex."""
    return str(sys.modules["ray"].WorkerID.from_random().hex())


def _reload_settings() -> None:
    """Read Ray's settings from the environment again, which was another one at import."""
    if _has_ray():
        sys.modules["ray._raylet"].Config.initialize("")


def _become(request: CopyRequest, script: str) -> None:
    """Make a copy what the process would be that asked for it, and run the worker's script."""
    request.apply()
    _renew_randomness()
    _reload_settings()
    gc.enable()
    sys.argv = [script, *request.arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def _renew_randomness() -> None:
    """Let no two copies draw the same numbers. Python's own generator sees to itself."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _main() -> None:
    """Run the templates that a line of JSON on the standard input tells of, whose end is theirs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray's own: Ctrl-C is for who has started them
    gc.disable()
    settings = json.loads(sys.stdin.readline())
    listeners = {name: socket.socket(fileno=descriptor) for name, descriptor in settings["listeners"].items()}
    environment = dict(os.environ)  # now: imports add variables of their own
    os.environ.update(_ENVIRONMENT)
    request = _TemplateProcess(listeners, environment, settings["folder"]).run(Template.of(settings["template"]))
    if request is not None:
        _become(request, settings["script"])
