"""Import diffusers and transformers without what inference does not use of them: a third of their seconds.

Measured on the demo's replicas (torch 2.13, diffusers 0.42, transformers 5.23): `torch._dynamo` alone takes 1.2 s, 190
modules and 70 MB, and only `torch.compile` needs it. For processes that serve models and do nothing else with these
libraries; all of it is there as usual for who asks later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any, Final

# Both libraries do without these: for LoRAs, for loading from disk and for sampling, there is our own code.
UNUSED: Final = ("accelerate", "peft", "sklearn")
# What solvers use for beta sigmas and LMS, and transformers for the losses of detectors.
RARELY_USED: Final = {"scipy.stats": (), "scipy.integrate": (), "scipy.optimize": ("linear_sum_assignment",)}


def import_diffusers() -> None:
    """Import what all of diffusers' models need, without its pipelines, which want transformers' models as well."""
    _import_quickly(["diffusers", "diffusers.hooks", "diffusers.models.modeling_utils"], [*UNUSED, "transformers"])
    if sys.modules.get("transformers", sys) is None:
        del sys.modules["transformers"]  # the worker's tokenizers and configs are its own


def import_transformers() -> None:
    """Import what all of transformers' models need."""
    _import_quickly(["transformers.masking_utils", "transformers.modeling_utils"], UNUSED)


def _import_quickly(modules: Collection[str], unused: Collection[str]) -> None:
    """Import the modules as if `unused` were not installed. Where a library has looked for it before, do nothing."""
    if {"diffusers", "transformers"} & sys.modules.keys():
        return
    for name in unused:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # "not installed" to the import system
    for name, functions in RARELY_USED.items():
        _defer(name, functions)
    with _without_dynamo():
        for name in modules:
            importlib.import_module(name)


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    """Let a module stand in for `torch._dynamo` that takes the marks which libraries set at import."""
    name = "torch._dynamo"
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None:
        yield
        return
    stand_in: Any = importlib.util.module_from_spec(spec)  # a part that needs nothing of the rest is found as usual
    stand_in.allow_in_graph = lambda thing: thing
    stand_in.assume_constant_result = lambda function: _marked(function, "_dynamo_marked_constant")
    stand_in.disable = _disable
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _disable(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    return _disable if function is None else _marked(function, "_torchdynamo_disable")


def _marked(function: Any, mark: str) -> Any:
    setattr(function, mark, True)  # as torch._dynamo's own do
    return function


class _Deferred(ModuleType):
    """A module that is loaded when a name of it is asked for. Locked as the standard library's `LazyLoader` is."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and _load(self):
            return getattr(self, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _defer(name: str, functions: Collection[str]) -> None:
    """Defer the module until it is used. Importers may take `functions` from it before, which load it when called."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # not even its package
        return
    if name in sys.modules or spec is None:
        return
    module: Any = importlib.util.module_from_spec(spec)
    module._loading = threading.RLock()
    for function in functions:
        setattr(module, function, _loading_function(module, function))
    module.__class__ = _Deferred
    sys.modules[name] = module


def _load(module: Any) -> bool:
    """Run the module's code, once; other threads wait. Return False to the code itself, which asks while it runs."""
    with module._loading:
        if "_is_loading" in module.__dict__:
            return module.__class__ is ModuleType
        module._is_loading = True
        module.__spec__.loader.exec_module(module)
        module.__class__ = ModuleType
        return True


def _loading_function(module: Any, name: str) -> Any:
    def load_and_call(*arguments: Any, **options: Any) -> Any:
        _load(module)
        return getattr(module, name)(*arguments, **options)

    return load_and_call
