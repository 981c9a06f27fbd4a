"""The base of bodies under /v1, which clients of other servers send as well."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from deployments.engines.llm.chat import NullIsDefault
from deployments.ingress.openai.answers import ignored_fields, warnings_of_ignored
from deployments.records import MAX_INT32, MAX_SEED, SEED_RULE, RequestModel


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


class ClientPart(RequestModel, NullIsDefault):
    """A body or a part of one. Unknown fields are ignored."""

    model_config = ConfigDict(extra="allow")

    def warnings(self) -> tuple[str, ...]:
        """Return what was asked for and has no effect."""
        return warnings_of_ignored(ignored_fields(self))
