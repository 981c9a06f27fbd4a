"""POST /v1/rerank and /v1/classify: texts in, scores out.

Sources: the rerank APIs of Jina (`/v1/rerank`) and Cohere (`/v1/rerank`, `/v2/rerank`), which differ in their defaults
alone; vLLM's `/classify`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from pydantic_core import to_json
from starlette.responses import Response

from deployments.ingress.errors import INFERENCE_ERRORS, documented
from deployments.ingress.json_route import JsonRoute
from deployments.ingress.openai.answers import (
    ClassData,
    ClassifyAnswer,
    RankData,
    RankMeta,
    RankTokens,
    RerankAnswer,
    scores_origin,
    warning_header,
)
from deployments.ingress.openai.client_parts import ClientPart
from deployments.ingress.responses import call_aside, json_response, json_with_list, server_timing
from deployments.ingress.service import Service
from deployments.records import Count, EmbeddingResult, Name, ScoringRequest, UserName, as_record

_USE_ACTIVATION = Field(True, description="false: the model's numbers before the activation that makes scores of them")


class RankedText(ClientPart):
    """A document as an object. Its other members are not read."""

    text: str


class RerankBody(ClientPart):
    """Cohere's and Jina's request to rank documents by how well they answer a query."""

    model_config = ConfigDict(strict=True)

    model: Name
    query: str = Field(min_length=1)
    documents: list[str | RankedText] = Field(min_length=1)
    top_n: Count | None = None
    return_documents: bool | None = Field(None, description="default: true under /v1, false under /v2")
    max_tokens_per_doc: Count | None = Field(None, description="how much is read of a document")
    use_activation: bool = _USE_ACTIVATION
    user: UserName | None = None

    def texts(self) -> list[str]:
        """Return the texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def to_record(self) -> ScoringRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        pairs = tuple((self.query, text) for text in self.texts())
        fields = {"model": self.model, "input": pairs, "raw": not self.use_activation}
        return as_record(ScoringRequest, fields | {"max_second_tokens": self.max_tokens_per_doc})


class ClassifyBody(ClientPart):
    """vLLM's request to classify texts."""

    model_config = ConfigDict(strict=True)

    model: Name
    input: str | list[str] = Field(min_length=1)
    use_activation: bool = _USE_ACTIVATION
    user: UserName | None = None

    def to_record(self) -> ScoringRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        texts = (self.input,) if isinstance(self.input, str) else tuple(self.input)
        return as_record(ScoringRequest, {"model": self.model, "input": texts, "raw": not self.use_activation})


def create_scores_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["scores"], route_class=JsonRoute)
    errors = documented(*INFERENCE_ERRORS)

    async def ranked(body: RerankBody, *, with_documents: bool) -> Response:
        request = await call_aside(8 * len(body.documents), body.to_record)
        result = await service.score(request, "reranker")
        texts = body.texts() if with_documents else ()
        content = await call_aside(
            sum(map(len, texts)), _write_ranks, result, [float(one[0]) for one in result.embeddings], texts, body.top_n
        )
        return json_response(content, headers=server_timing(result.timings_ms) | warning_header(body.warnings()))

    @router.post("/v1/rerank", response_model=RerankAnswer, responses=errors)
    async def rerank(body: RerankBody) -> Response:
        """Rank documents, and return them unless `return_documents` is false."""
        return await ranked(body, with_documents=body.return_documents is not False)

    @router.post("/v2/rerank", response_model=RerankAnswer, responses=errors)
    async def rerank_briefly(body: RerankBody) -> Response:
        """Rank documents as Cohere's newer clients ask for it: the answer has their places alone."""
        return await ranked(body, with_documents=body.return_documents is True)

    @router.post("/v1/classify", response_model=ClassifyAnswer, responses=errors)
    async def classify(body: ClassifyBody) -> Response:
        """Score the classes of texts."""
        result = await service.score(body.to_record(), "classifier", "reranker")
        content = await call_aside(sum(one.nbytes for one in result.embeddings), _write_classes, result)
        return json_response(content, headers=server_timing(result.timings_ms) | warning_header(body.warnings()))

    return router


def _write_ranks(result: EmbeddingResult, scores: Sequence[float], texts: Sequence[str], top_n: int | None) -> bytes:
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_n]
    meta = RankMeta(tokens=RankTokens(input_tokens=result.num_tokens))
    answer = RerankAnswer(results=[], meta=meta, **scores_origin(result, "rerank"))
    return json_with_list(answer, "results", (to_json(_rank(index, scores[index], texts)) for index in best))


def _rank(index: int, score: float, texts: Sequence[str]) -> RankData:
    rank: RankData = {"index": index, "relevance_score": score}
    return rank | {"document": {"text": texts[index]}} if texts else rank


def _write_classes(result: EmbeddingResult) -> bytes:
    origin = scores_origin(result, "classify")
    answer = ClassifyAnswer(created=int(time.time()), data=[], labels=result.labels, **origin)
    return json_with_list(answer, "data", map(to_json, _classes(result)))


def _classes(result: EmbeddingResult) -> Iterator[ClassData]:
    for index, scores in enumerate(result.embeddings):
        label = result.labels[int(scores.argmax())]
        yield {"index": index, "label": label, "probs": scores.tolist(), "num_classes": len(scores)}
