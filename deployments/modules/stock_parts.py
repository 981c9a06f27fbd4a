"""The parts of a pipeline that diffusers' own code runs, as plain modules: the worker builds them, but for those that
only encode its text, which are the text encoders' where the class lets another process do that.

A text encoder that a family's pipeline shares with it is another module there, in the form that the text encoders
need. Their weights are the same memory.
"""

from __future__ import annotations

from typing import Final

from deployments.engines.stock.known import is_stock_class, knows_class
from deployments.engines.stock.text_parts import text_parts
from weights.records.manifest import Component, Manifest

# Before the `parts_hash` of a component, which makes it a module of its own.
_MARK: Final = "as diffusers' own pipelines have it"
_TEXT_MARK: Final = f"{_MARK}, for their texts"
_WITHOUT_MARK: Final = ("diffusers", "peft")  # of these there is only one form


def with_stock_parts(manifest: Manifest) -> Manifest:
    """Return the manifest as replicas use it: the parts of a stock pipeline are told by `is_stock_part`."""
    class_name = manifest.class_name or ""
    if manifest.kind != "diffusion" or not is_stock_class(class_name):
        return manifest
    apart = text_parts(class_name) & manifest.components.keys() if knows_class(class_name) else frozenset()
    if any(manifest.components[name].library in _WITHOUT_MARK for name in apart) or _is_packed(manifest):
        apart = frozenset()
    components = {name: _marked(component, name in apart) for name, component in manifest.components.items()}
    return manifest.model_copy(update={"components": components})


def _is_packed(manifest: Manifest) -> bool:
    """Return whether a part has blocks of quantized weights, which are built otherwise than from names and shapes."""
    return any(part.format == "gguf" for part in manifest.components.values())


def is_stock_part(component: Component) -> bool:
    """Return whether it belongs to a stock pipeline, and is no module that others have in the same form."""
    return (component.parts_hash or "").startswith(_MARK)


def is_stock_text(component: Component) -> bool:
    """Return whether it is a stock part that only encodes texts, and so need not be where the others are."""
    return (component.parts_hash or "").startswith(_TEXT_MARK)


def _marked(component: Component, is_text: bool) -> Component:
    if component.library in _WITHOUT_MARK or (component.class_name or "").endswith("SafetyChecker"):
        return component
    mark = _TEXT_MARK if is_text else _MARK
    return component.model_copy(update={"parts_hash": f"{mark} {component.parts_hash or ''}"})
