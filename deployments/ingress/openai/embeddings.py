"""POST /v1/embeddings: texts or token ids in, vectors out as floats or base64."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from pydantic_core import to_json
from starlette.responses import Response

from deployments.engines.protocol import Pooling
from deployments.errors import GenerationFailed, InvalidRequest
from deployments.ingress.errors import INFERENCE_ERRORS, documented
from deployments.ingress.json_route import JsonRoute
from deployments.ingress.openai.answers import EmbeddingData, EmbeddingsAnswer, warning_header
from deployments.ingress.openai.client_parts import ClientPart
from deployments.ingress.responses import call_aside, json_response, json_with_list, server_timing
from deployments.ingress.service import Service
from deployments.records import (
    Count,
    EmbeddingRequest,
    EmbeddingResult,
    Name,
    UserName,
    as_record,
)

EncodingFormat = Literal["float", "base64"]


class EmbeddingsBody(ClientPart):
    """OpenAI's embeddings request."""

    # 1.0 is not a token id, and a number is not a text.
    model_config = ConfigDict(strict=True)

    model: Name
    input: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    encoding_format: EncodingFormat = "float"
    dimensions: Count | None = None
    pooling: Pooling | None = None
    prompt_name: Name | None = Field(None, description="one of the model's prompts, which stands before every text")
    input_type: Literal["query", "document", "passage", "search_query", "search_document"] | None = Field(
        None, description="chooses the model's prompt for such texts, if it has one"
    )
    user: UserName | None = None

    def to_record(self) -> EmbeddingRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        value: Any = self.input
        if isinstance(value, str) or isinstance(value[0], int):
            value = [value]
        texts = tuple(item if isinstance(item, str) else tuple(item) for item in value)
        given: dict[str, Any] = {
            "dimensions": self.dimensions,
            "pooling": self.pooling,
            "prompt_name": self.prompt_name,
        }
        if self.input_type is not None:  # NVIDIA's and Cohere's words, too
            given["input_type"] = "query" if self.input_type.endswith("query") else "document"
        return as_record(EmbeddingRequest, {"model": self.model, "input": texts, **given})


def create_embeddings_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["embeddings"], route_class=JsonRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingsAnswer, responses=documented(*INFERENCE_ERRORS))
    async def embed(body: EmbeddingsBody) -> Response:
        """Embed texts."""
        result = await service.embed(await call_aside(8 * _num_ids(body.input), body.to_record))
        size = len(result.embeddings[0])
        if body.dimensions not in (None, size):
            raise InvalidRequest(f"dimensions: {body.dimensions}, but {body.model!r} has {size}", "dimensions")
        ignored = body.warnings()
        result = replace(result, warnings=(*result.warnings, *ignored))
        num_bytes = sum(vector.nbytes for vector in result.embeddings)
        content = await call_aside(num_bytes, _write_answer, result, body.encoding_format)
        return json_response(content, headers=server_timing(result.timings_ms) | warning_header(ignored))

    return router


def _num_ids(input_: Any) -> int:
    """Return the number of token ids of a request, which are checked one by one; of texts, their number."""
    return sum(map(len, input_)) if isinstance(input_[0], list) else len(input_)


def _write_answer(result: EmbeddingResult, format_: EncodingFormat) -> bytes:
    parts = (to_json(_data(index, vector, format_)) for index, vector in enumerate(result.embeddings))
    return json_with_list(EmbeddingsAnswer.without_data(result), "data", parts)


def _data(index: int, vector: npt.NDArray[np.float32], format_: EncodingFormat) -> EmbeddingData:
    return {"object": "embedding", "index": index, "embedding": _encoded(index, vector, format_)}


def _encoded(index: int, vector: npt.NDArray[np.float32], format_: EncodingFormat) -> list[float] | str:
    """Return the numbers, or base64 of them as little-endian float32, as OpenAI's client decodes it."""
    if not np.isfinite(vector).all():
        raise GenerationFailed(f"the embedding of input {index} has numbers that are not finite")
    if format_ == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
