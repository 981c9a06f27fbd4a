"""Simulated accelerators: devices `sim:0` and on, which compute on the host and have memories of their own."""

from __future__ import annotations

from pydantic import Field, ValidationError, field_serializer

from configs.model import Bytes, StrictModel


class SimulatedConfig(StrictModel):
    """The simulated accelerators of a process. Names of ops are those of torch's dispatcher, such as aten::_softmax."""

    num_devices: int = Field(1, ge=1, le=16)
    memory_bytes: Bytes = Field(2 * 2**30, validate_default=True, description="memory of each device")
    link_gbps: float = Field(25.0, gt=0, allow_inf_nan=False, description="speed of the link, in 10^9 bytes per second")
    unsupported_ops: frozenset[str] = Field(frozenset(), description="ops that raise NotImplementedError")
    host_ops: frozenset[str] = Field(frozenset(), description="ops that run on the host, with counted copies")

    @field_serializer("unsupported_ops", "host_ops", when_used="json")
    def _in_order(self, ops: frozenset[str]) -> list[str]:
        return sorted(ops)  # the same text in any process, whose sets have an order of their own


def parse_simulated(text: str) -> SimulatedConfig:
    """Parse "num_devices=2, memory_bytes=512MiB"; several ops are joined by "+".

    Raises ValueError, in one line, for any other text.
    """
    values: dict[str, str | float | list[str]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"{item!r}: expected key=value (keys: {', '.join(SimulatedConfig.model_fields)})")
        values[key] = value.split("+") if key.endswith("_ops") else _number_or_text(value)
    try:
        return SimulatedConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = f" (known: {', '.join(SimulatedConfig.model_fields)})" if first["type"] == "extra_forbidden" else ""
        raise ValueError(f"{key}={first['input']}: {first['msg']}{known}") from None


def _number_or_text(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number
