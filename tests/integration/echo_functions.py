"""Steps that give back what they got: pipelines of them show what arrives and what leaves, type by type."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def echo_text(value: str) -> str:
    return value


def echo_int(value: int) -> int:
    return value


def echo_float(value: float) -> float:
    return value


def echo_bool(value: bool) -> bool:
    return value


def echo_tokens(value: list[int]) -> list[int]:
    return value


def echo_vector(value: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return value


def echo_image(value: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return value


# What a pipeline's config calls the type of one item, by the function that takes and gives it.
TYPES = {
    "echo_text": "text",
    "echo_int": "int",
    "echo_float": "float",
    "echo_bool": "BOOL[-1]",
    "echo_tokens": "tokens",
    "echo_vector": "FP32[-1,-1]",
    "echo_image": "image",
}


def echo_pipelines() -> list[dict[str, object]]:
    """One pipeline for each type, of the function's name: `value` in, `value` out."""
    return [
        {
            "id": name.replace("_", "-"),
            "inputs": {"value": type_},
            "stages": [{"name": "same", "function": f"{__name__}:{name}", "inputs": {"value": "$value"}}],
            "outputs": {"value": "$same"},
        }
        for name, type_ in TYPES.items()
    ]
