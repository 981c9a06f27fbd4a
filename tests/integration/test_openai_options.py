"""Every option of the text and embedding endpoints, asked by OpenAI's client of the running cluster."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import openai
import pytest
import torch
from integration.harness import DEMO_MODELS, Cluster
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer

ADD: Any = {
    "name": "add",
    "description": "Adds",
    "parameters": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
TOOL: Any = {"type": "function", "function": ADD}
NAMED: Any = {"type": "function", "function": {"name": "add"}}


class Total(BaseModel):
    """An answer that is an object."""

    total: int = Field(ge=0, le=198)


class Adder:
    """The demo's language model in stock transformers: the reference of what the cluster says."""

    def __init__(self) -> None:
        folder = DEMO_MODELS / "adder"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the logits (len(ids), vocabulary): in row i those of the token that follows ids[i]."""
        return self.model(torch.tensor([ids])).logits[0]

    def continue_penalized(self, prompt: str, num_tokens: int, frequency: float, presence: float) -> str:
        """Return the greedy continuation with OpenAI's penalties, one whole forward per token."""
        start, made = self.ids(prompt), list[int]()
        for _ in range(num_tokens):
            logits = self.logits([*start, *made])[-1]
            for token, count in Counter(made).items():
                logits[token] -= count * frequency + presence
            made.append(int(logits.argmax()))
        return self.text(made)


@pytest.fixture(scope="module")
def adder() -> Adder:
    return Adder()


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return cluster.openai


@pytest.fixture
def question() -> list[Any]:
    return [{"role": "user", "content": f"What is {random.randint(10, 49)} + {random.randint(10, 49)}?"}]


def test_log_probabilities_are_those_of_transformers(client: openai.OpenAI, adder: Adder, question: list[Any]) -> None:
    asked: Any = {"model": "adder", "messages": question, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs
    assert choice.logprobs.content
    shown = choice.logprobs.content
    prompt = adder.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = adder.ids(choice.message.content or "")
    expected = adder.logits([*prompt, *answer]).log_softmax(-1)[len(prompt) - 1 : -1]
    for place, token in enumerate(answer):
        best = expected[place].topk(3)
        assert [entry.token for entry in shown[place].top_logprobs] == [adder.text([int(id_)]) for id_ in best.indices]
        theirs = [entry.logprob for entry in shown[place].top_logprobs]
        np.testing.assert_allclose(theirs, best.values.numpy(), atol=2e-3)
        np.testing.assert_allclose(shown[place].logprob, expected[place, token].item(), atol=2e-3)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for each in chunk.choices
        for entry in (each.logprobs.content if each.logprobs else None) or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in shown]


def test_logprobs_of_completions_have_offsets(client: openai.OpenAI) -> None:
    choice = client.completions.create(model="adder", prompt="12 + 7", max_tokens=6, temperature=0, logprobs=2).choices[
        0
    ]
    assert choice.logprobs
    assert choice.logprobs.tokens
    assert choice.logprobs.text_offset
    assert choice.logprobs.top_logprobs
    text = "".join(choice.logprobs.tokens)
    assert text.startswith(choice.text)
    for token, offset, best in zip(
        choice.logprobs.tokens, choice.logprobs.text_offset, choice.logprobs.top_logprobs, strict=True
    ):
        assert text[offset:].startswith(token)
        assert len(best) == 2
        assert token in best


def test_several_answers_of_one_prompt(client: openai.OpenAI, question: list[Any]) -> None:
    asked: Any = {"model": "adder", "messages": question}
    alone = client.chat.completions.create(**asked, temperature=0)
    greedy = client.chat.completions.create(**asked, temperature=0, n=3)
    assert [choice.index for choice in greedy.choices] == [0, 1, 2]
    assert {choice.message.content for choice in greedy.choices} == {alone.choices[0].message.content}
    assert greedy.usage
    assert alone.usage
    assert greedy.usage.prompt_tokens == alone.usage.prompt_tokens
    assert greedy.usage.completion_tokens == 3 * alone.usage.completion_tokens
    strange: Any = [{"role": "user", "content": "which way?"}]  # to which it knows no answer
    drawn: Any = {"model": "adder", "messages": strange, "n": 4, "temperature": 2.0, "max_tokens": 16}
    drawn["seed"] = random.getrandbits(31)
    first, again = (client.chat.completions.create(**drawn) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    streamed = [""] * 4
    for chunk in client.chat.completions.create(**drawn, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_lists_of_prompts_as_texts_and_as_ids(client: openai.OpenAI, adder: Adder) -> None:
    prompts = [f"What is {random.randint(1, 9)}", "3 + 4", "x"]
    options: Any = {"model": "adder", "max_tokens": 8, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    for given in (prompts, [adder.ids(prompt) for prompt in prompts]):
        answer = client.completions.create(prompt=given, **options)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == alone
    pairs = client.completions.create(prompt=prompts, n=2, **options)
    assert [choice.text for choice in pairs.choices] == [text for text in alone for _ in range(2)]


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    asked: Any = {"model": "adder", "prompt": ["What is 4", "3 +"], "max_tokens": 5, "temperature": 0}
    plain = [choice.text for choice in client.completions.create(**asked).choices]
    echoed = [choice.text for choice in client.completions.create(**asked, echo=True).choices]
    assert echoed == ["What is 4" + plain[0], "3 +" + plain[1]]
    streamed = ["", ""]
    for chunk in client.completions.create(**asked, echo=True, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == echoed


def test_stop_strings_are_cut_off(client: openai.OpenAI) -> None:
    asked: Any = {"model": "adder", "messages": [{"role": "user", "content": "What is 50 + 7?"}], "temperature": 0}
    for stop in ("7", ["x", "7."]):
        choice = client.chat.completions.create(**asked, stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("5", "stop")
    pieces = client.chat.completions.create(**asked, stop=["7."], stream=True)
    assert "".join(choice.delta.content or "" for chunk in pieces for choice in chunk.choices) == "5"


@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 2.0), (0.7, 0.5)])
def test_penalties_are_those_of_openai(client: openai.OpenAI, adder: Adder, penalties: tuple[float, float]) -> None:
    frequency, presence = penalties
    answer = client.completions.create(
        model="adder",
        prompt="What is 11 + 11?",
        max_tokens=16,
        temperature=0,
        frequency_penalty=frequency,
        presence_penalty=presence,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == adder.continue_penalized("What is 11 + 11?", 16, frequency, presence)


def test_logit_bias_forbids_and_forces(client: openai.OpenAI, adder: Adder) -> None:
    asked: Any = {"model": "adder", "messages": [{"role": "user", "content": "What is 50 + 7?"}], "temperature": 0}
    [five], [star] = adder.ids("5"), adder.ids("*")
    without = client.chat.completions.create(**asked, logit_bias={str(five): -100}).choices[0].message.content
    assert without
    assert "5" not in without
    forced = client.chat.completions.create(**asked, logit_bias={str(star): 100}, max_tokens=4)
    assert forced.choices[0].message.content == "****"


def test_json_objects_and_schemas(client: openai.OpenAI, adder: Adder, question: list[Any]) -> None:
    [end] = adder.ids("}")
    # A document may have some spaces, and a model that has never seen one puts all of them there.
    asked: Any = {"model": "adder", "messages": question, "temperature": 0, "max_tokens": 200}
    found = client.chat.completions.create(
        **asked, response_format={"type": "json_object"}, logit_bias={str(end): 100}
    ).choices[0]
    assert (json.loads(found.message.content or ""), found.finish_reason) == ({}, "stop")
    parsed = client.chat.completions.parse(**asked, response_format=Total).choices[0]
    assert parsed.finish_reason == "stop"
    assert isinstance(parsed.message.parsed, Total)
    words = {"properties": {"kind": {"enum": ["even", "odd"]}}, "required": ["kind"], "additionalProperties": False}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "kind", "schema": {"type": "object", **words}}}
    text = client.chat.completions.create(**asked, response_format=schema).choices[0].message.content
    assert json.loads(text or "")["kind"] in ("even", "odd")


def test_tools_are_called_and_answered(client: openai.OpenAI, question: list[Any]) -> None:
    asked: Any = {"model": "adder-tools", "messages": question, "tools": [TOOL], "temperature": 0, "max_tokens": 100}
    for choice in ("required", NAMED):
        answer = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls
        (call,) = answer.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "add"
        assert all(0 <= json.loads(call.function.arguments)[name] <= 99 for name in "ab")
    with client.chat.completions.stream(**asked, tool_choice=NAMED) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls
    assert streamed.tool_calls[0].function.arguments == call.function.arguments
    none = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert none.message.tool_calls is None
    assert none.message.content
    history = [*question, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "57"}]
    assert client.chat.completions.create(**asked | {"messages": history}).choices[0].finish_reason
    with pytest.raises(openai.BadRequestError, match="does not know tools"):
        client.chat.completions.create(model="adder", messages=question, tools=[TOOL])


def test_responses_say_what_chats_say(client: openai.OpenAI, question: list[Any]) -> None:
    asked: Any = {"model": "adder", "temperature": 0}
    chat = client.chat.completions.create(messages=question, **asked)
    whole = client.responses.create(input=question[0]["content"], **asked)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage
    assert chat.usage
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    with client.responses.stream(input=question, **asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text
    parsed = client.responses.parse(input=question, text_format=Total, max_output_tokens=200, **asked)
    assert isinstance(parsed.output_parsed, Total)
    tool: Any = {"type": "function", **ADD, "strict": True}
    called = client.responses.create(
        model="adder-tools", input=question, tools=[tool], tool_choice="required", temperature=0, max_output_tokens=100
    )
    (call,) = called.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"a", "b"}


def test_dimensions_are_cut_where_a_model_was_trained_for_it(client: openai.OpenAI) -> None:
    texts = ["a short text", f"and another {random.random()}"]
    whole, short = (
        np.array(
            [item.embedding for item in client.embeddings.create(model="texts-short", input=texts, **options).data]
        )
        for options in ({}, {"dimensions": 32})
    )
    expected = whole[:, :32] / np.linalg.norm(whole[:, :32], axis=1, keepdims=True)
    np.testing.assert_allclose(short, expected, atol=1e-6)
    assert len(client.embeddings.create(model="minilm", input="x", dimensions=384).data[0].embedding) == 384
    for model, size in (("minilm", 128), ("texts-short", 64)):
        with pytest.raises(openai.BadRequestError, match="trained for"):
            client.embeddings.create(model=model, input=texts, dimensions=size)
