"""Kinds of nodes as /object_info describes them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from deployments.workflows.backend import Catalog
from deployments.workflows.kinds import Input, Kind

_MODULE: Final = "nodes"
_DYNAMIC: Final = "COMFY_DYNAMICCOMBO_V3"
_GROWING: Final = "COMFY_AUTOGROW_V3"
_UPLOADED: Final = ("image", "audio", "file", "video")  # inputs that name a file of the client's


def describe_kind(kind: Kind, catalog: Catalog, uploads: Sequence[str]) -> dict[str, Any]:
    """Return the description of a kind. `uploads` are the names of the key's input files."""
    required = [one for one in kind.inputs if one.required]
    optional = [one for one in kind.inputs if not one.required]
    described = {"required": _described(required, catalog, uploads), "hidden": {}}
    order = {"required": [one.name for one in required]}
    if optional:
        described["optional"] = _described(optional, catalog, uploads)
        order["optional"] = [one.name for one in optional]
    return {
        "input": described,
        "input_order": order,
        "output": [one.type for one in kind.outputs],
        "output_is_list": [one.is_list for one in kind.outputs],
        "output_name": [one.name or one.type for one in kind.outputs],
        "name": kind.name,
        "display_name": kind.name,
        "description": "",
        "python_module": _MODULE,
        "category": kind.category,
        "output_node": kind.is_output,
    }


def _described(inputs: Iterable[Input], catalog: Catalog, uploads: Sequence[str]) -> dict[str, Any]:
    return {one.name: _input(one, catalog, uploads) for one in inputs}


def _input(one: Input, catalog: Catalog, uploads: Sequence[str]) -> list[Any]:
    if one.grows:
        first = one.grows[0]
        names = [each.name for each in one.grows]
        least = sum(each.required for each in one.grows)
        given = {"required": {first.name: [first.type, {}]}}
        return [_GROWING, {"template": {"input": given, "names": names, "min": least}}]
    if one.options:
        options = [
            {"key": name, "inputs": {"required": _described(inputs, catalog, uploads)}}
            for name, inputs in one.options.items()
        ]
        return [_DYNAMIC, {"options": options}]
    facts: dict[str, Any] = {}
    if one.default is not None:
        facts["default"] = one.default
    if one.minimum is not None:
        facts["min"] = one.minimum
    if one.maximum is not None:
        facts["max"] = one.maximum
    if one.multiline:
        facts["multiline"] = True
    if one.picks:
        facts["dynamicPrompts"] = True
    if one.has_control:
        facts["control_after_generate"] = True
    if one.linked_only and one.type in ("INT", "FLOAT", "STRING", "BOOLEAN"):
        facts["forceInput"] = True
    if one.type != "COMBO":
        return [one.type, facts]
    if one.folder is not None:
        return [list(catalog.files(one.folder)), facts]
    if one.choices:
        return [list(one.choices), facts]
    if one.name in _UPLOADED:
        return [list(uploads), facts | {"image_upload": True}]
    return [[] if one.default is None else [one.default], facts]
