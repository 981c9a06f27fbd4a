"""Paths of vLLM and llama.cpp beside OpenAI's: those without /v1, /health, /version, /tokenize and /detokenize.

Source: vLLM, "OpenAI-Compatible Server". The paths without the prefix equal those of /v1 in everything: keys, bounds,
errors and answers.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from configs.cluster import MAX_MESSAGES
from deployments.engines.llm.chat import Tool
from deployments.ingress.kserve.models import is_any_answering
from deployments.ingress.kserve.tensors import server_metadata
from deployments.ingress.messages.bodies import JsonRoute, LenientBody, warning_header
from deployments.ingress.messages.responses import INFERENCE_ERRORS, Answer, documented, json_response
from deployments.ingress.openai.chat_images import ChatImages
from deployments.ingress.openai.text import ChatMessage, messages_of
from deployments.ingress.service.service import Service
from deployments.records import ChatRequest, CompletionRequest, Name, PromptTokens, as_record
from deployments.records.errors import InvalidRequest, ModelUnavailable


class TokenizeBody(LenientBody):
    """A text, or a chat with the tools that it may call. A chat's template writes the special tokens itself."""

    model: Name
    prompt: str | None = Field(None, min_length=1)
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=128)
    add_special_tokens: bool | None = Field(None, description="of a text; by default, those of the tokenizer")
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
    return_token_strs: bool | None = False

    async def to_record(self, images: ChatImages) -> ChatRequest | CompletionRequest:
        """Return the request as the service takes it. Raises as `ChatImages.record_of` does."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: give either prompt or messages", "prompt")
        if self.messages is None:
            return as_record(CompletionRequest, {"model": self.model, "prompt": self.prompt})
        fields = {"model": self.model, "messages": messages_of(self.messages), "tools": tuple(self.tools or ())}
        return await images.record_of(fields)


class DetokenizeBody(LenientBody):
    """Tokens to turn into text."""

    model: Name
    tokens: list[int] = Field(min_length=1)

    def to_record(self) -> CompletionRequest:
        """Return the request as the service takes it. Raises InvalidRequest."""
        return as_record(CompletionRequest, {"model": self.model, "prompt": tuple(self.tokens)})


class HealthOkAnswer(Answer):
    status: Literal["ok"]


class VersionAnswer(Answer):
    version: str


class TokensAnswer(Answer):
    """The tokens of a prompt. The model takes `max_model_len` of them, prompt and answer together."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None

    @classmethod
    def of(cls, found: PromptTokens, *, has_pieces: bool) -> TokensAnswer:
        """Return the answer, with the text of each token if requested."""
        return cls(
            count=len(found.token_ids),
            max_model_len=found.max_model_len,
            tokens=found.token_ids,
            token_strs=found.pieces if has_pieces else None,
        )


class TextAnswer(Answer):
    prompt: str


def create_vllm_router(service: Service, images: ChatImages) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["vllm"], route_class=JsonRoute)

    @router.get("/health", response_model=HealthOkAnswer, responses=documented(503))
    async def health() -> Response:
        """Answer 200 once a model can be used, 503 before."""
        if not await is_any_answering(service):
            raise ModelUnavailable("models are still entering the store or wait for a replica, or none could")
        return json_response(HealthOkAnswer(status="ok"))

    @router.get("/version", response_model=VersionAnswer)
    async def version() -> Response:
        """The version of this server."""
        return json_response(VersionAnswer(version=server_metadata().version))

    @router.post("/tokenize", response_model=TokensAnswer, responses=documented(*INFERENCE_ERRORS))
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a text, or of a chat as the model's template writes it."""
        record = await body.to_record(images)
        found = await service.texts.tokenize(record, has_special_tokens=body.add_special_tokens is not False)
        headers = warning_header(body.warnings())
        return json_response(TokensAnswer.of(found, has_pieces=bool(body.return_token_strs)), headers=headers)

    @router.post("/detokenize", response_model=TextAnswer, responses=documented(*INFERENCE_ERRORS))
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of tokens."""
        found = await service.texts.tokenize(body.to_record())
        return json_response(TextAnswer(prompt=found.text))

    return router
