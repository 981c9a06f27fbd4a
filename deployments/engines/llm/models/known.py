"""The known language models by their config.json, without torch; `registry.py` builds them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deployments.engines.libraries.library_classes import has_model_type, version
from deployments.engines.llm.models.stock_classes import (
    ATTENTION_LAYERS,
    DRAFTS_FOR,
    MASKED,
    OWN_CACHE,
    PAGED,
    RECURRENT,
    SEEING,
    TEXT_ALONE,
)
from deployments.engines.records.protocol import EngineError
from weights.formats.language_models import CLASS_NAMES
from weights.formats.published_quantization import METHODS
from weights.formats.untrusted import shown
from weights.records.dtypes import GROUP_INT8_METHOD

# The kinds whose frequencies do not depend on the length of the sequence.
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")


def check_config(content: Mapping[str, Any], path: Path, *, is_draft: bool = False) -> str:
    """Return the decoder's class for a config.json read from `path`; for some models it is that of a part.

    Raises EngineError for an architecture (with the nearest), a quantization or a RoPE scaling that is not supported,
    and for a class that only drafts, unless it `is_draft`.
    """
    class_name = named_decoder(content)
    if class_name in DRAFTS_FOR and is_draft:
        _check_stock(class_name, content, path)
        return class_name
    if class_name in DRAFTS_FOR:
        raise EngineError(
            f"{path}: a {class_name} drafts for a {DRAFTS_FOR[class_name]}, whose keys and values it reads: alone it "
            "writes nothing"
        )
    if class_name in TEXT_ALONE:
        text = content.get("text_config")
        content, class_name = {**content, **(text if isinstance(text, dict) else {})}, TEXT_ALONE[class_name]
    if class_name in PAGED or class_name in RECURRENT or class_name in OWN_CACHE or class_name in SEEING:
        _check_stock(str(class_name), content, path)
        return str(class_name)
    if class_name not in CLASS_NAMES.values():
        raise EngineError(_unknown(class_name or content.get("model_type"), "auto_map" in content, path))
    _check_ours(content, path)
    if (quantization := content.get("quantization_config")) is not None:
        check_quantization(quantization, f" in {path}")
    rope = content.get("rope_parameters") or content.get("rope_scaling")
    check_rope_type(rope.get("rope_type") or rope.get("type") if isinstance(rope, dict) else None, f" in {path}")
    return str(class_name)


def named_decoder(content: Mapping[str, Any]) -> str:
    """Return the class that a config.json names first, or that of its model type; "" without either."""
    names = content.get("architectures") or [CLASS_NAMES.get(str(content.get("model_type")))]
    return names[0] if isinstance(names, list) and isinstance(names[0], str) else ""


def drafted_classes(class_name: str) -> frozenset[str]:
    """Return the classes that one of `DRAFTS_FOR` drafts for: the one with eyes, and its decoder alone."""
    whole = DRAFTS_FOR[class_name]
    return frozenset({whole, whole.replace("ForConditionalGeneration", "ForCausalLM")})


def has_own_layers(class_name: str | None) -> bool:
    """Return whether our decoder computes this class, so that each of its layers can be on another device."""
    return class_name in CLASS_NAMES.values()


def _check_ours(content: Mapping[str, Any], path: Path) -> None:
    """Raise EngineError for a config with layers that our decoder of its class lacks."""
    if not has_model_type(content.get("model_type")):
        raise EngineError(
            f"{path}: model_type {shown(content.get('model_type'))} is not one of transformers "
            f"{version('transformers')}; code that comes with a model (auto_map) is never run"
        )
    if (activation := content.get("hidden_act", "silu")) != "silu":
        raise EngineError(f"{path}: activation {shown(activation)} is not supported; supported is silu")
    kinds = content.get("layer_types")
    if isinstance(kinds, list) and (unknown := set(map(str, kinds)) - {"full_attention", "sliding_attention"}):
        raise EngineError(f"{path}: layers of type {min(unknown)!r} are not supported")


def _check_stock(class_name: str, content: Mapping[str, Any], path: Path) -> None:
    """Raise EngineError for a config of a known class with unsupported layers or weights."""
    if (quantization := content.get("quantization_config")) is not None:
        raise EngineError(f"{path}: quantized weights of a {class_name} are not supported ({shown(quantization)})")
    if class_name in MASKED and content.get("is_decoder") is not True:
        raise EngineError(f"{path}: a {class_name} without `is_decoder` sees later tokens, and writes nothing")
    kinds = content.get("layer_types")
    unknown = set(map(str, kinds)) - ATTENTION_LAYERS if isinstance(kinds, list) else set()
    if unknown and class_name in PAGED:
        raise EngineError(f"{path}: layers of type {min(unknown)!r} of a {class_name} are not supported")


def _unknown(asked: Any, brings_code: bool, path: Path) -> str:
    """Return the message for a class that is not served."""
    served = [*CLASS_NAMES.values(), *PAGED, *RECURRENT, *OWN_CACHE, *SEEING, *TEXT_ALONE]
    near = difflib.get_close_matches(str(asked), served, n=1, cutoff=0.5)
    return (
        f"architecture {shown(asked)} in {path} is not supported: it is no language model of "
        f"transformers {version('transformers')} that is served"
        + (f"; the nearest is {near[0]}" if near else "")
        + ("; code that comes with a model (auto_map) is never run" if brings_code else "")
    )


def check_quantization(given: Any, where: str = "") -> None:
    """Raise EngineError unless a `quantization_config` is that of `atelier quantize --to int8-group`.

    Other published quantizations have been converted to that, or to plain weights, before.
    """
    is_ours = isinstance(given, dict) and given.get("quant_method") == GROUP_INT8_METHOD
    if not is_ours or type(given.get("group_size")) is not int:
        raise EngineError(
            f"quantization_config {shown(given)}{where} is not supported; "
            f"supported are {', '.join((GROUP_INT8_METHOD, *METHODS))}"
        )


def check_rope_type(rope_type: Any, where: str = "") -> None:
    """Raise EngineError for an unsupported scaling of rotary positions. None is the default."""
    if rope_type is not None and rope_type not in ROPE_TYPES:
        raise EngineError(
            f"rope type {shown(rope_type)}{where} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
