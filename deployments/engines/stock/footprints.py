"""The memory that calls of a stock pipeline's modules take: its `__call__` is rehearsed over modules without weights.

The code between modules runs as it is, on the host and over zeros, so that every module is called with the shapes that
it will have. A call of a module is recorded on fake tensors, once for its shapes, and answers with zeros. One that asks
for values (the length of a text, by its mask) gets those that do not come from such zeros.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from deployments.engines.graph.recording import Recorder, fake_copy, record, tensors_in
from deployments.engines.records.protocol import EngineError, StockRequest
from deployments.engines.stock.borrowed_modules import BorrowedModules
from deployments.engines.stock.inputs import CallInputs
from deployments.engines.stock.loading import StockModel
from deployments.engines.stock.outputs import audio_channels, sample_rate
from deployments.engines.stock.texts import weightless, with_own
from weights.platform.torch_seam import TO_COPY, DispatchMode, fake_mode, is_fake, is_written_to, without_modes
from weights.records.manifest import Component

METHODS: Final = ("forward", "encode", "decode")  # of a module, that pipelines call
_HOST: Final = torch.device("cpu")  # where rehearsals run
_LEAST_TEXT: Final = 64  # bytes
_WORD: Final = "a "
_READ: Final = 1024  # numbers of a tensor that pipelines may read themselves: the statistics of a VAE's latents
_DEPTH: Final = 4  # of objects in results
_MOST_LAYERS: Final = 128  # of a language model
_MAX_RECORDED: Final = 256  # calls of a structure
_MOST_VALUES: Final = 2**20  # of a tensor, that a forward may ask for
# Attributes of tensors: of the rehearsal's, whose values nobody knows, and of fake ones, whose values somebody does.
_MADE_UP: Final = "atelier_made_up"
_VALUES: Final = "atelier_values"
_BY_VALUES: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A call of a module: the bytes that it takes at most at once, and the form of its result, as fake tensors."""

    nbytes: int
    result: Any


class CallTwin:
    """A stock pipeline without weights, whose calls are rehearsed as they would run on `device`. Thread-safe.

    `components` are all its modules, whose skeletons are in `folder`. Raises EngineError for what cannot be built.
    """

    def __init__(
        self, class_name: str, components: Mapping[str, Component], folder: Path, device: torch.device
    ) -> None:
        modules = {
            name: self._stand_in(name, weightless(component, folder / component.folder, _READ))
            for name, component in components.items()
        }
        self._model = StockModel(class_name, folder, modules)
        self._inputs = CallInputs(self._model.cls)
        self._device = device
        self._lock = threading.Lock()
        self._recorded: dict[str, _Recorded] = {}
        self._asking: set[str] = set()  # methods whose recordings need values
        self._bytes: dict[str, int] = {}  # of the rehearsal that runs
        self.unplanned: dict[str, str] = {}  # why, by module and method; of `__call__` itself, by its name

    def plan_call(self, request: StockRequest) -> dict[str, int]:
        """Return the most bytes that each method of a module takes in the request's call, as "vae.decode".

        Those that could not be recorded are not among them (`unplanned` tells why), and neither is what comes after
        the place where a rehearsal ends for the values that it lacks. Takes up to seconds.
        """
        with self._lock:
            self._bytes = {}
            try:
                self._rehearse(request)
            except EngineError:
                return {}  # the call itself will say so
            except Exception as error:  # of any class that asks for what zeros do not have
                self.unplanned.setdefault("__call__", f"{type(error).__name__}: {error}")
            return self._bytes

    def _rehearse(self, request: StockRequest) -> None:
        arguments = self._inputs.arguments_of(request)
        pipeline = self._model.create_pipeline(request.scheduler, request.scheduler_options)
        for one in (pipeline, *(part for part in vars(pipeline).values() if hasattr(part, "progress_bar"))):
            one.set_progress_bar_config(disable=True)
        if request.audio:
            arguments |= self._inputs.audio_of(request, sample_rate(pipeline), audio_channels(pipeline))
        borrowed = BorrowedModules(list(self._model.modules.values()))
        borrowed.take()
        try:
            with torch.no_grad(), _HostCode():
                pipeline(**arguments)
        finally:
            borrowed.end()

    def _stand_in(self, name: str, module: nn.Module) -> nn.Module:
        """Return the module itself, which has its calls recorded."""
        own: dict[str, Callable[..., Any]] = {}
        for method in METHODS:
            if (stock := getattr(type(module), method, None)) is not None:
                own["__call__" if method == "forward" else method] = self._recording(f"{name}.{method}", method, stock)
        return with_own(module, _HOST, own)

    def _recording(self, entry: str, method: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)  # some ask what it takes
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            dtype = next((one.dtype for one in module.parameters()), None)  # a VAE may be made float32
            key = f"{entry} {dtype} {torch.is_grad_enabled()} {_form((args, kwargs))}"
            if entry in self._asking:
                key += _values_form((args, kwargs))
            if key not in self._recorded:
                self._recorded[key] = self._record(entry, method, module, args, kwargs)
                while len(self._recorded) > _MAX_RECORDED:
                    self._recorded.pop(next(iter(self._recorded)))
            found = self._recorded[key]
            if found.nbytes:
                self._bytes[entry] = max(found.nbytes, self._bytes.get(entry, 0))
            return _mapped(found.result, _made_up)

        return call

    def _record(self, entry: str, method: str, module: nn.Module, args: Any, kwargs: Any) -> _Recorded:
        try:
            if entry not in self._asking:  # modules count more memory for what they cannot ask
                with contextlib.suppress(Exception):
                    return self._record_call(method, module, args, kwargs, knows_values=False)
            found = self._record_call(method, module, args, kwargs, knows_values=True)
        except Exception as error:  # of any operation of a module that fake tensors have no rule for
            self.unplanned.setdefault(entry, str(error).strip().partition("\n")[0])
            return _Recorded(0, _guessed(module, (args, kwargs)))
        self._asking.add(entry)
        return found

    def _record_call(self, method: str, module: nn.Module, args: Any, kwargs: Any, *, knows_values: bool) -> _Recorded:
        mode, results, is_differentiated = fake_mode(), list[Any](), torch.is_grad_enabled()
        twin = fake_copy(module, mode, self._device)
        twin.__class__ = type(module).__mro__[1]
        args, kwargs = _mapped((args, kwargs), lambda one: self._fake(one, mode, knows_values))
        run = getattr(twin, method) if method != "forward" else twin
        values = _KnownValues() if knows_values else contextlib.nullcontext()

        def call() -> Any:
            with _Arrivals((args, kwargs)), torch.set_grad_enabled(is_differentiated), values:
                results.append(run(*args, **kwargs))  # with what is kept for its derivative
            return results

        found = record(call, Recorder(self._device, is_fake=True), {}, mode)
        return _Recorded(found.eager_peak(), results[0])

    def _fake(self, tensor: torch.Tensor, mode: AbstractContextManager[Any], knows_values: bool) -> torch.Tensor:
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
        if knows_values and _is_known(tensor):
            setattr(fake, _VALUES, tensor.detach().clone())
        return fake.requires_grad_(tensor.requires_grad)


def stretched(request: StockRequest) -> StockRequest:
    """Return the request with texts that have at least as many tokens, and are the same for many requests."""
    texts = {name: _stretched(text) for name, text in request.fields.items() if isinstance(text, str)}
    return replace(request, seed=0, prompt=_stretched(request.prompt), fields={**request.fields, **texts}, texts=None)


def _stretched(text: str) -> str:
    nbytes = max(_LEAST_TEXT, len(text.encode()))
    return _WORD * ((1 << math.ceil(math.log2(nbytes))) // len(_WORD))


def shape_of(request: StockRequest) -> str:
    """Return the key of the shapes of a request's call: equal keys share a plan."""
    plain = stretched(request)
    audio = {name: (sound.rate, sound.samples.shape) for name, sound in plain.audio.items()}
    return repr((plain.prompt, plain.num_images, sorted(plain.fields.items()), _form(plain.images), audio)) + repr(
        (
            sorted(plain.extra.items()),
            plain.scheduler,
            sorted(plain.scheduler_options.items()),
            bool(plain.num_previews),
        )
    )


class _HostCode(DispatchMode):
    """Runs what a rehearsal computes on the host: marks what comes of made-up zeros, and has a stream of its own.

    Pipelines that forget their generator draw from the default stream, which is that of all threads: a rehearsal must
    not change what they make.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = self._run(func, args, kwargs)
        if any(hasattr(one, _MADE_UP) for one in tensors_in((args, kwargs))):
            for one in tensors_in(made):
                setattr(one, _MADE_UP, True)
        return made

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is TO_COPY and args[0].is_meta:  # a weight that the pipeline reads
            return _made_up(args[0].to(kwargs.get("dtype")))
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        try:
            return func.overloadpacket(*args, **{**kwargs, "generator": self._generator})
        except (TypeError, RuntimeError):  # one that takes none
            return torch.zeros_like(next(tensors_in(args)))


class _KnownValues(DispatchMode):
    """Gives a recording the values that are known: of `_VALUES`, of constants, and of what is computed of these alone.

    An operation that gives a number, or as much as its values say, takes them; without them it fails as ever.
    HAZARD: what writes unknown values through a view leaves those of the tensor itself as they were.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for one in args[1] for place in self._places(one)]
        given = list(tensors_in((args, kwargs)))
        is_known = torch.Tag.nondeterministic_seeded not in func.tags and all(map(_is_known, given))
        if func.namespace == "prim" or not is_known:
            if given and is_written_to(func) and hasattr(given[0], _VALUES):
                delattr(given[0], _VALUES)
            return func(*args, **kwargs)
        if not _BY_VALUES.isdisjoint(func.tags):
            return _with_values(_computed(func, args, kwargs), given[0].device)
        made = func(*args, **kwargs)
        if all(one.numel() <= _MOST_VALUES for one in tensors_in(made)):
            for one, values in zip(tensors_in(made), tensors_in(_computed(func, args, kwargs)), strict=True):
                setattr(one, _VALUES, values)
        return made

    def _places(self, index: Any) -> tuple[Any, ...]:
        """Return an index of places for each side of a mask, as the operation itself does; what is none stays."""
        if index is None or index.dtype != torch.bool or not _is_known(index):
            return (index,)
        with without_modes():
            places = _values_of(index).nonzero().unbind(1)
        return tuple(_with_values(places, index.device))


def _is_known(tensor: torch.Tensor) -> bool:
    is_unknown = hasattr(tensor, _MADE_UP) or is_fake(tensor) or tensor.is_meta or tensor.numel() > _MOST_VALUES
    return hasattr(tensor, _VALUES) or not is_unknown


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, _VALUES, tensor).cpu()  # a constant may be on the device


def _number_of(tensor: torch.Tensor) -> Any:
    with without_modes():
        return _values_of(tensor).tolist() if hasattr(tensor, _VALUES) else tensor


def _with_values(values: Any, device: torch.device) -> Any:
    """Return fake tensors on a device in the place of tensors, whose values they have."""

    def fake(one: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(one, device=device)
        setattr(made, _VALUES, one)
        return made

    return _mapped(values, fake)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on its arguments' values, on the host."""
    with without_modes():
        args, kwargs = _mapped((args, kwargs), _values_of)
        return func(*args, **{**kwargs, **({"device": _HOST} if kwargs.get("device") is not None else {})})


class _Arrivals(TorchFunctionMode):
    """Lets a call that moves an argument to a device make a copy of it: pipelines make some of them on the host.

    In a rehearsal all are on the host, so that nobody can tell which. Most that are moved are small, times say.
    """

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self._arguments = {id(one) for one in tensors_in(arguments)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:  # which reads numbers of tensors in lists where no mode sees it
            args = _mapped(args, _number_of)
        made = func(*args, **kwargs)
        if func is not torch.Tensor.to or id(made) not in self._arguments:
            return made
        is_move = any(isinstance(one, torch.device | str) for one in (*args, *kwargs.values()))
        return made.clone() if is_move else made


def _form(value: Any) -> str:
    """Return the shapes and types of a call's arguments; numbers with a fraction, times say, are all the same."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}{value.requires_grad}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_form, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_form(one)}' for key, one in value.items())}}}"
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    return f"{type(value).__name__}{getattr(value, 'shape', '')}"


def _values_form(value: Any) -> str:
    """Return a digest of the values of masks, ids and grids: tensors of two dimensions, unlike latents and times."""
    digest = hashlib.sha256()
    for one in tensors_in(value):
        if one.ndim == 2 and _is_known(one):
            digest.update(one.detach().to(torch.float64).numpy().tobytes())
    return digest.hexdigest()


def _made_up(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros like what a call of a module would have made."""
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    setattr(made, _MADE_UP, True)
    return made


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = 0) -> Any:
    """Return a copy of arguments or a result with its tensors changed, those in attributes of objects too."""
    again = functools.partial(_mapped, change=change, depth=depth + 1)
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return value._make(map(again, value)) if hasattr(value, "_make") else type(value)(map(again, value))
    if isinstance(value, dict):
        changed = {key: again(one) for key, one in value.items()}
        return type(value)(**changed) if hasattr(value, "to_tuple") else changed
    if depth > _DEPTH or not hasattr(value, "__dict__") or isinstance(value, nn.Module | type | FunctionType):
        return value
    copied = copy.copy(value)
    vars(copied).update({name: again(one) for name, one in vars(value).items()})
    return copied


class _Guess(tuple[torch.Tensor]):
    """The result of a call that cannot be recorded, by the names that libraries have for it."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else super().__getitem__(key)

    @property
    def sample(self) -> torch.Tensor:
        return self[0]

    last_hidden_state = sample

    @property
    def hidden_states(self) -> tuple[torch.Tensor, ...]:
        return (self[0],) * _MOST_LAYERS


def _guessed(module: Any, arguments: Any) -> _Guess:
    """Return the usual output of a module: the size of its first tensor, or a vector for each token of a text."""
    first = next(tensors_in(arguments), torch.zeros(1))
    config = getattr(module.config, "text_config", module.config)
    if not first.is_floating_point() and (width := getattr(config, "hidden_size", None)):
        first = torch.zeros(*first.shape, width, dtype=module.dtype)
    elif first.ndim > 3 and (channels := getattr(config, "out_channels", None)):
        first = torch.zeros(first.shape[0], channels, *first.shape[2:], dtype=first.dtype)
    return _Guess([first])
