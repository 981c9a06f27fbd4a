"""The page's form of a workflow becomes what the page would send: each rule, and both forms of one graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from kit.seeding import seeded_random
from kit.workflows import FakeBackend, Told

from deployments.workflows.page_form import pick_words
from deployments.workflows.reading import read_workflow
from deployments.workflows.records import MAX_NODES, Link, Workflow, WorkflowError
from deployments.workflows.running import run


class Page:
    """A graph as the page saves it: the root, or the definition of a subgraph."""

    def __init__(self, id: str = "", inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> None:
        self.is_subgraph = bool(id)
        self.graph: dict[str, Any] = {"nodes": [], "links": []}
        if id:
            named = {"inputs": [{"name": one} for one in inputs], "outputs": [{"name": one} for one in outputs]}
            self.graph |= {"id": id, **named}

    def add(
        self,
        id: int,
        type: str,
        values: Any = None,
        inputs: tuple[str, ...] = (),
        outputs: tuple[str, ...] = ("*",),
        mode: int = 0,
        **further: Any,
    ) -> Page:
        """Add a node. An input is `name:TYPE`, or `name:TYPE:w` for that of a widget."""
        slots = []
        for one in inputs:
            name, kind, *widget = one.split(":")
            slots.append({"name": name, "type": kind, "link": None} | ({"widget": {"name": name}} if widget else {}))
        node = {"id": id, "type": type, "mode": mode, "inputs": slots, "outputs": [{"type": one} for one in outputs]}
        self.graph["nodes"].append(node | {"widgets_values": values} | further)
        return self

    def link(self, origin: int, slot: int, target: int, name: str | int, type: str = "*") -> Page:
        """Link an output to an input by its name; −10 and −20 are the edge of a subgraph, by slots."""
        key = len(self.graph["links"]) + 100
        target_slot = name
        if isinstance(name, str):
            node = next(one for one in self.graph["nodes"] if one["id"] == target)
            target_slot = next(at for at, one in enumerate(node["inputs"]) if one["name"] == name)
            node["inputs"][target_slot]["link"] = key
        fields = (key, origin, slot, target, target_slot, type)
        names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        self.graph["links"].append(dict(zip(names, fields, strict=True)) if self.is_subgraph else list(fields))
        return self

    def read(self, *subgraphs: Page, draws: random.Random | None = None) -> Workflow:
        return read_workflow(self.document(*subgraphs), draws)

    def document(self, *subgraphs: Page) -> dict[str, Any]:
        return self.graph | {"version": 0.4, "definitions": {"subgraphs": [one.graph for one in subgraphs]}}


def inverted(*, mode: int = 0) -> Page:
    """Return a page with an image, a node that inverts it, and one that saves it."""
    page = Page().add(1, "EmptyImage", [16, 8, 1, 255], outputs=("IMAGE",))
    page.add(2, "ImageInvert", [], ("image:IMAGE",), ("IMAGE",), mode)
    page.add(3, "SaveImage", ["out"], ("images:IMAGE",), ())
    return page.link(1, 0, 2, "image", "IMAGE").link(2, 0, 3, "images", "IMAGE")


def test_widgets_are_named_in_the_order_of_their_kind() -> None:
    workflow = inverted().read()
    assert workflow.nodes["1"].inputs == {"width": 16, "height": 8, "batch_size": 1, "color": 255}
    assert workflow.nodes["3"].inputs == {"filename_prefix": "out", "images": Link("2", 0)}
    assert workflow.nodes["3"].title == "SaveImage"


def test_the_control_behind_a_seed_is_no_input_and_may_lack() -> None:
    page = Page().add(1, "PrimitiveInt", [7, "randomize"]).add(2, "PrimitiveInt", [8])
    page.add(3, "SeedNode", [9, "fixed"], title="my seed")
    nodes = page.read().nodes
    assert [nodes[one].inputs for one in "123"] == [{"value": 7}, {"value": 8}, {"seed": 9}]
    assert nodes["3"].title == "my seed"


def test_a_dynamic_choice_brings_its_own_widgets_behind_it() -> None:
    page = Page().add(1, "ResizeImageMaskNode", ["scale total pixels", 1.5, 8, "area"])
    page.add(2, "ResizeImageMaskNode", ["scale dimensions", 640, 480, "center", "lanczos"])
    nodes = page.read().nodes
    assert nodes["1"].inputs == {
        "resize_type": "scale total pixels",
        "resize_type.megapixels": 1.5,
        "resize_type.multiple": 8,
        "scale_method": "area",
    }
    assert nodes["2"].inputs["resize_type.crop"] == "center"
    assert nodes["2"].inputs["scale_method"] == "lanczos"


def test_values_may_be_a_mapping_and_later_widgets_have_defaults() -> None:
    page = Page().add(1, "EmptyImage", {"width": 32, "color": 3, "upload": "image"}).add(2, "EmptyImage", [64])
    nodes = page.read().nodes
    assert nodes["1"].inputs == {"width": 32, "height": 512, "batch_size": 1, "color": 3}
    assert nodes["2"].inputs == {"width": 64, "height": 512, "batch_size": 1, "color": 0}


def test_a_widget_in_the_middle_that_is_newer_than_the_file_has_its_default() -> None:
    page = Page().add(1, "ResizeImageMaskNode", ["scale total pixels", 1.5, "lanczos"])
    inputs = page.read().nodes["1"].inputs
    assert (inputs["resize_type.multiple"], inputs["scale_method"]) == (1, "lanczos")


def test_a_converted_widget_keeps_its_place_and_the_link_wins() -> None:
    page = Page().add(1, "PrimitiveInt", [24, "fixed"])
    page.add(2, "EmptyImage", [16, 8, 1, 0], ("height:INT:w",)).link(1, 0, 2, "height", "INT")
    assert page.read().nodes["2"].inputs == {"width": 16, "height": Link("1", 0), "batch_size": 1, "color": 0}


def test_a_muted_node_is_gone_and_its_consumer_lacks_it() -> None:
    nodes = inverted(mode=2).read().nodes
    assert "2" not in nodes
    assert nodes["3"].inputs == {"filename_prefix": "out"}


def test_a_bypassed_node_hands_its_input_on() -> None:
    nodes = inverted(mode=4).read().nodes
    assert "2" not in nodes
    assert nodes["3"].inputs["images"] == Link("1", 0)


BYPASSES: list[tuple[tuple[str, ...], tuple[str, ...], int, str, int | None]] = [
    # inputs, outputs, the output that is taken, the consumer's type, the input that goes on
    (("a:MODEL", "b:CLIP"), ("MODEL", "CLIP"), 1, "CLIP", 1),
    (("a:IMAGE", "b:MASK"), ("MASK",), 0, "MASK", 1),
    (("a:MODEL", "b:MODEL"), ("VAE", "MODEL"), 1, "MODEL", 1),
    (("a:INT,FLOAT", "b:INT"), ("STRING", "STRING", "INT"), 2, "INT", 1),
    (("a:STRING", "b:INT,FLOAT"), ("STRING", "STRING", "INT"), 2, "FLOAT", 1),
    (("a:MODEL",), ("IMAGE",), 0, "IMAGE", None),
    (("a:MODEL", "b:VAE"), ("IMAGE", "IMAGE"), 1, "*", 1),
    (("a:MODEL",), ("IMAGE", "IMAGE"), 1, "*", 0),
]


@pytest.mark.parametrize(("inputs", "outputs", "slot", "type", "expected"), BYPASSES)
def test_which_input_a_bypassed_node_hands_on(
    inputs: tuple[str, ...], outputs: tuple[str, ...], slot: int, type: str, expected: int | None
) -> None:
    page = Page().add(2, "Whatever", [], inputs, outputs, 4).add(3, "PreviewAny", [], (f"source:{type}",))
    for at, one in enumerate(inputs):
        page.add(10 + at, "Source").link(10 + at, 0, 2, one.split(":")[0])
    page.link(2, slot, 3, "source", type)
    found = page.read().nodes["3"].inputs.get("source")
    assert found == (None if expected is None else Link(str(10 + expected), 0))


def test_virtual_nodes_are_gone() -> None:
    page = Page().add(1, "PrimitiveNode", [48, "fixed"]).add(9, "MarkdownNote", ["text"]).add(8, "Note", ["text"])
    page.add(2, "EmptyImage", [16, 8, 1, 0], ("width:INT:w",)).link(1, 0, 2, "width", "INT")
    page.add(3, "Reroute", None, (":*",)).add(4, "Reroute", None, (":*",)).link(2, 0, 3, "").link(3, 0, 4, "")
    page.add(5, "SetNode", ["stored"], ("IMAGE:IMAGE",)).link(4, 0, 5, "IMAGE")
    page.add(6, "GetNode", ["stored"]).add(7, "ImageInvert", [], ("image:IMAGE",)).link(6, 0, 7, "image", "IMAGE")
    nodes = page.read().nodes
    assert sorted(nodes) == ["2", "7"]
    assert nodes["2"].inputs["width"] == 48
    assert nodes["7"].inputs == {"image": Link("2", 0)}
    assert page.add(11, "GetNode", ["lost"])
    page.add(12, "ImageInvert", [], ("image:IMAGE",)).link(11, 0, 12, "image")
    with pytest.raises(WorkflowError, match="no SetNode"):
        page.read()


def test_reroutes_in_a_circle_end() -> None:
    page = Page().add(1, "Reroute", None, (":*",)).add(2, "Reroute", None, (":*",)).link(1, 0, 2, "").link(2, 0, 1, "")
    page.add(3, "PreviewAny", [], ("source:*",)).link(1, 0, 3, "source")
    with pytest.raises(WorkflowError, match="circle"):
        page.read()


def scaler(**further: Any) -> Page:
    """Return the definition of a subgraph that scales an image: inputs image, width and height, output the image."""
    inner = Page("scaler", ("image", "width", "height"), ("out",))
    inner.add(
        5,
        "ImageScale",
        ["area", 10, 20, "disabled"],
        ("image:IMAGE", "width:INT:w", "height:INT:w"),
        ("IMAGE",),
        **further,
    )
    inner.link(-10, 0, 5, "image").link(-10, 1, 5, "width").link(-10, 2, 5, "height")
    return inner.link(5, 0, -20, 0)


def hosting(values: Any, **further: Any) -> Page:
    page = Page().add(1, "EmptyImage", [16, 8, 1, 255], outputs=("IMAGE",))
    page.add(2, "scaler", values, ("image:IMAGE", "width:INT:w", "height:INT:w"), ("IMAGE",), **further)
    page.add(3, "SaveImage", ["out"], ("images:IMAGE",), ())
    return page.link(1, 0, 2, "image", "IMAGE").link(2, 0, 3, "images", "IMAGE")


def test_a_subgraph_is_opened_and_its_ids_are_paths() -> None:
    nodes = hosting([]).read(scaler()).nodes
    assert sorted(nodes) == ["1", "2:5", "3"]
    assert nodes["2:5"].inputs["image"] == Link("1", 0)
    assert nodes["3"].inputs["images"] == Link("2:5", 0)
    assert (nodes["2:5"].inputs["width"], nodes["2:5"].inputs["height"]) == (10, 20)


def test_a_hosts_values_are_those_of_its_widgets_in_order() -> None:
    page = hosting([100, 200])
    inputs = page.read(scaler()).nodes["2:5"].inputs
    assert (inputs["width"], inputs["height"]) == (100, 200)
    page.add(4, "PrimitiveInt", [300, "fixed"]).link(4, 0, 2, "width", "INT")
    inputs = page.read(scaler()).nodes["2:5"].inputs
    assert (inputs["width"], inputs["height"]) == (Link("4", 0), 200)


def test_with_proxies_the_inner_values_hold() -> None:
    page = hosting([100, 200], properties={"proxyWidgets": [["5", "width"], ["5", "height"]]})
    inputs = page.read(scaler()).nodes["2:5"].inputs
    assert (inputs["width"], inputs["height"]) == (10, 20)


@pytest.mark.parametrize(("properties", "expected"), [({"proxyWidgets": [["5", "width"]]}, 10), ({}, 100)])
def test_an_input_beside_a_promoted_widget_reads_its_value(properties: dict[str, Any], expected: int) -> None:
    """The host hands its value on to all inner inputs of the slot, of which only the first is a widget's."""
    inner = scaler()
    inner.add(6, "PreviewAny", [None], ("source:*",), ("STRING",)).link(-10, 1, 6, "source")
    node = hosting([100, 200], properties=properties).read(inner).nodes["2:6"]
    assert node.inputs["source"] == expected


def test_two_instances_and_subgraphs_in_subgraphs() -> None:
    outer = Page("outer", ("image", "width"), ("out",))
    outer.add(7, "scaler", [1000, 2000], ("image:IMAGE", "width:INT:w", "height:INT:w"), ("IMAGE",))
    outer.link(-10, 0, 7, "image").link(-10, 1, 7, "width").link(7, 0, -20, 0)
    page = Page().add(1, "EmptyImage", [16, 8, 1, 255], outputs=("IMAGE",))
    for host, values in ((2, [30]), (3, [])):
        page.add(host, "outer", values, ("image:IMAGE", "width:INT:w"), ("IMAGE",)).link(1, 0, host, "image", "IMAGE")
        page.add(10 + host, "PreviewImage", None, ("images:IMAGE",), ()).link(host, 0, 10 + host, "images", "IMAGE")
    nodes = page.read(scaler(), outer).nodes
    assert sorted(nodes) == ["1", "12", "13", "2:7:5", "3:7:5"]
    # The outermost host's value goes before that of the one inside, and that before the node's own.
    assert [(nodes[one].inputs["width"], nodes[one].inputs["height"]) for one in ("2:7:5", "3:7:5")] == [
        (30, 2000),
        (1000, 2000),
    ]
    assert nodes["12"].inputs["images"] == Link("2:7:5", 0)


@pytest.mark.parametrize(("mode", "expected"), [(2, None), (4, Link("1", 0))])
def test_a_muted_or_bypassed_subgraph_hides_what_is_inside(mode: int, expected: Link | None) -> None:
    nodes = hosting([], mode=mode).read(scaler()).nodes
    assert sorted(nodes) == ["1", "3"]
    assert nodes["3"].inputs.get("images") == expected


def test_a_bypassed_node_in_a_subgraph_hands_the_hosts_input_on() -> None:
    nodes = hosting([]).read(scaler(mode=4)).nodes
    assert nodes["3"].inputs["images"] == Link("1", 0)


def test_setters_outside_are_found_inside() -> None:
    inner = Page("inner", (), ()).add(5, "GetNode", ["x"]).add(6, "PreviewAny", [], ("source:*",))
    inner.link(5, 0, 6, "source")
    page = Page().add(1, "PrimitiveInt", [1, "fixed"]).add(2, "SetNode", ["x"], ("INT:INT",)).link(1, 0, 2, "INT")
    nodes = page.add(3, "inner", []).read(inner).nodes
    assert nodes["3:6"].inputs == {"source": Link("1", 0)}


def test_prompts_lose_comments_and_words_are_picked() -> None:
    text = "a {red|{dark|light} blue} cat // comment\n/* more */ \\{kept\\}"
    page = Page().add(1, "CLIPTextEncode", [text])
    read = {str(page.read(draws=random.Random(at)).nodes["1"].inputs["text"]) for at in range(60)}
    assert read == {f"a {color} cat \n {{kept}}" for color in ("red", "dark blue", "light blue")}
    assert page.read().nodes["1"].inputs["text"].startswith("a {red|")
    assert pick_words("{" * 10_000, seeded_random()) == "{" * 10_000


def test_lists_are_sent_wrapped() -> None:
    page = Page().add(1, "StringTrim", [["a", "b"], "Both"])
    assert page.read().nodes["1"].inputs["string"] == {"__value__": ["a", "b"]}


HOSTILE: list[Callable[[], Any]] = [
    lambda: [],
    lambda: None,
    lambda: {"nodes": [1]},
    lambda: {"nodes": [{"id": 1, "type": "x", "inputs": {}}]},
    lambda: {"nodes": [], "definitions": {"subgraphs": "x"}},
    lambda: {"nodes": [{"id": at, "type": "EmptyImage"} for at in range(MAX_NODES + 1)]},
    lambda: {"1": {"class_type": "x", "inputs": []}},
    lambda: {"1": {"class_type": 5}},
    lambda: {"1": {"class_type": "x", "inputs": {"a": ["2"]}}},
    lambda: {"1": {"class_type": "x", "inputs": {"a": ["2", "0"]}}},
    lambda: {"1": {"class_type": "x", "inputs": {f"a{at}": 1 for at in range(300)}}},
    lambda: {"1": {"class_type": "x" * 600, "inputs": {}}},
    lambda: {"1": {"class_type": "x", "inputs": {"a": "x" * 1_000_001}}},
    lambda: {"1": {"class_type": "x", "inputs": {"a": 10**400}}},
    lambda: {str(at): {"class_type": "x"} for at in range(MAX_NODES + 1)},
    lambda: {},
]


@pytest.mark.parametrize("document", HOSTILE)
def test_what_is_no_workflow_is_an_error(document: Callable[[], Any]) -> None:
    with pytest.raises(WorkflowError):
        read_workflow(document())


def test_a_value_may_be_so_deep_and_no_deeper() -> None:
    def read(depth: int) -> Workflow:
        value: Any = {"a": "b"}
        for _ in range(depth - 1):
            value = {"a": value}
        return read_workflow({"1": {"class_type": "x", "inputs": {"a": value}}})

    assert set(read(32).nodes) == {"1"}
    for depth in (33, 200):
        with pytest.raises(WorkflowError, match="the value is too large"):
            read(depth)


def test_subgraphs_that_grow_without_end_are_an_error() -> None:
    itself = Page("itself").add(1, "itself", [])
    with pytest.raises(WorkflowError, match="deeper"):
        Page().add(1, "itself", []).read(itself)
    doubling = [Page(f"s{at}").add(1, f"s{at + 1}", []).add(2, f"s{at + 1}", []) for at in range(30)]
    with pytest.raises(WorkflowError, match="nodes with those of subgraphs"):
        Page().add(1, "s0", []).read(*doubling)
    # Each level's widget has two inner ones: without a memory this would take 2 to the 30th steps.
    feeding = []
    for at in range(30):
        inner = Page(f"f{at}", ("w",), ())
        for id in (1, 2):
            inner.add(id, f"f{at + 1}", [1], ("w:INT",)).link(-10, 0, id, "w")
        feeding.append(inner)
    with pytest.raises(WorkflowError):
        Page().add(1, "f0", [5], ("w:INT",)).read(*feeding)


async def test_both_forms_of_a_drawn_graph_run_the_same() -> None:
    draws = seeded_random()
    api: dict[str, Any] = {}
    page = Page()
    made: list[int] = []
    for id in range(1, 30):
        kind = (
            draws.choice(("PrimitiveInt", "ComfyMathExpression", "ComfySwitchNode", "Reroute"))
            if made
            else "PrimitiveInt"
        )
        if kind == "PrimitiveInt":
            value = draws.randrange(-1000, 1000)
            page.add(id, kind, [value, "fixed"], (), ("INT",))
            api[str(id)] = {"class_type": kind, "inputs": {"value": value}}
        elif kind == "Reroute":
            source = draws.choice(made)
            page.add(id, kind, None, (":*",), ("*",)).link(source, slot_of(page, source), id, "")
            api[str(id)] = api[str(source)]  # the same function of the same values
        elif kind == "ComfySwitchNode":
            one, other, is_on = draws.choice(made), draws.choice(made), draws.random() < 0.5
            page.add(id, kind, [is_on], ("on_false:*", "on_true:*"), ("*",))
            page.link(one, slot_of(page, one), id, "on_false").link(other, slot_of(page, other), id, "on_true")
            inputs = {
                "switch": is_on,
                "on_false": [str(one), slot_in(api, one)],
                "on_true": [str(other), slot_in(api, other)],
            }
            api[str(id)] = {"class_type": kind, "inputs": inputs}
        else:
            one, other = draws.choice(made), draws.choice(made)
            page.add(id, kind, ["(a * 3 + b) % 997"], ("values.a:INT", "values.b:INT"), ("FLOAT", "INT", "BOOLEAN"))
            page.link(one, slot_of(page, one), id, "values.a").link(other, slot_of(page, other), id, "values.b")
            inputs = {"expression": "(a * 3 + b) % 997", "values.a": [str(one), slot_in(api, one)]}
            api[str(id)] = {"class_type": kind, "inputs": inputs | {"values.b": [str(other), slot_in(api, other)]}}
        made.append(id)
    for id in made:
        page.add(100 + id, "PreviewAny", [], ("source:*",)).link(id, slot_of(page, id), 100 + id, "source")
        api[str(100 + id)] = {"class_type": "PreviewAny", "inputs": {"source": [str(id), slot_in(api, id)]}}
    one = await run(read_workflow(page.document()), FakeBackend(), Told())
    assert one == await run(read_workflow(api), FakeBackend(), Told())
    assert len(one) == len(made)


def slot_of(page: Page, id: int) -> int:
    node = next(one for one in page.graph["nodes"] if one["id"] == id)
    return 1 if node["type"] == "ComfyMathExpression" else 0


def slot_in(api: dict[str, Any], id: int) -> int:
    return 1 if api[str(id)]["class_type"] == "ComfyMathExpression" else 0
