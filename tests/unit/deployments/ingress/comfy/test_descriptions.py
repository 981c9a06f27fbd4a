"""Descriptions of nodes as ComfyUI's own clients read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.workflows import FakeBackend

from deployments.ingress.comfy.descriptions import describe_kind
from deployments.workflows.kinds import (
    Input,
    Kind,
    Output,
    boolean,
    choice,
    dynamic,
    file,
    growing,
    integer,
    link,
    number,
    text,
)


def described(one: Input) -> Any:
    kind = Kind("K", (one,), (), dict)
    return describe_kind(kind, FakeBackend(), ["up.png"])["input"]["required"][one.name]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (integer("i", 0, 0, 9), ["INT", {"default": 0, "min": 0, "max": 9}]),
        (integer("seed", 1, 0, 9), ["INT", {"default": 1, "min": 0, "max": 9, "control_after_generate": True}]),
        (number("f", 0.5), ["FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0}]),
        (boolean("b"), ["BOOLEAN", {"default": False}]),
        (text("t"), ["STRING", {"default": ""}]),
        (
            text("t", "x", multiline=True, picks=True),
            ["STRING", {"default": "x", "multiline": True, "dynamicPrompts": True}],
        ),
        (link("l", "INT"), ["INT", {"forceInput": True}]),
        (link("l", "IMAGE"), ["IMAGE", {}]),
        (choice("c", ("a", "b"), "b"), [["a", "b"], {"default": "b"}]),
        (file("lora", "loras"), [["ink.safetensors"], {}]),
        (Input("image", "COMBO"), [["up.png"], {"image_upload": True}]),
        (Input("device", "COMBO", "cpu"), [["cpu"], {"default": "cpu"}]),
        (Input("device", "COMBO"), [[], {}]),
        (
            dynamic("d", {"a": (integer("i", 0, 0, 9),), "b": ()}),
            [
                "COMFY_DYNAMICCOMBO_V3",
                {
                    "options": [
                        {"key": "a", "inputs": {"required": {"i": ["INT", {"default": 0, "min": 0, "max": 9}]}}},
                        {"key": "b", "inputs": {"required": {}}},
                    ]
                },
            ],
        ),
        (
            growing("g", "IMAGE", ("x", "y", "z"), 2),
            [
                "COMFY_AUTOGROW_V3",
                {"template": {"input": {"required": {"x": ["IMAGE", {}]}}, "names": ["x", "y", "z"], "min": 2}},
            ],
        ),
    ],
)
def test_an_input_is_described_by_its_type_and_its_bounds(one: Input, expected: Any) -> None:
    assert described(one) == expected


def test_a_node_is_described_with_its_inputs_apart() -> None:
    needed, free = integer("i"), integer("j", required=False)
    kind = Kind("K", (free, needed), (Output("IMAGE"), Output("INT", "count", is_list=True)), dict, category="c")
    found = describe_kind(kind, FakeBackend(), ())
    assert found["input_order"] == {"required": ["i"], "optional": ["j"]}
    assert list(found["input"]) == ["required", "hidden", "optional"]
    assert (found["output"], found["output_is_list"], found["output_name"]) == (
        ["IMAGE", "INT"], [False, True], ["IMAGE", "count"],
    )  # fmt: skip
    assert (found["name"], found["category"], found["output_node"]) == ("K", "c", False)
    bare = describe_kind(replace(kind, inputs=(needed,), is_output=True), FakeBackend(), ())
    assert (list(bare["input"]), list(bare["input_order"]), bare["output_node"]) == (
        ["required", "hidden"],
        ["required"],
        True,
    )
