"""The base of bodies under /v1, which clients of other servers send as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from deployments.engines.llm.chat import NullIsDefault
from deployments.records import (
    MAX_INT32,
    MAX_SEED,
    SEED_RULE,
    RequestModel,
)


def _ignored_fields(part: BaseModel, place: str = "") -> list[str]:
    """Return the unknown fields of a body and of all parts of it, with the names that lead to them."""
    found = [f"{place}{name}" for name in part.model_extra or ()]
    for name in type(part).model_fields:
        value = getattr(part, name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, BaseModel):
                found += _ignored_fields(one, f"{place}{name}.")
    return found


def warning_header(warnings: Sequence[str]) -> dict[str, str]:
    """Return the header with the warnings of a request, in printable ASCII."""
    text = "".join(character if " " <= character <= "~" else "?" for character in "; ".join(warnings))[:512]
    return {"X-Atelier-Warning": text} if text else {}


def _none_if_negative(value: int | None) -> int | None:
    return None if value == -1 else value


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("expected 1 or more, or -1 for as many as the model may")
    return value


# -1 is no value: llama.cpp's clients have it so.
Seed = Annotated[
    int | None,
    Field(ge=-1, le=MAX_SEED, description=f"-1 draws one, or {SEED_RULE}"),
    AfterValidator(_none_if_negative),
]
NoneOrTokens = Annotated[
    int | None,
    Field(ge=-1, le=MAX_INT32, description="-1, or none: as many as the model may"),
    AfterValidator(_none_if_negative),
]
MaxTokens = Annotated[NoneOrTokens, AfterValidator(_not_zero)]


class LenientBody(RequestModel, extra="allow"):
    """A body whose unknown fields are ignored: OpenAI adds some now and then, and its clients send them."""

    def warnings(self) -> tuple[str, ...]:
        """Return what was asked for and has no effect."""
        shown = ", ".join(repr(name[:64]) for name in sorted(set(_ignored_fields(self)))[:8])
        return (f"unknown fields were ignored: {shown}",) if shown else ()


class ClientPart(LenientBody, NullIsDefault):
    """A body or a part of one, where null is as good as nothing."""
