"""The page's form of a workflow, as files and PNGs have it, to nodes: what the page does before it sends a prompt.

Subgraphs are opened: ids become paths, `105:11`. Muted, bypassed and virtual nodes are gone, and links go through them.
A widget's value comes from the outer link, else from the host of its subgraph, else from the node itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deployments.workflows.kinds import Input, Kind, flat_inputs
from deployments.workflows.records import MAX_NODES, Link, Node, Workflow, WorkflowError
from deployments.workflows.table import KINDS

_MUTED: Final = 2
_BYPASSED: Final = 4
_FROM_HOST: Final = "-10"  # the id that stands for a subgraph's inputs
_TO_HOST: Final = "-20"
_MAX_DEPTH: Final = 32  # of subgraphs in subgraphs
_MAX_STEPS: Final = 10_000  # of one link through nodes that are not sent
_CONTROLS: Final = ("fixed", "increment", "decrement", "randomize", "increment-wrap")
_NOTES: Final = ("Note", "MarkdownNote")
_VIRTUAL: Final = (*_NOTES, "Reroute", "PrimitiveNode", "SetNode", "GetNode")
_GROUP: Final = re.compile(r"(?<!\\)\{([^{}]*)(?<!\\)\}")
_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Slot:
    name: str
    type: str
    link: Any
    is_widget: bool


@dataclass(frozen=True, slots=True)
class _Saved:
    """A node as the page saved it."""

    id: str
    type: str
    title: str
    mode: int
    inputs: tuple[_Slot, ...]
    outputs: tuple[str, ...]  # their types
    values: Any  # widgets_values
    has_proxies: bool


@dataclass(frozen=True, slots=True)
class _Edge:
    key: str
    origin: str
    origin_slot: int
    target: str
    target_slot: int


@dataclass(frozen=True, slots=True)
class _Graph:
    """The root, or the definition of a subgraph: `inputs` are the names of its host's slots, and `from_host` and
    `to_host` the links at its edge, by the slot."""

    nodes: Mapping[str, _Saved]
    edges: Mapping[str, _Edge]
    inputs: tuple[str, ...]
    from_host: Mapping[int, Sequence[_Edge]]
    to_host: Mapping[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """One use of a graph: its host, and where that stands."""

    graph: _Graph
    prefix: str
    host: _Saved | None = None
    outer: _Place | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _Literal:
    value: Any


def read_page_form(document: Mapping[str, Any], draws: random.Random | None) -> Workflow:
    """Return the nodes that the page would send. Raises WorkflowError."""
    definitions = document.get("definitions")
    found = definitions.get("subgraphs") if isinstance(definitions, Mapping) else None
    subgraphs = {str(one.get("id")): _graph(one) for one in _objects(found)}
    page = _Page(subgraphs, draws)
    return Workflow({node.id: node for node in page.nodes(_Place(_graph(document), ""))})


class _Page:
    def __init__(self, subgraphs: Mapping[str, _Graph], draws: random.Random | None) -> None:
        self._subgraphs = subgraphs
        self._draws = draws
        self._places: dict[tuple[int, str], _Place] = {}
        self._widget_slots: dict[tuple[int, int], bool] = {}
        self._number = 0

    def nodes(self, root: _Place) -> Iterator[Node]:
        waiting = [root]
        while waiting:
            place = waiting.pop()
            for saved in place.graph.nodes.values():
                self._number += 1
                if self._number > MAX_NODES:
                    raise WorkflowError(f"more than {MAX_NODES} nodes with those of subgraphs", "invalid_prompt")
                if saved.mode in (_MUTED, _BYPASSED) or saved.type in _VIRTUAL:
                    continue
                if saved.type in self._subgraphs:
                    waiting.append(self._inside(place, saved))
                else:
                    yield self._node(place, saved)

    def _inside(self, place: _Place, host: _Saved) -> _Place:
        """Return the place of a host's subgraph, the same one each time."""
        key = (id(place), host.id)
        if key not in self._places:
            if place.depth >= _MAX_DEPTH:
                raise WorkflowError(f"subgraphs in subgraphs, deeper than {_MAX_DEPTH}", "invalid_prompt")
            graph = self._subgraphs[host.type]
            self._places[key] = _Place(graph, f"{place.prefix}{host.id}:", host, place, place.depth + 1)
        return self._places[key]

    def _node(self, place: _Place, saved: _Saved) -> Node:
        inputs: dict[str, Any] = {}
        kind = KINDS.get(saved.type)
        if kind is not None:
            inputs |= self._widgets(kind, saved)
        for slot in saved.inputs:
            if slot.link is None:
                continue
            source = self._source(place, slot.link, slot.type)
            edge = place.graph.edges.get(_key(slot.link))
            if source is None and not slot.is_widget and edge is not None and edge.origin == _FROM_HOST:
                source = self._of_widget(place, edge.origin_slot)
            if isinstance(source, _Literal):
                inputs[slot.name] = _sent(source.value)
            elif source is not None:
                inputs[slot.name] = source
        return Node(place.prefix + saved.id, saved.type, saved.title or saved.type, inputs)

    def _widgets(self, kind: Kind, saved: _Saved) -> dict[str, Any]:
        values = {name: self._shown(one, value) for name, one, value in widget_values(kind, saved.values)}
        return {name: _sent(value) for name, value in values.items()}

    def _shown(self, one: Input, value: Any) -> Any:
        """Return a text as the page sends it: without comments, with one of the words of `{a|b}`."""
        if not one.picks or not isinstance(value, str):
            return value
        bare = _COMMENT.sub("", value)
        return bare if self._draws is None else pick_words(bare, self._draws)

    def _source(self, place: _Place, link: Any, type: str) -> Link | _Literal | None:
        """Return the source of a link: a node that is sent, a literal, or nothing."""
        for _ in range(_MAX_STEPS):
            edge = place.graph.edges.get(_key(link))
            if edge is None:
                return None
            if edge.origin == _FROM_HOST:
                return self._from_host(place, edge.origin_slot)
            origin = place.graph.nodes.get(edge.origin)
            if origin is None or origin.mode == _MUTED or origin.type in _NOTES:
                return None
            if origin.mode == _BYPASSED:
                through = bypassing_slot(origin, edge.origin_slot, type)
                if through is None or through.link is None:
                    return None
                link = through.link
            elif origin.type == "Reroute":
                if not origin.inputs or origin.inputs[0].link is None:
                    return None
                link = origin.inputs[0].link
            elif origin.type == "PrimitiveNode":
                return _Literal(origin.values[0]) if isinstance(origin.values, list) and origin.values else None
            elif origin.type == "GetNode":
                stored = _set_node(place, origin)
                if stored is None:
                    raise WorkflowError(f"node {place.prefix}{origin.id}: no SetNode has its name", "invalid_prompt")
                place, link = stored
            elif origin.type == "SetNode":
                link = origin.inputs[0].link if origin.inputs else None
            elif origin.type in self._subgraphs:
                place = self._inside(place, origin)
                link = place.graph.to_host.get(edge.origin_slot)
                if link is None:
                    return None
            else:
                return Link(place.prefix + origin.id, edge.origin_slot)
        raise WorkflowError("links go in a circle through nodes that only hand on", "dependency_cycle")

    def _from_host(self, place: _Place, slot: int) -> Link | _Literal | None:
        """Return the source of a subgraph's input: the link outside, or the value that its host keeps."""
        if place.host is None or place.outer is None or not 0 <= slot < len(place.graph.inputs):
            return None
        name = place.graph.inputs[slot]
        outside = next((one for one in place.host.inputs if one.name == name), None)
        if outside is not None and outside.link is not None:
            # A link from a muted node gives nothing, and then the widget keeps its value.
            source = self._source(place.outer, outside.link, outside.type)
            if source is not None:
                return source
        if place.host.has_proxies or not isinstance(place.host.values, list):
            return None
        promoted = [at for at in range(len(place.graph.inputs)) if self._feeds_widget(place.graph, at, 0)]
        if slot in promoted and promoted.index(slot) < len(place.host.values):
            return _Literal(place.host.values[promoted.index(slot)])
        return None

    def _of_widget(self, place: _Place, slot: int) -> _Literal | None:
        """Return the value that an inner widget keeps, which other inputs behind the same slot read as the host's."""
        for edge in place.graph.from_host.get(slot, ()):
            target = place.graph.nodes.get(edge.target)
            taken = next((one for one in target.inputs if _key(one.link) == edge.key), None) if target else None
            kind = KINDS.get(target.type) if target is not None else None
            if target is None or taken is None or kind is None or not taken.is_widget:
                continue
            found = next((value for name, _, value in widget_values(kind, target.values) if name == taken.name), None)
            if found is not None:
                return _Literal(found)
        return None

    def _feeds_widget(self, graph: _Graph, slot: int, depth: int) -> bool:
        """Return whether an input of a subgraph goes to a widget of an inner node, or of one further inside."""
        key = (id(graph), slot)
        if key not in self._widget_slots:
            self._widget_slots[key] = False  # of a subgraph in itself
            self._widget_slots[key] = any(self._is_widget(graph, edge, depth) for edge in graph.from_host.get(slot, ()))
        return self._widget_slots[key]

    def _is_widget(self, graph: _Graph, edge: _Edge, depth: int) -> bool:
        target = graph.nodes.get(edge.target)
        taken = next((one for one in target.inputs if _key(one.link) == edge.key), None) if target else None
        if target is None or taken is None or depth > _MAX_DEPTH:
            return False
        inner = self._subgraphs.get(target.type)
        if taken.is_widget or inner is None or taken.name not in inner.inputs:
            return taken.is_widget
        return self._feeds_widget(inner, inner.inputs.index(taken.name), depth + 1)


def widget_values(kind: Kind, values: Any) -> Iterator[tuple[str, Input, Any]]:
    """Yield the name, input and saved value of each widget, those of a dynamic choice behind it.

    Widgets that are newer than the file have their defaults.
    """
    if isinstance(values, Mapping):
        given = dict(values)
        for one in flat_inputs(kind.inputs, lambda one: given.get(one.name, one.default)):
            if one.is_widget and (value := given.get(one.name, one.default)) is not None:
                yield one.name, one, value
        return
    waiting = list(values) if isinstance(values, list) else []
    waiting.reverse()
    read: dict[str, Any] = {}

    def take(one: Input) -> Any:
        if one.name not in read:
            # A word where a number belongs is the next widget's: this one is newer than the file.
            is_newer = not waiting or (
                one.type in ("INT", "FLOAT") and _is_word(waiting[-1]) and one.default is not None
            )
            read[one.name] = one.default if is_newer else waiting.pop()
            if one.has_control and waiting and waiting[-1] in _CONTROLS:
                waiting.pop()
        return read[one.name]

    for one in flat_inputs(kind.inputs, take):
        if one.is_widget and (value := take(one)) is not None:
            yield one.name, one, value


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and not any(sign.isdigit() for sign in value) and value not in _CONTROLS


def bypassing_slot(node: _Saved, output: int, type: str) -> _Slot | None:
    """Return the input that a bypassed node hands on from one of its outputs to a consumer of a type."""
    inputs = node.inputs
    if not inputs:
        return None
    if type in ("*", ""):
        return inputs[output] if output < len(inputs) else inputs[0]
    given = node.outputs[output] if output < len(node.outputs) else "*"
    if output < len(inputs) and _fits(inputs[output].type, given) and _fits(inputs[output].type, type):
        return inputs[output]
    exact = next((one for one in inputs if one.type == type), None)
    return exact or next((one for one in inputs if _fits(one.type, type)), None)


def pick_words(text: str, draws: random.Random) -> str:
    r"""Return a text with one of the words of each `{a|b}`, also inside one another; `\{` is a brace."""
    for _ in range(_MAX_DEPTH):  # from the inside out: a group without braces in it is done first
        text, number = _GROUP.subn(lambda found: draws.choice(found[1].split("|")), text)
        if not number:
            break
    return text.replace("\\{", "{").replace("\\}", "}")


def _fits(one: str, other: str) -> bool:
    return "*" in (one, other) or "" in (one, other) or bool(set(one.split(",")) & set(other.split(",")))


def _set_node(place: _Place, getter: _Saved) -> tuple[_Place, Any] | None:
    name = getter.values[0] if isinstance(getter.values, list) and getter.values else None
    around: _Place | None = place
    while around is not None:
        for node in around.graph.nodes.values():
            if node.type == "SetNode" and isinstance(node.values, list) and node.values and node.values[0] == name:
                return (around, node.inputs[0].link) if node.inputs else None
        around = around.outer
    return None


def _sent(value: Any) -> Any:
    """Return a literal as the API's form has it, where a bare list would be a link."""
    return {"__value__": value} if isinstance(value, list) else value


def _graph(document: Mapping[str, Any]) -> _Graph:
    nodes = {}
    for node in _objects(document.get("nodes")):
        read = _saved(node)
        nodes[read.id] = read
    links = document.get("links") or ()
    edges = [edge for edge in map(_edge, links if isinstance(links, list) else ()) if edge is not None]
    from_host: dict[int, list[_Edge]] = {}
    for edge in edges:
        if edge.origin == _FROM_HOST:
            from_host.setdefault(edge.origin_slot, []).append(edge)
    to_host = {edge.target_slot: edge.key for edge in reversed(edges) if edge.target == _TO_HOST}
    names = tuple(str(one.get("name")) for one in _objects(document.get("inputs")))
    return _Graph(nodes, {edge.key: edge for edge in edges}, names, from_host, to_host)


def _saved(node: Mapping[str, Any]) -> _Saved:
    properties = node.get("properties")
    title = node.get("title")
    mode = node.get("mode")
    return _Saved(
        id=str(node.get("id")),
        type=str(node.get("type")),
        title=title if isinstance(title, str) else "",
        mode=mode if isinstance(mode, int) else 0,
        inputs=tuple(
            _Slot(str(one.get("name")), str(one.get("type")), one.get("link"), one.get("widget") is not None)
            for one in _objects(node.get("inputs"))
        ),
        outputs=tuple(str(one.get("type")) for one in _objects(node.get("outputs"))),
        values=node.get("widgets_values"),
        has_proxies=isinstance(properties, Mapping) and bool(properties.get("proxyWidgets")),
    )


def _edge(saved: Any) -> _Edge | None:
    if isinstance(saved, Mapping):
        names = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
        fields: Sequence[Any] = [saved.get(name) for name in names]
    elif isinstance(saved, list) and len(saved) >= 5:
        fields = saved[:5]
    else:
        return None
    key, origin, origin_slot, target, target_slot = fields
    if not isinstance(origin_slot, int) or not isinstance(target_slot, int):
        return None
    return _Edge(_key(key), str(origin), origin_slot, str(target), target_slot)


def _key(link: Any) -> str:
    return str(link)


def _objects(values: Any) -> list[Mapping[str, Any]]:
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(one, Mapping) for one in values):
        raise WorkflowError("expected a list of objects: nodes, their inputs and outputs, subgraphs", "invalid_prompt")
    return values
