"""The classes of the deployments that run models, by import path: followed in a replica's process and nowhere else.

Processes that only start or call these deployments import no torch, diffusers or transformers, which takes seconds.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any, Final

WORKER: Final = f"{__name__}.Worker"
TEXT_ENCODER: Final = f"{__name__}.TextEncoderService"
TEMPLATE: Final = "replica"  # of the processes of both

_PATHS: Final = {
    "Worker": "deployments.services.worker:Worker",
    "TextEncoderService": "deployments.services.text_encoder:TextEncoderService",
}

# Modules that all models of a library need: imported before the first one's load.
_LIBRARIES: Final = {
    "Worker": ("diffusers.hooks", "diffusers.models.modeling_utils"),
    "TextEncoderService": ("transformers.masking_utils", "transformers.modeling_utils"),
}


# Both libraries import these where they are installed, and inference uses none of them: for LoRAs, for loading from
# disk and for sampling there is our own code.
_UNUSED: Final = ("accelerate", "peft", "sklearn")


def __getattr__(name: str) -> Any:
    """Import a class. Serve asks for it once, when the replica starts."""
    if name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The collector would look through a million new objects, which all stay, again and again. It runs again when the
    # models are prepared (`model_replica.py`).
    gc.disable()
    if not {"diffusers", "transformers"} & sys.modules.keys():
        for unused in _UNUSED:
            sys.modules.setdefault(unused, None)  # type: ignore[arg-type]  # "not installed" to the import system
    for library in _LIBRARIES[name]:
        importlib.import_module(library)
    return getattr(importlib.import_module(_PATHS[name].partition(":")[0]), name)
