"""POST /v1/embeddings, /v1/pooling, /v1/rerank and /v1/classify: texts or token ids in, numbers out.

Sources: the rerank APIs of Jina (`/v1/rerank`) and Cohere (`/v1/rerank`, `/v2/rerank`), which differ only in their
alone; vLLM's `/classify` and `/pooling`.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NotRequired

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from pydantic import Field, with_config
from pydantic_core import to_json
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from deployments.engines.records.protocol import Pooling
from deployments.ingress.messages.bodies import ClientPart, JsonRoute, warning_header
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    Answer,
    TimesMs,
    call_aside,
    documented,
    json_response,
    json_with_list,
    rounded,
    server_timing,
)
from deployments.ingress.service.service import Service
from deployments.records import (
    CacheUse,
    Count,
    EmbeddingRequest,
    EmbeddingResult,
    Name,
    ScoringRequest,
    UserName,
    as_record,
)
from deployments.records.errors import GenerationFailed, InvalidRequest

EncodingFormat = Literal["float", "base64"]

_USE_ACTIVATION = Field(True, description="false: the model's numbers before the activation that makes scores of them")


@with_config({"extra": "forbid"})
class EmbeddingData(TypedDict):
    """One vector: numbers, or their little-endian float32 in base64 if requested."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Answer):
    """The vectors of one request, in the order of its inputs."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage
    timings_ms: TimesMs
    encoder_cache: CacheUse
    warnings: tuple[str, ...]

    @classmethod
    def without_data(cls, result: EmbeddingResult) -> EmbeddingsAnswer:
        """Return the answer without its vectors."""
        return cls(
            object="list",
            model=result.model,
            data=[],
            usage=EmbeddingUsage(prompt_tokens=result.num_tokens, total_tokens=result.num_tokens),
            timings_ms=rounded(result.timings_ms),
            encoder_cache=result.cache,
            warnings=result.warnings,
        )


class EmbeddingsBody(ClientPart, strict=True):
    """OpenAI's embeddings request."""

    # 1.0 is not a token id, and a number is not a text.
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
        texts = _several(self.input)
        given: dict[str, Any] = {
            "dimensions": self.dimensions,
            "pooling": self.pooling,
            "prompt_name": self.prompt_name,
        }
        if self.input_type is not None:  # both NVIDIA's and Cohere's values
            given["input_type"] = "query" if self.input_type.endswith("query") else "document"
        return as_record(EmbeddingRequest, {"model": self.model, "input": texts, **given})


def _several(value: Any) -> tuple[Any, ...]:
    """Return a list of texts, or of token ids of each, also for a single one."""
    if isinstance(value, str) or isinstance(value[0], int):
        value = [value]
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


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


class ScoresAnswer(Answer):
    """The common part of answers with scores: the model, the usage and the times."""

    id: str
    object: Literal["list"]
    model: str
    usage: EmbeddingUsage
    timings_ms: TimesMs
    encoder_cache: CacheUse
    warnings: tuple[str, ...]


def _scores_origin(result: EmbeddingResult, kind: str) -> dict[str, Any]:
    """Return the members of a `ScoresAnswer`; `kind` begins its id."""
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "model": result.model,
        "usage": EmbeddingUsage(prompt_tokens=result.num_tokens, total_tokens=result.num_tokens),
        "timings_ms": rounded(result.timings_ms),
        "encoder_cache": result.cache,
        "warnings": result.warnings,
    }


@with_config({"extra": "forbid"})
class RankedDocument(TypedDict):
    text: str


@with_config({"extra": "forbid"})
class RankData(TypedDict):
    """A document's place in the request, its score, and the document if requested."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class RankTokens(Answer):
    input_tokens: int


class RankMeta(Answer):
    """The place of the number of tokens in Cohere's form."""

    tokens: RankTokens


class RerankAnswer(ScoresAnswer):
    """Documents, the most relevant one first."""

    results: list[RankData]
    meta: RankMeta


@with_config({"extra": "forbid"})
class ClassData(TypedDict):
    """The class of a text with the highest score, and the scores of all classes, in the order of `labels`."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(ScoresAnswer):
    """The classes of one request's texts, in their order; `labels` names the classes."""

    created: int
    data: list[ClassData]
    labels: tuple[str, ...]


@with_config({"extra": "forbid"})
class ScoreData(TypedDict):
    """The score of a pair of texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(ScoresAnswer):
    """The scores of one request's pairs, in their order."""

    created: int
    data: list[ScoreData]


_TASKS = Literal["embed", "classify", "score"]


class PoolingBody(ClientPart, strict=True):
    """vLLM's request to pool texts: the vectors of an embedding model, the scores of a classifier.

    Vectors of single tokens (`token_embed`, `token_classify`) are not served.
    """

    model: Name
    input: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    task: _TASKS | None = Field(None, description="by default what the model does")
    encoding_format: EncodingFormat = "float"
    dimensions: Count | None = None
    use_activation: bool = _USE_ACTIVATION
    user: UserName | None = None

    def to_record(self, *, is_scored: bool) -> EmbeddingRequest | ScoringRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        texts = _several(self.input)
        if not is_scored:
            fields = {"model": self.model, "input": texts, "dimensions": self.dimensions}
            return as_record(EmbeddingRequest, fields)
        if not isinstance(texts[0], str):
            raise InvalidRequest("input: a classifier reads texts, and no tokens", "input")
        return as_record(ScoringRequest, {"model": self.model, "input": texts, "raw": not self.use_activation})


@with_config({"extra": "forbid"})
class PoolingData(TypedDict):
    """The pooled vector of one text: numbers, or their little-endian float32 in base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingAnswer(ScoresAnswer):
    """The pooled vectors of one request's texts, in their order."""

    created: int
    data: list[PoolingData]


class RankedText(ClientPart):
    """A document as an object. Its other members are not read."""

    text: str


class RerankBody(ClientPart, strict=True):
    """Cohere's and Jina's request to rank documents by their relevance to a query."""

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


_Texts = str | list[str]


class ScoreBody(ClientPart, strict=True):
    """vLLM's request to score pairs: one text with each of several, or two lists pair by pair."""

    model: Name
    text_1: _Texts | None = Field(None, min_length=1)
    text_2: _Texts | None = Field(None, min_length=1)
    queries: _Texts | None = Field(None, min_length=1, description="another name of text_1")
    documents: _Texts | None = Field(None, min_length=1, description="another name of text_2")
    use_activation: bool = _USE_ACTIVATION
    user: UserName | None = None

    def to_record(self) -> ScoringRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        sides = []
        for name, said in (("text_1", (self.text_1, self.queries)), ("text_2", (self.text_2, self.documents))):
            given = [one for one in said if one is not None]
            if len(given) != 1:
                raise InvalidRequest(f"{name}: {len(given)} given, expected one of its two names", name)
            sides.append([given[0]] if isinstance(given[0], str) else given[0])
        first, second = sides
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            text = f"text_2: {len(second)} texts for {len(first)} of text_1, expected one for each, or one text_1"
            raise InvalidRequest(text, "text_2")
        pairs = tuple(zip(first, second, strict=True))
        return as_record(ScoringRequest, {"model": self.model, "input": pairs, "raw": not self.use_activation})


class ClassifyBody(ClientPart, strict=True):
    """vLLM's request to classify texts."""

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
        """Rank documents in Cohere's newer form: the answer has their places alone."""
        return await ranked(body, with_documents=body.return_documents is True)

    @router.post("/v1/score", response_model=ScoreAnswer, responses=errors)
    async def score(body: ScoreBody) -> Response:
        """Score pairs of texts."""
        result = await service.score(body.to_record(), "reranker")
        answer = ScoreAnswer(created=int(time.time()), data=[], **_scores_origin(result, "score"))
        rows: list[ScoreData] = [
            {"index": index, "object": "score", "score": float(one[0])} for index, one in enumerate(result.embeddings)
        ]
        content = json_with_list(answer, "data", map(to_json, rows))
        return json_response(content, headers=server_timing(result.timings_ms) | warning_header(body.warnings()))

    @router.post("/v1/pooling", response_model=PoolingAnswer, responses=errors)
    async def pool(body: PoolingBody) -> Response:
        """Pool texts: return their vectors, or the scores of classes."""
        kind = (await service.listing.model(body.model)).kind
        is_scored = kind in ("classifier", "reranker") if body.task is None else body.task != "embed"
        record = await call_aside(8 * _num_ids(body.input), partial(body.to_record, is_scored=is_scored))
        if isinstance(record, EmbeddingRequest):
            result = await service.embed(record)
        else:
            result = await service.score(record, "classifier", "reranker")
        num_bytes = sum(vector.nbytes for vector in result.embeddings)
        content = await call_aside(num_bytes, _write_pooled, result, body.encoding_format)
        return json_response(content, headers=server_timing(result.timings_ms) | warning_header(body.warnings()))

    @router.post("/v1/classify", response_model=ClassifyAnswer, responses=errors)
    async def classify(body: ClassifyBody) -> Response:
        """Score the classes of texts."""
        result = await service.score(body.to_record(), "classifier", "reranker")
        content = await call_aside(sum(one.nbytes for one in result.embeddings), _write_classes, result)
        return json_response(content, headers=server_timing(result.timings_ms) | warning_header(body.warnings()))

    return router


def _write_pooled(result: EmbeddingResult, format_: EncodingFormat) -> bytes:
    answer = PoolingAnswer(created=int(time.time()), data=[], **_scores_origin(result, "pool"))
    rows: Iterator[PoolingData] = (
        {"index": index, "object": "pooling", "data": _encoded(index, vector, format_)}
        for index, vector in enumerate(result.embeddings)
    )
    return json_with_list(answer, "data", map(to_json, rows))


def _write_ranks(result: EmbeddingResult, scores: Sequence[float], texts: Sequence[str], top_n: int | None) -> bytes:
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_n]
    meta = RankMeta(tokens=RankTokens(input_tokens=result.num_tokens))
    answer = RerankAnswer(results=[], meta=meta, **_scores_origin(result, "rerank"))
    return json_with_list(answer, "results", (to_json(_rank(index, scores[index], texts)) for index in best))


def _rank(index: int, score: float, texts: Sequence[str]) -> RankData:
    rank: RankData = {"index": index, "relevance_score": score}
    return rank | {"document": {"text": texts[index]}} if texts else rank


def _write_classes(result: EmbeddingResult) -> bytes:
    origin = _scores_origin(result, "classify")
    answer = ClassifyAnswer(created=int(time.time()), data=[], labels=result.labels, **origin)
    return json_with_list(answer, "data", map(to_json, _classes(result)))


def _classes(result: EmbeddingResult) -> Iterator[ClassData]:
    for index, scores in enumerate(result.embeddings):
        label = result.labels[int(scores.argmax())]
        yield {"index": index, "label": label, "probs": scores.tolist(), "num_classes": len(scores)}
