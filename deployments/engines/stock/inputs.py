"""A request's arguments for the `__call__` of a pipeline class, by its parameters' names and annotations.

Fields of a request go to the parameter of their name, `extra` to the others. Open options are not passed:
defaults are those of the class.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Union

import numpy as np
import PIL.Image
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from deployments.engines.records.protocol import EngineError, StockRequest
from weights.memory.devices import host_generator

_ATOMS: Final = (bool, int, float, str, type(None))
_CONTAINERS: Final = (list, tuple, dict)
_NUM_IMAGES: Final = ("num_images_per_prompt", "num_images", "batch_size")
# The engine's own parameters: the form of images, the callback of steps, the random stream.
_OWN: Final = frozenset({"self", "generator", "output_type", "return_dict", "callback", "callback_steps"})
_OUTPUT_TYPE: Final = "np"  # before rounding: numbers that are not finite can be seen
# Images by name, where the annotation has only tensors: pipelines pass them to an image processor.
_IMAGES: Final = ("image", "last_image", "mask_image", "control_image", "control_mask")
_VIDEO: Final = "video"  # the same for frames
# The tensors of audio, with their axes: channels and samples, some in a batch. One of them comes with its rate.
_AUDIO: Final[Mapping[str, int]] = {
    "audio": 3,
    "initial_audio_waveforms": 3,
    "reference_audio": 2,
    "src_audio": 2,
}
_AUDIO_RATES: Final[Mapping[str, str]] = {"initial_audio_waveforms": "initial_audio_sampling_rate"}
_MAX_SHOWN: Final = 60
_MAX_TOKENS: Final = 4096


class CallInputs:
    """The parameters of a pipeline class's `__call__` for requests. Holds no request."""

    def __init__(self, cls: type[Any]) -> None:
        self._name = cls.__name__
        call: Callable[..., Any] = cls.__call__
        self._parameters = {
            name: parameter
            for name, parameter in inspect.signature(call).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        self._types = _type_hints(call) | {"self": Any}
        self._num_images = next((name for name in _NUM_IMAGES if name in self._parameters), None)
        kinds = {name: _picture_kinds(name, self._types.get(name)) for name in self._parameters}
        self._images = {name: kind for name, kind in kinds.items() if kind}
        self._audio = {
            name: axes
            for name, axes in _AUDIO.items()
            if name in self._parameters and torch.Tensor in _members(self._types.get(name))
        }

    def arguments_of(self, request: StockRequest) -> dict[str, Any]:
        """Return the keyword arguments of a request.

        Raises EngineError naming surplus and missing arguments, and all that the class takes.
        """
        given: dict[str, Any] = {"prompt": request.prompt} if "prompt" in self._parameters else {}
        given |= self._of_fields(request) | self._of_images(request) | self._of_extra(request.extra)
        given |= self.audio_of(request)
        if lacking := [name for name in self._required() if name not in given]:
            raise EngineError(f"{self._name} needs {', '.join(lacking)}; {self.describe()}")
        if "generator" in self._parameters:
            given["generator"] = host_generator(request.seed)
        if "output_type" in self._parameters:
            given["output_type"] = _OUTPUT_TYPE
        return given

    def takes(self, name: str) -> bool:
        """Return whether the class's call has a parameter of this name."""
        return name in self._parameters

    def audio_of(self, request: StockRequest, rate: int | None = None, channels: int | None = None) -> dict[str, Any]:
        """Return the audio arguments at the rate and with the channels of a model; None: unchanged.

        Raises EngineError.
        """
        found: dict[str, Any] = {}
        for name, sound in request.audio.items():
            axes = self._audio.get(name)
            if axes is None:
                known = ", ".join(self._audio) or "none"
                raise EngineError(f"{name}: {self._name} takes no such audio (audio that it takes: {known})")
            fitted = sound.fitted(rate or sound.rate, channels)
            samples = torch.from_numpy(np.array(fitted.samples))  # the given array may be read-only
            found[name] = samples if axes == samples.ndim else samples[None]
            if (rate_name := _AUDIO_RATES.get(name)) is not None:
                found[rate_name] = fitted.rate
        return found

    def ignored(self, request: StockRequest) -> tuple[str, ...]:
        """Return warnings about a request's fixed fields without a use in this class."""
        vain = [("prompt", request.prompt.strip()), ("seed", "generator" not in self._parameters)]
        return tuple(
            f"{name} had no effect: {self._name} takes none"
            for name, is_told in vain
            if is_told and not {name, "generator" if name == "seed" else name} & self._parameters.keys()
        )

    def describe(self) -> str:
        """Return a sentence with all options of a request."""
        fields = [name for name in self._parameters if name in (*FIELDS, *self._images, *self._audio)]
        fields += ["n"] if self._num_images else []
        fields += ["seed"] if "generator" in self._parameters else []
        extras = [f"{name}{self._shown_default(name)}" for name in self._extras()][:_MAX_SHOWN]
        return f"it takes {', '.join(fields) or 'nothing'}" + (f"; in extra: {', '.join(extras)}" if extras else "")

    def _of_fields(self, request: StockRequest) -> dict[str, Any]:
        found = {}
        for name, value in request.fields.items():
            if name not in FIELDS or name not in self._parameters:
                raise EngineError(f"{name}: {self._name} takes none; {self.describe()}")
            if name == "max_sequence_length" and value > _MAX_TOKENS:  # classes pad texts to it
                raise EngineError(f"max_sequence_length: {value} tokens, at most {_MAX_TOKENS} are allowed")
            found[name] = list(value) if isinstance(value, tuple) else value
        if self._num_images:
            found[self._num_images] = request.num_images
        elif request.num_images != 1:
            raise EngineError(f"n: {request.num_images} images; {self._name} makes one at a time; {self.describe()}")
        return found

    def _of_images(self, request: StockRequest) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, pictures in request.images.items():
            kinds = self._images.get(name)
            if kinds is None:
                known = ", ".join(self._images) or "none"
                raise EngineError(f"{name}: {self._name} takes no such image (images that it takes: {known})")
            if not isinstance(pictures, tuple):
                image = PIL.Image.fromarray(pictures)
                found[name] = image if "one" in kinds else [image]
            elif "several" in kinds:
                found[name] = [PIL.Image.fromarray(pixels) for pixels in pictures]
            else:
                raise EngineError(f"{name}: {len(pictures)} images; {self._name} takes one")
        return found

    def _of_extra(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        accepted, found = self._extras(), {}
        for name, value in extra.items():
            if name in FIELDS or name == self._num_images:
                raise EngineError(f"extra: {name!r} is a field of the request itself, not of extra")
            if name in self._audio:
                raise EngineError(f"extra: {name} is audio: send it as a WAV file, in `audio` or as a data URL here")
            if name not in accepted:
                raise EngineError(f"extra: {self._name} takes no {name!r}; {self.describe()}")
            found[name] = _checked(name, value, accepted[name])
        return found

    def _extras(self) -> dict[str, Any]:
        """Return the types of the parameters for `extra`."""
        own = {*_OWN, *FIELDS, *([self._num_images] if self._num_images else [])}
        found = {}
        for name in self._parameters.keys() - own:
            if (plain := _plain_part(self._types.get(name, Any))) is not None and not name.startswith("callback"):
                found[name] = plain
        return {name: found[name] for name in self._parameters if name in found}

    def _required(self) -> Collection[str]:
        return [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty and name not in _OWN
        ]

    def _shown_default(self, name: str) -> str:
        default = self._parameters[name].default
        return "" if default is inspect.Parameter.empty or default is None else f" = {default!r:.40}"


# Fields of a request with the name of their parameter.
FIELDS: Final = (
    "prompt",
    "negative_prompt",
    "height",
    "width",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "max_sequence_length",
    "strength",
    "sigmas",
    "timesteps",
)


def _type_hints(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of parameters; an unresolvable one, a name for type checkers say, as it is written."""
    function = inspect.unwrap(call)
    found = dict(inspect.get_annotations(function))
    for name, annotation in found.items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(Exception):
            found |= typing.get_type_hints(alone, vars(sys.modules[function.__module__]))
    return found


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; of anything else itself."""
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _picture_kinds(name: str, annotation: Any) -> frozenset[str]:
    """Return whether a parameter takes "one" image, "several", either, or none.

    A list of what may itself be a list takes the frames of one video as well as those of several.
    """
    members = _members(annotation)
    found = {"one"} if PIL.Image.Image in members else set[str]()
    if any(typing.get_origin(one) is list and PIL.Image.Image in _leaves(one) for one in members):
        found.add("several")
    if found:
        return frozenset(found)
    return frozenset({"one"} if name in _IMAGES else {"several"} if name == _VIDEO else ())


def _leaves(annotation: Any) -> set[Any]:
    """Return the types in lists and unions, at any depth."""
    if typing.get_origin(annotation) is list or len(_members(annotation)) > 1:
        return set[Any]().union(*map(_leaves, typing.get_args(annotation)))
    return {annotation}


def _plain_part(annotation: Any) -> Any:
    """Return the part of an annotation with values in JSON; None if that is only null.

    A parameter without annotation may have any value; a tensor, a function or an image cannot be in `extra`.
    """
    if annotation is Any or annotation is inspect.Parameter.empty:
        return Any
    plain = [_any_length(one) for one in _members(annotation) if _is_plain(one)]
    return None if all(one is type(None) for one in plain) else functools.reduce(operator.or_, plain)


def _any_length(annotation: Any) -> Any:
    """Return `tuple[int]` as the library means it: of any length."""
    inner = typing.get_args(annotation)
    return (
        types.GenericAlias(tuple, (*inner, ...))
        if typing.get_origin(annotation) is tuple and len(inner) == 1
        else annotation
    )


def _is_plain(annotation: Any) -> bool:
    if annotation in _ATOMS or annotation in _CONTAINERS or annotation is Any:
        return True
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return True
    if origin in _CONTAINERS or origin in (Union, types.UnionType):
        return all(one is Ellipsis or _is_plain(one) for one in inner)
    return False


def _checked(name: str, value: Any, type_: Any) -> Any:
    """Return a value of `extra` in its parameter's form. Raises EngineError."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # a handle may bring any object
        raise EngineError(f"extra: {name}: {error}") from None
    try:
        return TypeAdapter(type_, config=ConfigDict(strict=True)).validate_json(text)
    except ValidationError:
        shown = type_.__name__ if isinstance(type_, type) else str(type_).replace("typing.", "")
        raise EngineError(f"extra: {name} is {text[:80]}, expected {shown}") from None
