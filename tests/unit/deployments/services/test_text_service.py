"""Texts of the demo's language model, with every option of a request, and the JSON that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer
from unit.deployments.engine_loops import written_chunks

from deployments.engines.llm.chat import Message
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.llm.engine_config import LLMEngineConfig
from deployments.ingress.openai.text_answers import ChatForm, CompletionForm
from deployments.records import ChatRequest, CompletionRequest, EmbeddingRequest, SwitchReport, TextChunk
from deployments.records.errors import InvalidRequest
from deployments.replicas.step_loop import DeviceThread
from deployments.services.text_prompts import text_requests
from deployments.services.text_service import TextService, whole_text

ADDER = Path(__file__).parents[4] / "infra/demo/models/adder"
QUESTION = (Message(role="user", content="What is 12 + 7?"),)


@pytest.fixture
def engine() -> LLMEngine:
    tensors = {name: tensor.float() for name, tensor in load_file(ADDER / "model.safetensors").items()}
    return LLMEngine(ADDER, tensors, LLMEngineConfig(kv_cache_bytes=2**22))


@pytest.fixture
def service(engine: LLMEngine) -> TextService:
    loops: list[Any] = []

    def bound(make: Callable[[], Any]) -> Any:
        loops[:] = loops or [make()]
        return loops[0]

    lease = SimpleNamespace(modules={"model": engine}, bound=bound, report=SwitchReport("m", 1.0, 0.5, 0.5, 10, (), ()))

    @asynccontextmanager
    async def leased(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield lease

    cache: Any = SimpleNamespace(lease=leased)
    return TextService(cache, DeviceThread())


async def chunks_of(service: TextService, request: Any) -> list[TextChunk]:
    return await written_chunks(service, request)


async def test_the_generation_config_is_the_default(engine: LLMEngine, service: TextService) -> None:
    assert engine.generation_defaults == {"temperature": 0.0, "max_tokens": 32}
    result = whole_text("m", await chunks_of(service, ChatRequest(model="m", messages=QUESTION)))
    assert (result.text, result.finish_reason, result.others) == ("19.", "stop", ())
    assert result.timings_ms["total"] > 0
    hot = ChatRequest(model="m", messages=QUESTION, temperature=2.0, seed=3, max_tokens=200, ignore_eos=True)
    result = whole_text("m", await chunks_of(service, hot))
    assert (result.num_completion_tokens, result.finish_reason) == (200, "length")


def test_what_nobody_says_of_sampling_is_bounded_as_elsewhere(engine: LLMEngine) -> None:
    """Each field by itself: the request before the model's own settings, and those before llama.cpp's defaults."""

    def sampling(**fields: Any) -> tuple[float, ...]:
        (request,), _ = text_requests(engine, ChatRequest(model="m", messages=QUESTION, **fields))
        found = request.sampling
        return found.temperature, found.top_p, found.top_k, found.min_p

    engine.generation_defaults = {}
    assert sampling() == (0.8, 0.95, 40, 0.05)
    assert sampling(temperature=1.0, top_k=0) == (1.0, 0.95, 0, 0.05)
    engine.generation_defaults = {"temperature": 0.6, "top_p": 0.9}
    assert sampling() == (0.6, 0.9, 40, 0.05)
    assert sampling(top_p=1.0, min_p=0.0) == (0.6, 1.0, 40, 0.0)


async def test_lists_of_prompts_with_several_completions_each(engine: LLMEngine, service: TextService) -> None:
    ids = tuple(engine.encode_text("What is 4 + 4"))
    request = CompletionRequest(
        model="m", prompt=("What is 3", "What is 40 + 2"), n=3, temperature=1.5, seed=5, max_tokens=9, echo=True
    )
    result = whole_text("m", await chunks_of(service, request))
    assert len(result.choices) == 6
    assert all(choice.text.startswith("What is 3") for choice in result.choices[:3])
    assert all(choice.text.startswith("What is 40 + 2") for choice in result.choices[3:])
    assert len({choice.text for choice in result.choices}) > 2
    sizes = [len(engine.encode_text(prompt)) for prompt in request.prompt]
    assert result.num_prompt_tokens == sum(sizes)
    assert 6 <= result.num_completion_tokens <= 6 * 9
    one = whole_text("m", await chunks_of(service, request.model_copy(update={"prompt": "What is 40 + 2", "n": 1})))
    assert one.text == result.choices[3].text
    tokens = whole_text("m", await chunks_of(service, CompletionRequest(model="m", prompt=ids, max_tokens=4)))
    text = whole_text("m", await chunks_of(service, CompletionRequest(model="m", prompt="What is 4 + 4", max_tokens=4)))
    assert tokens.text == text.text


async def test_an_echo_has_the_log_probabilities_of_its_prompt(engine: LLMEngine, service: TextService) -> None:
    request = CompletionRequest(
        model="m", prompt=("What is 3", "What is 40 + 2"), n=2, temperature=0, max_tokens=4, echo=True, logprobs=2
    )
    chunks = await chunks_of(service, request)
    choices = CompletionForm("m").whole(whole_text("m", chunks)).choices
    alone = await chunks_of(service, request.model_copy(update={"echo": False}))
    for number, (choice, other) in enumerate(zip(choices, whole_text("m", alone).choices, strict=True)):
        prompt = request.prompts[number // 2]
        size = len(engine.encode_text(prompt))
        found = choice.logprobs
        assert found is not None
        assert choice.text == prompt + other.text
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
        assert all(best is not None and len(best) == 2 for best in found.top_logprobs[1:])
        assert found.tokens[size:] == [token.text for token in other.logprobs]
        assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(found.tokens))]
    stream = CompletionForm("m")
    pieces = [stream.piece(chunk).choices[0] for chunk in chunks if chunk.index == 1]
    assert [offset for piece in pieces if piece.logprobs for offset in piece.logprobs.text_offset] == (
        choices[1].logprobs and choices[1].logprobs.text_offset
    )


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_echo_without_a_token_more(engine: LLMEngine, service: TextService, logprobs: int | None) -> None:
    """As evaluations ask for the log probabilities of a text."""
    request = CompletionRequest(
        model="m", prompt=("What is 3", "What is 40 + 2"), max_tokens=4, temperature=0, echo=True, logprobs=logprobs
    )
    more = whole_text("m", await chunks_of(service, request))
    chunks = await chunks_of(service, request.model_copy(update={"max_tokens": 0}))
    found = whole_text("m", chunks)
    assert [choice.text for choice in found.choices] == list(request.prompts)
    assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
    assert (found.num_completion_tokens, found.num_prompt_tokens) == (0, more.num_prompt_tokens)
    for prompt, choice, longer in zip(request.prompts, found.choices, more.choices, strict=True):
        size = len(engine.encode_text(str(prompt))) if logprobs else 0
        assert len(choice.logprobs) == size
        assert choice.logprobs == longer.logprobs[:size]
    assert chunks[-1].timings_ms


async def test_the_forms_of_openai(service: TextService) -> None:
    request = ChatRequest(model="m", messages=QUESTION, n=2, logprobs=2)
    chunks = await chunks_of(service, request)
    answer = ChatForm("m").whole(whole_text("m", chunks))
    first, second = answer.choices
    assert (first.index, second.index) == (0, 1)
    assert first.message == second.message
    assert first.logprobs is not None
    shown = first.logprobs.content
    assert "".join(token.token for token in shown).startswith("19.")
    assert all(len(token.top_logprobs) == 2 for token in shown)
    assert [token.token for token in shown] == [token.top_logprobs[0].token for token in shown]  # greedy
    assert bytes(shown[0].bytes).decode() == shown[0].token
    form = ChatForm("m")
    assert len(form.opening(2)) == 2
    pieces = [form.piece(chunk).choices[0] for chunk in chunks]
    assert {piece.index for piece in pieces} == {0, 1}
    assert sorted(piece.index for piece in pieces if piece.finish_reason) == [0, 1]
    usage = form.usage(chunks[-1]).usage
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens == sum(len(c.logprobs) for c in chunks)
    older = await chunks_of(service, CompletionRequest(model="m", prompt="What is 4", max_tokens=5, logprobs=1))
    whole = CompletionForm("m").whole(whole_text("m", older)).choices[0].logprobs
    assert whole is not None
    assert whole.text_offset == [len("".join(whole.tokens[:place])) for place in range(len(whole.tokens))]
    stream = CompletionForm("m")
    pieces_of = [stream.piece(chunk).choices[0].logprobs for chunk in older]
    assert [offset for piece in pieces_of if piece for offset in piece.text_offset] == whole.text_offset


async def test_what_the_engine_refuses_is_an_invalid_request(engine: LLMEngine, service: TextService) -> None:
    for request in (
        CompletionRequest(model="m", prompt=(10**6,)),
        CompletionRequest(model="m", prompt="1 + " * 2000),
        CompletionRequest(model="m", prompt="x", logit_bias={10**6: 1.0}),
        CompletionRequest(model="m", prompt=("x", "1 + " * 2000)),
        ChatRequest(model="m", messages=QUESTION, n=65),
        ChatRequest(model="m", messages=(Message(role="user", content="half \ud800"),)),
        ChatRequest(
            model="m",
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        ),
    ):
        with pytest.raises(InvalidRequest, match=r"token|logit_bias|n is 65|surrogate|no document"):
            await chunks_of(service, request)
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


async def test_json_schemas_whatever_the_model(engine: LLMEngine, service: TextService) -> None:
    # The adder's vocabulary has few characters: all that the schema asks for must be among them.
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4}
    asked = {"type": "json_schema", "json_schema": {"name": "sums", "schema": schema}}
    for options in ({"temperature": 0.0}, {"temperature": 2.0, "seed": 5, "n": 4}):
        request = ChatRequest.model_validate(
            {"model": "m", "messages": QUESTION, "response_format": asked, "max_tokens": 300, **options}
        )
        chunks = await chunks_of(service, request)
        for choice in whole_text("m", chunks).choices:
            assert choice.finish_reason == "stop"
            numbers = json.loads(choice.text)
            assert 2 <= len(numbers) <= 4
            assert all(isinstance(number, int) and 0 <= number <= 99 for number in numbers)
    short = request.model_copy(update={"max_tokens": 2, "n": 1})
    assert whole_text("m", await chunks_of(service, short)).finish_reason == "length"
    for value in ("\u4e16", "\u00e9"):
        unknown = {"type": "json_schema", "json_schema": {"schema": {"const": value}}}
        request = ChatRequest.model_validate({"model": "m", "messages": QUESTION, "response_format": unknown})
        with pytest.raises(InvalidRequest, match=f"has no tokens that write .*{value}"):
            await chunks_of(service, request)
    wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}
    request = ChatRequest.model_validate({"model": "m", "messages": QUESTION, "response_format": wrong})
    with pytest.raises(InvalidRequest, match=r"response_format: .*thing") as refused:
        await chunks_of(service, request)
    assert refused.value.param == "response_format"
    assert not engine.has_work


HERMES = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "how": {"$ref": "#/$defs/how"}},
            "required": ["a", "how"],
            "additionalProperties": False,
            "$defs": {"how": {"enum": ["up", "down"]}},
        },
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}


def with_tools(**fields: Any) -> ChatRequest:
    given = {"model": "m", "messages": QUESTION, "tools": (ADD, OTHER), "max_tokens": 200, "seed": 1, **fields}
    return ChatRequest.model_validate(given)


@pytest.mark.drawn
@pytest.mark.parametrize("template", [HERMES, HERMES.replace("<tool_call>", '"parameters" tool_calls')])
async def test_a_tool_that_must_be_called_is_called(engine: LLMEngine, service: TextService, template: str) -> None:
    engine.tokenizer.chat_template = template
    named = {"type": "function", "function": {"name": "add"}}
    for options in ({"temperature": 0.0}, {"temperature": 2.0, "n": 3}):
        chunks = await chunks_of(service, with_tools(tool_choice=named, **options))
        for choice in whole_text("m", chunks).choices:
            assert (choice.text, choice.finish_reason) == ("", "tool_calls")
            (call,) = choice.tool_calls
            arguments = json.loads(call.arguments)
            assert (call.name, set(arguments)) == ("add", {"a", "how"})
            assert 0 <= arguments["a"] <= 9
            assert arguments["how"] in ("up", "down")
        assert len([chunk for chunk in chunks if chunk.tool_calls]) > 3  # the arguments come as they are written
    cut = whole_text("m", await chunks_of(service, with_tools(tool_choice="required", max_tokens=9)))
    assert cut.finish_reason == "length"
    free = whole_text("m", await chunks_of(service, with_tools(tool_choice="none", temperature=0.0)))
    assert free.finish_reason in ("stop", "length")
    assert not free.tool_calls


async def test_tools_that_cannot_be_used_are_refused(engine: LLMEngine, service: TextService) -> None:
    used = ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]},)
    cases: list[tuple[str | None, dict[str, Any], str]] = [
        (None, {}, "does not know tools"),
        (None, {"tools": (), "messages": (*QUESTION, *used)}, "does not know tools"),
        ("{{ tools }}[CALLS]", {}, "form that is not known"),
        (HERMES, {"tools": (), "tool_choice": "required"}, "no tools to choose"),
        (HERMES, {"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tools: add, other"),
        (HERMES, {"tools": (ADD, ADD)}, "same name"),
    ]
    stock = engine.tokenizer.chat_template
    for template, fields, message in cases:
        engine.tokenizer.chat_template = template or stock
        with pytest.raises(InvalidRequest, match=message):
            await chunks_of(service, with_tools(**fields))
    assert not engine.has_work


async def test_an_answer_with_tools_and_a_schema_is_either(engine: LLMEngine, service: TextService) -> None:
    engine.tokenizer.chat_template = HERMES
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}
    asked = {"type": "json_schema", "json_schema": {"name": "sums", "schema": schema}}
    for seed in range(4):
        request = with_tools(tools=(ADD,), response_format=asked, temperature=2.0, seed=seed, max_tokens=300)
        answer = whole_text("m", await chunks_of(service, request))
        assert answer.finish_reason in ("stop", "tool_calls")
        if answer.tool_calls:
            assert answer.text == ""
            assert set(json.loads(answer.tool_calls[0].arguments)) == {"a", "how"}
        else:
            assert len(json.loads(answer.text)) <= 2


async def test_texts_are_embedded_beside_a_stream(engine: LLMEngine, service: TextService) -> None:
    talking = asyncio.ensure_future(chunks_of(service, ChatRequest(model="m", messages=QUESTION)))
    request = EmbeddingRequest(model="m", input=("What is 1 + 2?", "What is 3 + 4?", "What is 1 + 2?"))
    last = await service.embed(request)
    mean = await service.embed(request.model_copy(update={"pooling": "mean"}))
    for result in (last, mean):
        one, other, again = result.embeddings
        assert one.shape == (engine.embedding_rules.size,)
        assert abs(float(one @ one) - 1) < 1e-5
        assert (one == again).all()
        assert float(one @ other) < 0.9999
        assert result.num_tokens == sum(
            len(engine.encode_text(text)) for text in request.input if isinstance(text, str)
        )
    assert float(last.embeddings[0] @ mean.embeddings[0]) < 0.999
    assert whole_text("m", await talking).text == "19."
    tokens = tuple(engine.encode_text("What is 1 + 2?"))
    by_ids = await service.embed(EmbeddingRequest(model="m", input=(tokens,)))
    assert (by_ids.embeddings[0] == last.embeddings[0]).all()


async def test_a_text_over_the_context_is_cut_with_a_warning_or_refused(
    engine: LLMEngine, service: TextService
) -> None:
    most = engine.max_model_len
    tokens = tuple(engine.encode_text("1 + 2 = " * most))
    assert len(tokens) > most
    cut = await service.embed(EmbeddingRequest(model="m", input=((5,), tokens)))
    assert cut.warnings == (f"input 1 has {len(tokens)} tokens, and the model takes {most}: it was cut",)
    whole = await service.embed(EmbeddingRequest(model="m", input=(tokens[:most],)))
    assert (whole.embeddings[0] == cut.embeddings[1]).all()
    with pytest.raises(InvalidRequest, match=f"input 1 has {len(tokens)} tokens"):
        await service.embed(EmbeddingRequest(model="m", input=((5,), tokens), long_text="error"))
    with pytest.raises(InvalidRequest, match="dimensions: 7"):
        await service.embed(EmbeddingRequest(model="m", input=("x",), dimensions=7))
    with pytest.raises(InvalidRequest, match="token id 99999999"):
        await service.embed(EmbeddingRequest(model="m", input=((99999999,),)))


async def test_a_template_without_an_end_costs_its_own_request_an_error_with_the_models_name(
    engine: LLMEngine, service: TextService
) -> None:
    stock = engine.tokenizer.chat_template
    engine.tokenizer.chat_template = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="model 'm': the chat template 'default' is broken: it takes more than"):
        await chunks_of(service, ChatRequest(model="m", messages=QUESTION))
    engine.tokenizer.chat_template = stock
    assert whole_text("m", await chunks_of(service, ChatRequest(model="m", messages=QUESTION))).text == "19."


async def test_prompts_in_tokens_are_those_of_the_stock_tokenizer(engine: LLMEngine, service: TextService) -> None:
    stock = AutoTokenizer.from_pretrained(ADDER)
    turns = [{"role": "user", "content": "What is 12 + 7?"}]
    chat = await service.tokenize(ChatRequest(model="m", messages=QUESTION), has_special_tokens=True)
    assert list(chat.token_ids) == stock.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    for text in ("What is 3 + 4?", "x", " 1 1 "):
        request = CompletionRequest(model="m", prompt=text)
        for has_special in (True, False):
            found = await service.tokenize(request, has_special_tokens=has_special)
            assert list(found.token_ids) == stock(text, add_special_tokens=has_special)["input_ids"]
            assert found.pieces == tuple(stock.decode([token]) for token in found.token_ids)
            back = await service.tokenize(
                CompletionRequest(model="m", prompt=found.token_ids), has_special_tokens=has_special
            )
            assert (back.token_ids, back.text) == (found.token_ids, stock.decode(found.token_ids))
    assert chat.max_model_len == engine.max_model_len
    with pytest.raises(InvalidRequest, match=f"the last one is {len(stock) - 1}"):
        await service.tokenize(CompletionRequest(model="m", prompt=(0, 2**31 - 1)), has_special_tokens=True)
