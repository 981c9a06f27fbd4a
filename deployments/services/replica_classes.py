"""The classes of the deployments that run models, by import path: followed in a replica's process and nowhere else.

Who only starts or calls these deployments imports no torch, diffusers and transformers, which take seconds.
"""

from __future__ import annotations

import gc
import importlib
from typing import Any, Final

WORKER: Final = f"{__name__}.Worker"
TEXT_ENCODER: Final = f"{__name__}.TextEncoderService"

_PATHS: Final = {
    "Worker": "deployments.services.worker:Worker",
    "TextEncoderService": "deployments.services.text_encoder:TextEncoderService",
}


def __getattr__(name: str) -> Any:
    """Import a class. Serve asks for it once, when the replica starts."""
    if name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The collector would look through a million new objects, which all stay, again and again. It runs again when the
    # models are prepared (`model_replica.py`).
    gc.disable()
    imports = importlib.import_module("deployments.engines.quick_imports")
    (imports.import_diffusers if name == "Worker" else imports.import_transformers)()
    return getattr(importlib.import_module(_PATHS[name].partition(":")[0]), name)
