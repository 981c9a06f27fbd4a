"""The texts of stock pipelines in another process: what a call asks `encode_prompt` for, and what that returns.

What will be asked is found by running `__call__` over modules without weights, until it asks. Nothing is computed.
"""

from __future__ import annotations

import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from deployments.engines.building.build import build_module
from deployments.engines.records.protocol import ComputationFailed, EngineError, StockRequest
from deployments.engines.stock.inputs import CallInputs
from deployments.engines.stock.loading import StockModel
from deployments.engines.stock.text_parts import ENCODE, asks_once
from weights.platform.torch_dtypes import memory_form
from weights.records.manifest import Component

_FORM: Final = "form"  # the tensor that has the structure of a result, as JSON
_PLACE: Final = "device"  # the parameter that every process fills in itself
Texts = Mapping[str, Mapping[str, torch.Tensor]]  # results by `TextCall.key`


class NotApart(Exception):
    """The text cannot be encoded elsewhere: the pipeline has to encode it itself."""


@dataclass(frozen=True, slots=True)
class TextCall:
    """A call of `encode_prompt`: its arguments as JSON, but for the device. `key` tells it from others of the class."""

    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Return the arguments in one form."""
        return json.dumps(self.arguments, sort_keys=True)


class _Asked(BaseException):
    """Raised out of a call that asks for a text; `except Exception` does not stop it."""

    def __init__(self, call: TextCall) -> None:
        super().__init__()
        self.call = call


class ModuleRan(BaseException):
    """Raised where a module without weights would run."""


def weightless_modules(components: Mapping[str, Component], folder: Path, device: torch.device) -> dict[str, nn.Module]:
    """Return modules of these components with types, shapes and configs, and no weights. They claim to be on `device`.

    Raises EngineError.
    """
    return {
        name: with_own(weightless(component, folder / component.folder), device, {"__call__": _refuse_to_run})
        for name, component in components.items()
    }


def weightless(component: Component, folder: Path, most_zeros: int = 0) -> nn.Module:
    """Return a module with types, shapes and config, whose tensors have no memory. Raises EngineError.

    Those of at most `most_zeros` numbers have, and are zeros.
    """
    tensors = {}
    for name, ref in component.tensors.items():
        dtype, shape = memory_form(ref.dtype, ref.shape)
        has_memory = math.prod(shape) <= most_zeros
        tensors[name] = torch.zeros(shape, dtype=dtype, device="cpu" if has_memory else "meta")
    return build_module(component.library, component.class_name, folder, tensors)


def with_own(module: nn.Module, device: torch.device, methods: Mapping[str, Callable[..., Any]]) -> nn.Module:
    """Return the module itself, of a class with these methods derived from its own. It claims to be on `device`."""
    cls = type(module)
    own = {"device": property(lambda self: device), **methods, "__module__": cls.__module__}
    module.__class__ = type(cls.__name__, (cls,), own)
    return module


def _refuse_to_run(*_: Any, **__: Any) -> Any:
    raise ModuleRan


class TextPlanner:
    """Finds the texts that calls of a pipeline ask for, over modules without weights. Of one model; thread-safe."""

    def __init__(self, model: StockModel) -> None:
        self.model = model
        self._inputs = CallInputs(model.cls)

    def next_text(self, request: StockRequest, known: Texts) -> TextCall | None:
        """Return the first text that the request's call asks for and that is not known, None where there is none.

        Raises EngineError for what the class cannot be called with, NotApart where this cannot be found out.
        """
        if known and asks_once(self.model.cls.__name__):
            return None
        pipeline = self.model.create_pipeline(request.scheduler, request.scheduler_options)
        pipeline.set_progress_bar_config(disable=True)
        arguments = self._inputs.arguments_of(request)
        tell_texts(pipeline, known, torch.device("cpu"), _ask)
        try:
            pipeline(**arguments)
        except _Asked as asked:
            return asked.call
        except ModuleRan:
            self._check_asked(known, "a module runs before the text is encoded")
        except (ValueError, TypeError) as error:
            if known:  # of the results' values, which the real call has to meet
                return None
            raise EngineError(f"{self.model.cls.__name__}: {error}") from error
        except (EngineError, NotApart):
            raise
        except Exception as error:
            self._check_asked(known, str(error))
        return None

    def _check_asked(self, known: Texts, why: str) -> None:
        if not known:
            raise NotApart(f"{self.model.cls.__name__}: {why}")


def _ask(call: TextCall) -> Any:
    raise _Asked(call)


def tell_texts(
    pipeline: Any, texts: Texts, device: torch.device, missing: Callable[[TextCall], Any] | None = None
) -> None:
    """Let a pipeline find its texts encoded. What is not among them goes to `missing`, or raises ComputationFailed."""
    signature = inspect.signature(getattr(type(pipeline), ENCODE))

    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        call = _call_of(signature.bind(pipeline, *args, **kwargs).arguments)
        if call.key in texts:
            return from_tensors(texts[call.key], device)
        if missing is not None:
            return missing(call)
        raise ComputationFailed("it asked for a text that it had not asked for before")

    setattr(pipeline, ENCODE, encode_prompt)


def _call_of(arguments: Mapping[str, Any]) -> TextCall:
    """Raises NotApart for arguments that are no JSON."""
    plain = {name: value for name, value in arguments.items() if name not in ("self", _PLACE)}
    plain |= {name: f"{value}" for name, value in plain.items() if isinstance(value, torch.dtype)}
    try:
        return TextCall(json.loads(json.dumps(plain, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise NotApart(f"{ENCODE} gets an argument that no other process can have: {error}") from error


class CalledEncoders:
    """`encode_prompt` of a pipeline class over its text encoders, one call at a time.

    Tokenizers, and the other modules without their weights, are there from the first call on. `modules` are the
    encoders, `components` all that has weights.
    """

    def __init__(
        self,
        class_name: str,
        folder: Path,
        modules: Mapping[str, nn.Module],
        components: Mapping[str, Component],
        device: torch.device,
    ) -> None:
        self._source = class_name, folder
        self._modules, self._components = dict(modules), dict(components)
        self._device = device
        self._lock = threading.Lock()
        self._pipeline: Any = None

    def encode(self, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the result of a call in the form that `from_tensors` reads. Blocks.

        Raises EngineError for a component that cannot be loaded, ComputationFailed.
        """
        with self._lock:
            if self._pipeline is None:
                self._pipeline = self._load()
            method = getattr(self._pipeline, ENCODE)
            parameters = inspect.signature(method).parameters
            given = {name: _typed(value) for name, value in arguments.items()}
            given |= {_PLACE: self._device} if _PLACE in parameters else {}
            try:
                with torch.no_grad():
                    return to_tensors(method(**given))
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except (ModuleRan, Exception) as error:
                raise ComputationFailed(f"{self._source[0]}: {error!r}") from error

    def _load(self) -> Any:
        class_name, folder = self._source
        others = {name: one for name, one in self._components.items() if name not in self._modules}
        blank = weightless_modules(others, folder, self._device)
        return StockModel(class_name, folder, {**blank, **self._modules}).create_pipeline()


def _typed(value: Any) -> Any:
    is_dtype = isinstance(value, str) and isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)
    return getattr(torch, value.removeprefix("torch.")) if is_dtype and value.startswith("torch.") else value


def to_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Return a result (tensors in lists and tuples, None, numbers) as tensors by name. Raises TypeError for others."""
    tensors: dict[str, torch.Tensor] = {}

    def form(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[str(len(tensors))] = value
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [form(one) for one in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise TypeError(f"{ENCODE} returned a {type(value).__name__}")

    text = json.dumps(form(result))
    return tensors | {_FORM: torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())}


def from_tensors(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """Return the result that `to_tensors` was given, with copies of the tensors on a device."""

    def value_of(form: Mapping[str, Any]) -> Any:
        ((kind, value),) = form.items()
        if kind == "tensor":
            return tensors[value].to(device, copy=True)
        if kind == "value":
            return value
        parts = [value_of(one) for one in value]
        return parts if kind == "list" else tuple(parts)

    return value_of(json.loads(tensors[_FORM].cpu().numpy().tobytes()))
