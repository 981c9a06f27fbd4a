"""POST /v1/embeddings: texts or token ids in, vectors out as floats or base64."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from deployments.errors import InvalidRequest
from deployments.ingress.api_docs import INFERENCE_ERRORS, documented
from deployments.ingress.openai_answers import EmbeddingsAnswer
from deployments.ingress.service import Service
from deployments.ingress.timing import rounded, server_timing
from deployments.records import EmbeddingRequest, RequestModel, as_record


class EmbeddingsBody(RequestModel):
    """OpenAI's embeddings request."""

    model_config = ConfigDict(strict=True)  # 1.0 is not a token id, and a number is not a text

    model: str
    input: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None

    def record(self) -> EmbeddingRequest:
        value: Any = self.input
        if isinstance(value, str) or isinstance(value[0], int):
            value = [value]
        texts = tuple(item if isinstance(item, str) else tuple(item) for item in value)
        return as_record(EmbeddingRequest, {"model": self.model, "input": texts})


def create_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["embeddings"])

    @router.post("/v1/embeddings", response_model=EmbeddingsAnswer, responses=documented(*INFERENCE_ERRORS))
    async def embed(body: EmbeddingsBody) -> JSONResponse:
        """Embed texts."""
        result = await service.embed(body.record())
        size = len(result.embeddings[0])
        if body.dimensions not in (None, size):
            raise InvalidRequest(f"dimensions: {body.dimensions}, but {body.model!r} has {size}", "dimensions")
        answer = {
            "object": "list",
            "model": result.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
                for index, vector in enumerate(result.embeddings)
            ],
            "usage": {"prompt_tokens": result.num_tokens, "total_tokens": result.num_tokens},
            "timings_ms": rounded(result.timings_ms),
            "encoder_cache": {"hits": result.cache.hits, "misses": result.cache.misses},
            "warnings": result.warnings,
        }
        return JSONResponse(answer, headers=server_timing(result.timings_ms))

    return router


def _encoded(vector: npt.NDArray[np.float32], format_: str) -> list[float] | str:
    """base64 is of little-endian float32, as OpenAI's client decodes it."""
    if format_ == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
