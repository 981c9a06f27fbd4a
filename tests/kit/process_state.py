"""The state of this process and of its libraries that a test could leave changed for all that run behind it.

Warning filters are not looked at, since pytest has its own for each test; nor what a test's thread holds, and modules,
loggers and names of libraries that were not there before. Of a file that loads a library, neither added variables nor
loggers are: libraries set theirs once in a process, in whichever file comes first.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import locale
import logging
import operator
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import pytest

State = Mapping[str, Mapping[str, Any]]  # values by what they are of, and by name

# When they are first used, once in a process: torch's own logger takes out its handler, its compiler wraps a function,
# scikit-learn sets two variables for OpenMP, and a reader of safetensors, beside which `bench load` measures, one.
_OF_LIBRARIES: Final = {
    "torch.__trace",
    "manual_seed",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "RUNAI_STREAMER_PROCESS_GROUP_SIZE",
}
_ENVIRONMENT, _MODULES, _LOGGERS = "os.environ", "the name of a module", "the name of a logger"
_GROWING: Final = "the name of "  # of these groups only the names that were there before are compared
_OF_PYTEST: Final = {"PYTEST_CURRENT_TEST", "SIGALRM", "last_type"}  # of this test, its time, and the last failure
_LIMITS: Final = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_NOFILE")
_PATCHED: Final = (  # modules and classes in whose place, or in whose names, tests put something of their own
    *("asyncio", "builtins", "io", "json", "logging", "os", "os.path", "pathlib.Path", "random", "select", "shutil"),
    *("signal", "socket", "socket.socket", "sqlite3", "subprocess", "subprocess.Popen", "sys", "tempfile", "threading"),
    *("threading.Thread", "time", "urllib.request", "numpy", "numpy.random", "psutil", "httpx", "httpx.AsyncClient"),
    *("torch", "torch.Tensor", "torch.cuda", "torch.distributed", "torch.nn.Module", "torch.nn.Linear"),
    *("torch.nn.Embedding", "torch.nn.functional", "safetensors.torch", "transformers.PreTrainedModel"),
    *("transformers.GenerationMixin", "diffusers.DiffusionPipeline", "diffusers.ModelMixin", "ray", "ray.serve"),
)


class _Begun:
    """The file whose tests run now, and how it found this process. The last of them may run again."""

    file = ""
    state: State
    latest: State | None = None  # at the end of a file, when nothing has run since


@pytest.fixture(autouse=True, scope="module")
def unchanged_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the last test of a file that leaves this process changed for the files behind it."""
    if _Begun.file != request.node.nodeid:
        _Begun.file, _Begun.state = request.node.nodeid, _Begun.latest or process_state()
    yield
    _Begun.latest = process_state()
    if lines := changes(_Begun.state, _Begun.latest):
        pytest.fail("\n  ".join([f"{_Begun.file} leaves changed for whatever runs behind it:", *lines]), pytrace=False)


def process_state() -> State:
    """Return the present state. It lacks the groups of libraries that are not loaded."""
    state: dict[str, Mapping[str, Any]] = {
        _ENVIRONMENT: dict(os.environ),
        "signal.getsignal": {one.name: signal.getsignal(one) for one in signal.Signals},
        "resource.getrlimit": {name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
        "python": _of_python(),
        _MODULES: dict(sys.modules),
        _LOGGERS: {"root": _of_logger(logging.root)} | _of_loggers(),
    }
    if "numpy" in sys.modules:
        state["numpy"] = {"geterr": sys.modules["numpy"].geterr()}
    if "torch" in sys.modules:
        state["torch"] = _of_torch(sys.modules["torch"])
    for name in _PATCHED:
        if (found := _loaded(name)) is not None:
            state[f"{_GROWING}{name}"] = dict(vars(found))
    return state


def changes(before: State, now: State) -> list[str]:
    """Return a line for each change."""
    found, has_loaded = [], _has_loaded_a_library(before[_MODULES], now[_MODULES])
    for group in before.keys() & now.keys():
        old, new = before[group], now[group]
        # Thousands of names, nearly all of which are as before: the first look is a loop of C.
        others = set(itertools.compress(old, map(operator.is_not, old.values(), map(new.get, old))))
        if not group.startswith(_GROWING):
            others |= new.keys() - old.keys()
        for name in others - _OF_PYTEST - _OF_LIBRARIES:
            was, has = old.get(name, "missing"), new.get(name, "missing")
            if has_loaded and (group == _LOGGERS or (group == _ENVIRONMENT and name not in old)):
                continue
            if _differ(group, was, has):
                found.append(f"{group}, {name}: was {was!r:.100}, is {has!r:.100}")
    return sorted(found)


def _has_loaded_a_library(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return any(name.partition(".")[0] not in before for name in now.keys() - before.keys())


def _differ(group: str, was: Any, has: Any) -> bool:
    if not group.startswith(_GROWING):
        return bool(was != has)
    if isinstance(was, tuple):  # of a logger
        return bool(was != has)
    return callable(was) or isinstance(was, ModuleType)  # others are caches and counters


def _of_python() -> dict[str, Any]:
    os.umask(umask := os.umask(0o077))
    return {
        "os.getcwd": os.getcwd(),
        "os.umask": umask,
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "sys.gettrace": sys.gettrace(),
        "sys.getprofile": sys.getprofile(),
        "sys.getswitchinterval": sys.getswitchinterval(),
        "sys.getrecursionlimit": sys.getrecursionlimit(),
        "sys.dont_write_bytecode": sys.dont_write_bytecode,
        "threading.excepthook": threading.excepthook,
        "gc.isenabled": gc.isenabled(),
        "gc.get_threshold": gc.get_threshold(),
        "locale.setlocale": locale.setlocale(locale.LC_ALL),
        "time.tzname": time.tzname,
        "socket.getdefaulttimeout": socket.getdefaulttimeout(),
        "logging.raiseExceptions": logging.raiseExceptions,
        "asyncio.get_event_loop_policy": type(asyncio.get_event_loop_policy()),
    }


def _of_loggers() -> dict[str, Any]:
    known = list(logging.root.manager.loggerDict.items())
    return {name: _of_logger(one) for name, one in known if isinstance(one, logging.Logger)}


def _of_logger(logger: logging.Logger) -> tuple[Any, ...]:
    if logger.handlers or logger.filters:
        handlers = [one for one in logger.handlers if not type(one).__module__.startswith("_pytest")]
        return logger.level, logger.disabled, logger.propagate, handlers, list(logger.filters)
    return logger.level, logger.disabled, logger.propagate, [], []


def _of_torch(torch: Any) -> dict[str, Any]:
    """Return its settings, and whether it is patched by a simulated accelerator (`infra.sim`), for good."""
    return {
        "get_default_dtype": torch.get_default_dtype(),
        "get_default_device": torch.get_default_device(),
        "get_num_threads": torch.get_num_threads(),
        "is_grad_enabled": torch.is_grad_enabled(),
        "is_inference_mode_enabled": torch.is_inference_mode_enabled(),
        "is_autocast_enabled": torch.is_autocast_enabled("cpu"),
        "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
        "is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled(),
        "utils.deterministic.fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "backends.mkldnn.deterministic": torch.backends.mkldnn.deterministic,
        "backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "backends.cuda.math_sdp_enabled": torch.backends.cuda.math_sdp_enabled(),
        "backends.cuda.flash_sdp_enabled": torch.backends.cuda.flash_sdp_enabled(),
        "distributed.is_initialized": torch.distributed.is_initialized(),
        "sim": hasattr(torch, "sim"),
    }


def _loaded(name: str) -> Any:
    """Return a module, or a class of one, if it is loaded: libraries load their parts when these are asked for."""
    if (found := sys.modules.get(name)) is not None:
        return found
    module, _, attribute = name.rpartition(".")
    return vars(sys.modules[module]).get(attribute) if module in sys.modules else None
