"""OpenVINO in this process: `make judge-openvino` installs it beside our environment, whose numpy it computes with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ONE_THREAD: Final = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}


def openvino_module(judges: Path, name: str = "openvino") -> Any:
    """Return a module of OpenVINO's, None where it is not installed."""
    folder = judges / "openvino"
    if not (folder / name).is_dir():
        return None
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))  # and it stays: OpenVINO imports parts of itself later
    return importlib.import_module(name)


def compiled_model(judges: Path, make: Callable[[Any], Any], precision: str) -> Any:
    """Return the model that `make` makes of the module, compiled for one thread; None where there is no OpenVINO."""
    openvino = openvino_module(judges)
    if openvino is None:
        return None
    options = ONE_THREAD | {"INFERENCE_PRECISION_HINT": precision}
    return openvino.Core().compile_model(make(openvino), "CPU", options)
