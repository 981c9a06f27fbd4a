"""Modules get what pipelines of the installed diffusers ask of them, and they do not have."""

from __future__ import annotations

from typing import Any, Final

# Options that a class reads in a part's config and no such part has. The value changes nothing: what
# ChromaInpaintPipeline makes of it, an embedding of the guidance, goes nowhere.
_OPTIONS: Final = {"ChromaInpaintPipeline": ("transformer", {"guidance_embeds": False})}


def mend_parts(class_name: str, parts: dict[str, Any]) -> None:
    """Give the modules of a pipeline what its class asks them for. Done twice, it changes nothing."""
    name, options = _OPTIONS.get(class_name, ("", {}))
    if missing := {key: value for key, value in options.items() if key not in parts[name].config}:
        parts[name].register_to_config(**missing)
    for part in parts.values():
        # Once it was a part of CLIPTextModel, and `clip_skip` of many classes asks it for the norm behind the layers.
        if type(part).__name__ == "CLIPTextModel" and not hasattr(part, "text_model"):
            vars(part)["text_model"] = part  # a part of itself would have no end
