"""The declaration of a kind of node: its inputs, its outputs, and one function.

The function is called with its inputs by name. A dynamic choice comes as a `Choice`, a growing input as a mapping of
what was given; optional inputs that nobody gave are left out where they have no default. It returns a tuple with a
value for each output, or a `Later`, and raises `Refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from deployments.workflows.backend import Folder
from deployments.workflows.values import Later, Shown

MAX_SIDE: Final = 16_384  # as ComfyUI has it for sizes in pixels
MAX_SEED: Final = 2**64 - 1
MAX_GROWN: Final = 100  # inputs that grow from one
WIDGETS: Final = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"})


@dataclass(frozen=True, slots=True)
class Input:
    """An input. `type` is ComfyUI's; several are joined by commas, and `*` is any.

    One of a widget's types is typed in on the page, unless it is `linked_only`; `has_control` says that the page keeps
    a further text behind its value. `folder` gives a COMBO the names of files as choices. `options` are those of a
    dynamic choice: each has inputs of its own. `grows` are the names of inputs that a page adds one by one. One that
    `takes_decoded` takes latents of which only the images are known, one that `takes_videos` those of videos, and one
    that `takes_bytes` images as bytes.
    """

    name: str
    type: str
    default: Any = None
    required: bool = True
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    folder: Folder | None = None
    has_control: bool = False
    linked_only: bool = False
    multiline: bool = False
    picks: bool = False
    options: Mapping[str, tuple[Input, ...]] = field(default_factory=dict)
    grows: tuple[Input, ...] = ()
    takes_decoded: bool = False
    takes_videos: bool = False
    takes_bytes: bool = False

    @property
    def is_widget(self) -> bool:
        """Return whether the page shows a field for it, and saves its value in `widgets_values`."""
        return self.type in WIDGETS and not self.linked_only and not self.grows

    def takes(self, given: str) -> bool:
        """Return whether an output of this type fits."""
        if "*" in (self.type, given):
            return True
        # A choice is a text to ComfyUI, and whoever links one has the text.
        mine, theirs = (
            {"STRING" if one == "COMBO" else one for one in types.split(",")} for types in (self.type, given)
        )
        return not mine.isdisjoint(theirs)


@dataclass(frozen=True, slots=True)
class Output:
    """An output. Where it `is_list`, who takes it is run once for each element."""

    type: str
    name: str = ""
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The value of a dynamic choice, and of the inputs that come with it."""

    name: str
    values: Mapping[str, Any]


class Function(Protocol):
    """The function of a kind."""

    def __call__(self, *args: Any, **inputs: Any) -> tuple[Any, ...] | Shown | Later: ...


class Wanted(Protocol):
    """Says by what is known of a node's inputs which of them are needed."""

    def __call__(self, given: Mapping[str, Any], /) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of node.

    `is_opaque`: its function does not look into images, masks and latents, so a check calls it before they are there.
    `reads_catalog`: it is called with the catalog first. `wants`, where there is one, names the inputs that are still
    needed once all literal ones are known: a switch's branch. With `takes_lists` it gets lists whole. `is_costly`: it
    may take a second, so that a check does not call it.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    function: Function
    is_output: bool = False
    is_opaque: bool = False
    reads_catalog: bool = False
    wants: Wanted | None = None
    takes_lists: bool = False
    is_costly: bool = False
    category: str = ""


def link(name: str, type: str, *, required: bool = True) -> Input:
    """An input that only a link gives."""
    return Input(name, type, required=required, linked_only=True)


def integer(
    name: str, default: int = 0, minimum: int = 0, maximum: int = MAX_SIDE, *, required: bool = True, seed: bool = False
) -> Input:
    """A whole number; a `seed` has the page's control behind it."""
    return Input(name, "INT", default, required, minimum, maximum, has_control=seed or name in ("seed", "noise_seed"))


def number(
    name: str, default: float = 0.0, minimum: float = 0.0, maximum: float = 1.0, *, required: bool = True
) -> Input:
    """A number."""
    return Input(name, "FLOAT", default, required, minimum, maximum)


def text(name: str, default: str = "", *, required: bool = True, multiline: bool = False, picks: bool = False) -> Input:
    """A text; where it `picks`, the page sends one of the words of `{a|b}`, and no comments."""
    return Input(name, "STRING", default, required, multiline=multiline, picks=picks)


def boolean(name: str, default: bool = False, *, required: bool = True) -> Input:
    """True or false."""
    return Input(name, "BOOLEAN", default, required)


def choice(name: str, choices: tuple[str, ...], default: str | None = None, *, required: bool = True) -> Input:
    """One of some words."""
    return Input(name, "COMBO", choices[0] if default is None and choices else default, required, choices=choices)


def file(name: str, folder: Folder, *, required: bool = True) -> Input:
    """The name of a file of a folder."""
    return Input(name, "COMBO", required=required, folder=folder)


def dynamic(name: str, options: Mapping[str, tuple[Input, ...]]) -> Input:
    """A choice, each with inputs of its own: `name.theirs`."""
    return Input(name, "COMBO", next(iter(options)), choices=tuple(options), options=options)


def growing(name: str, type: str, names: tuple[str, ...], minimum: int = 1, *, takes_bytes: bool = False) -> Input:
    """Inputs that a page adds one by one: `name.theirs`. The first `minimum` are required."""
    grown = (link(one, type, required=place < minimum) for place, one in enumerate(names[:MAX_GROWN]))
    return Input(name, type, grows=tuple(replace(one, takes_bytes=takes_bytes) for one in grown))


def flat_inputs(inputs: tuple[Input, ...], choose: Callable[[Input], Any], prefix: str = "") -> Iterator[Input]:
    """Yield the inputs of a node as documents name them: those of a dynamic choice follow it, as `choice.name`.

    `choose` returns the chosen option of a dynamic choice; its name is the full one.
    """
    for one in inputs:
        named = replace(one, name=prefix + one.name) if prefix else one
        if one.grows:
            for grown in one.grows:
                yield replace(grown, name=f"{named.name}.{grown.name}")
            continue
        yield named
        if one.options:
            chosen = choose(named)
            if isinstance(chosen, str) and chosen in one.options:
                yield from flat_inputs(one.options[chosen], choose, f"{named.name}.")


def gathered(inputs: tuple[Input, ...], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arguments of a function from values by flat names: the inverse of `flat_inputs`."""
    arguments: dict[str, Any] = {}
    for one in inputs:
        full = prefix + one.name
        if one.grows:
            grown = {each.name: f"{full}.{each.name}" for each in one.grows}
            arguments[one.name] = {short: values[name] for short, name in grown.items() if name in values}
        elif full in values:
            value = values[full]
            if one.options and isinstance(value, str):
                value = Choice(value, gathered(one.options.get(value, ()), values, f"{full}."))
            arguments[one.name] = value
    return arguments
