"""Answers of all families: whatever the pieces in which the text comes, the same text, thoughts and calls."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from kit.seeding import seeded_random
from llguidance import LLMatcher, LLTokenizer
from unit.deployments.engines.llm.family_templates import HERMES, TEMPLATES

from deployments.engines.libraries.chat_rendering import render_chat_template
from deployments.engines.llm.answer_forms import REASONING_FORMS, TOOL_FORMS, AnswerForm
from deployments.engines.llm.answer_grammars import LarkGrammar, call_rule
from deployments.engines.llm.answer_reader import AnswerReader
from deployments.engines.llm.chat import CalledTool, Function, whole_calls
from deployments.engines.llm.chat_prompts import ChatOptions, render_chat
from deployments.engines.llm.template_forms import answer_form, template_forms
from deployments.engines.records.protocol import EngineError

FUNCTIONS = [
    Function(
        name="book",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "nights": {"type": "integer"},
                "dogs": {"type": "boolean"},
                "guests": {"type": "array", "items": {"type": "string"}},
                "place": {"$ref": "#/$defs/place"},
                "note": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            },
            "$defs": {"place": {"type": "object", "properties": {"floor": {"type": "integer"}}}},
        },
    ),
    Function(name="list-all", parameters={"type": "object", "properties": {}}),
]
TEXTS = [
    "",
    "Ulm",
    "a 'quoted' } [brace {",
    "back\\slash",
    "\u00e9 \u4e16\nline",
    "12",
    "true",
    "<b>",
    "  two ",
    ", x=1)",
]
NONE = AnswerForm()
Read = tuple[str, str, list[tuple[str, Any]]]


def tokenizer_of(template: str) -> Any:
    """Return the parts of a tokenizer that a template's chats need."""
    return SimpleNamespace(chat_template=template, special_tokens_map={}, get_chat_template=lambda tools=None: template)


def random_calls(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    def arguments() -> dict[str, Any]:
        some = {
            "city": rng.choice(TEXTS),
            "nights": rng.randint(-3, 300),
            "dogs": rng.random() < 0.5,
            "guests": [rng.choice(TEXTS[1:4]) for _ in range(rng.randrange(3))],
            "place": {"floor": rng.randrange(9)},
            "note": rng.choice([None, 2.5]),
        }
        return {key: value for key, value in some.items() if rng.random() < 0.7}

    return [rng.choice([("book", arguments()), ("list-all", {})]) for _ in range(rng.randint(1, 3))]


def read(form: AnswerForm, pieces: Sequence[str], begun: str = "", *, is_cut: bool = False) -> Read:
    reader = AnswerReader(form, FUNCTIONS)
    found = [reader.feed(begun), *map(reader.feed, pieces), reader.flush(is_cut=is_cut)]
    calls = whole_calls([call for piece in found for call in piece.calls])
    assert len({call.id for call in calls}) == len(calls) == reader.num_calls
    read_back = [(call.name, json.loads(call.arguments)) for call in calls]
    return "".join(piece.text for piece in found), "".join(piece.reasoning for piece in found), read_back


def random_cuts(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.randint(1, max(1, len(text) // rng.randint(1, 6)))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def written(template: str, calls: Sequence[tuple[str, dict[str, Any]]], text: str = "") -> tuple[str, str]:
    """Return the end of a prompt and the answer behind it, as a template renders them in a history."""
    tools = [{"type": "function", "function": one.model_dump(exclude_none=True)} for one in FUNCTIONS]
    chat = [{"role": "user", "content": "Book it."}]
    made = [
        {"id": f"abcdefgh{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    tokenizer = tokenizer_of(template)
    prompt = render_chat(tokenizer, chat, ChatOptions(tools))
    answer = [*chat, {"role": "assistant", "content": text, "tool_calls": made}]
    whole = render_chat(tokenizer, answer, ChatOptions(tools, opens_turn=False))
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].removesuffix("<|im_end|>\n").removesuffix("<|call|>")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", TOOL_FORMS)
def test_each_family_is_found_by_its_template_and_reads_back_what_that_writes(name: str) -> None:
    rng = seeded_random()
    form = answer_form(tokenizer_of(TEMPLATES[name]), has_tools=True)
    assert form.tools is TOOL_FORMS[name]
    for _ in range(30):
        calls = random_calls(rng)[: 1 if name == "harmony" else None]
        if form.tools.syntax == "braces":  # what these write has no words for such keys and texts
            calls = [(one, {key: value for key, value in own.items() if value != ""}) for one, own in calls]
        prompt, text = written(TEMPLATES[name], calls)
        expected = ("", "", calls)
        begun = form.begun(prompt)
        assert read(form, [text], begun) == expected
        assert read(form, list(text), begun) == expected
        assert read(form, random_cuts(text, rng), begun) == expected
    prompt, text = written(TEMPLATES[name], calls[:1])
    for place in range(1, len(text)):
        assert read(form, [text[:place], text[place:]], form.begun(prompt)) == ("", "", calls[:1])


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMS.items() if not form.is_bare and name != "harmony"])
def test_text_beside_calls_is_shown_without_the_blanks_between(name: str) -> None:
    rng = seeded_random()
    form = AnswerForm(TOOL_FORMS[name], REASONING_FORMS["think"])
    for _ in range(10):
        calls = random_calls(rng)[:1]
        _, text = written(TEMPLATES[name], calls)
        before, thought = rng.choice(["", "Let me see.", "a < b, [c]"]), rng.choice(["", "Ulm? <b>"])
        answer = (
            (f"<think>\n{thought}\n</think>\n\n" if thought else "") + before + ("\n" if before else "") + text + "\n"
        )
        expected = (before, thought, calls)
        assert read(form, [answer], "") == expected
        assert read(form, random_cuts(answer, rng), "") == expected


@pytest.mark.drawn(7)
@pytest.mark.parametrize("name", TOOL_FORMS)
def test_an_answer_that_must_call_writes_one_call_in_the_family_s_own_form(name: str) -> None:
    """The grammar's texts, drawn byte by byte, are calls to the reader, and keep to the schema."""
    parameters = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Ulm", "Bern"]},
            "note": {"type": "string", "maxLength": 3},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
            "dogs": {"type": "boolean"},
        },
        "required": ["city", "dogs"],
        "additionalProperties": False,
    }
    functions = [Function(name="book", parameters=parameters), Function(name="list-all")]
    lark = LarkGrammar({})
    grammar = LLMatcher.grammar_from_lark(lark.text(call_rule(lark, TOOL_FORMS[name], functions)))
    form = AnswerForm(TOOL_FORMS[name], REASONING_FORMS["harmony"] if name == "harmony" else None)
    found = set()
    for seed in range(12):
        text = _drawn(grammar, random.Random(seed))
        if text is None:
            continue
        ((called, arguments),) = read(form, list(text), "<|start|>assistant" * (name == "harmony") + form.tools.prefix)[
            2
        ]  # type: ignore[union-attr]
        found.add(called)
        if called == "book" and form.tools.syntax == "object":  # type: ignore[union-attr]
            Draft202012Validator(parameters).validate(arguments)
        if called == "book":
            assert arguments["city"] in ("Ulm", "Bern")
            assert isinstance(arguments["dogs"], bool)
    assert found == {"book", "list-all"}


@functools.cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _drawn(grammar: str, rng: random.Random) -> str | None:
    """Return a text of a grammar; None for one that does not end soon."""
    matcher, text = LLMatcher(_bytes(), grammar, log_level=0), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    while not matcher.is_stopped() and len(text) < 400:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = [int(one) for one in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]
        plain = [one for one in allowed if 32 <= one < 127] or allowed
        ends = [one for one in plain if chr(one) in "<}])\"'|" or one > 255]
        token = rng.choice(ends if ends and rng.random() < 0.5 else plain)
        if token > 255:
            break
        text.append(token)
        matcher.consume_token(token)
        if matcher.is_accepting():
            return text.decode(errors="replace")
    return text.decode(errors="replace") if matcher.is_accepting() else None


@pytest.mark.parametrize(
    ("name", "answer", "prompt"),
    [
        ("think", "<think>\nHm.\n</think>\n\n19.", "assistant\n"),
        ("think", "Hm.\n</think>\n\n19.", "assistant\n<think>\n"),
        ("think", "19.", "assistant\n<think>\n\n</think>\n\n"),
        ("mistral", "[THINK]Hm.[/THINK]19.", "[/INST]"),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>19.", "<|turn>model\n"),
        ("command", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>19.<|END_RESPONSE|>", ""),
        ("hunyuan", "<think>\nHm.\n</think>\n<answer>\n19.\n</answer>", ""),
        ("granite-3.2", "Here is my thought process: Hm. Here is my response: 19.", ""),
        ("seed", "<seed:think>Hm.</seed:think>19.", ""),
        (
            "kimi-k3",
            "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>19.<|close|>response<|sep|>",
            "",
        ),
        ("kimi-k3", "Hm.<|close|>think<|sep|><|open|>response<|sep|>19.", "assistant<|open|>think<|sep|>"),
        ("minimax-m3", "<mm:think>Hm.</mm:think>19.", ""),
        ("granite-3.3", "<think>Hm.</think><response>19.</response>", ""),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>19.",
            "<|start|>assistant",
        ),
    ],
)
def test_reasoning_is_told_from_the_answer_however_it_is_cut(name: str, answer: str, prompt: str) -> None:
    form = AnswerForm(TOOL_FORMS["harmony"] if name == "harmony" else None, REASONING_FORMS[name])
    begun = form.begun(prompt)
    expected = ("19.", "Hm." if "Hm." in answer else "", [])
    assert read(form, [answer], begun) == expected
    for place in range(1, len(answer)):
        assert read(form, [answer[:place], answer[place:]], begun) == expected
    assert read(form, list(answer), begun) == expected


def test_each_reasoning_form_is_found_by_its_markers() -> None:
    for name, form in REASONING_FORMS.items():
        template = "{{ messages }}" + "".join(form.signs) + "".join(form.openings) + "".join(form.around)
        assert answer_form(tokenizer_of(template), has_tools=False).reasoning is form, name
    assert answer_form(tokenizer_of("{{ messages }}"), has_tools=False) == NONE
    think = answer_form(tokenizer_of("{{ messages }}"), has_tools=False, reasoning_form="think")
    assert think.reasoning is REASONING_FORMS["think"]
    assert answer_form(tokenizer_of("</think>"), has_tools=False, reasoning_form="none") == NONE
    with pytest.raises(EngineError, match=r"reasoning_form 'thunk' is not known \(known: none, harmony"):
        answer_form(tokenizer_of("x"), has_tools=False, reasoning_form="thunk")


def test_templates_that_write_no_calls_say_the_form_in_words_and_a_name_goes_before_them() -> None:
    for name, form in TOOL_FORMS.items():
        if form.signs:
            template = "{{ tools }}{{ messages }}" + " ".join(form.signs)
            found = answer_form(tokenizer_of(template), has_tools=True).tools
            assert found is not None, name
            assert found.openings == form.openings, name
    assert answer_form(tokenizer_of("x"), has_tools=True, tool_form="glm").tools is TOOL_FORMS["glm"]
    for template, message in (("{{ tools }}", "tool_form may say"), ("{{ messages }}", "does not know tools")):
        with pytest.raises(EngineError, match=message):
            answer_form(tokenizer_of(template), has_tools=True)


def form_of(name: str) -> AnswerForm:
    return AnswerForm(TOOL_FORMS[name], REASONING_FORMS["think"])


def test_two_objects_in_one_call_and_a_call_that_is_not_closed() -> None:
    one, two = '{"name": "book", "arguments": {"city": "Ulm"}}', '{"name": "list-all", "arguments": {}}'
    expected = ("", "", [("book", {"city": "Ulm"}), ("list-all", {})])
    for text in (
        f"<tool_call>\n{one}\n{two}\n</tool_call>",
        f"<tool_call>\n{one}\n<tool_call>\n{two}\n</tool_call>",
        f"<tool_call>{one}<tool_call>{two}",
        f"<tool_call>\n<tool_call>\n{one}\n</tool_call>\n\n<tool_call>[{two}]</tool_call>\n",
    ):
        assert read(form_of("hermes"), [text]) == expected
        assert read(form_of("hermes"), list(text)) == expected


def test_a_call_ends_reasoning_that_was_not_closed_and_its_marker_in_a_thought_does_not() -> None:
    call = '<tool_call>\n{"name": "book", "arguments": {}}\n</tool_call>'
    assert read(form_of("hermes"), list(f"Hm.\n{call}"), "<think>\n") == ("", "Hm.", [("book", {})])
    text = "I write <tool_call> and then {.\n</think>\n\nNo."
    assert read(form_of("hermes"), list(text), "<think>\n") == ("No.", "I write <tool_call> and then {.", [])
    mistral = AnswerForm(TOOL_FORMS["mistral-args"], REASONING_FORMS["mistral"])
    text = "[THINK]Say [TOOL_CALLS]book[ARGS]{}?[/THINK][TOOL_CALLS]book[ARGS]{}"
    assert read(mistral, list(text)) == ("", "Say [TOOL_CALLS]book[ARGS]{}?", [("book", {})])


def test_markers_within_arguments_are_text() -> None:
    for name, text in (
        ("hermes", '<tool_call>\n{"name": "book", "arguments": {"city": "</tool_call> }"}}\n</tool_call>'),
        (
            "qwen3-coder",
            "<tool_call>\n<function=book>\n<parameter=city>\n</tool_call> }\n</parameter>\n</function>\n</tool_call>",
        ),
        ("glm", "<tool_call>book\n<arg_key>city</arg_key>\n<arg_value></tool_call> }</arg_value>\n</tool_call>"),
        ("gemma4", '<|tool_call>call:book{city:<|"|></tool_call> }<|"|>}<tool_call|>'),
    ):
        assert read(form_of(name), list(text)) == ("", "", [("book", {"city": "</tool_call> }"})]), name


def test_ids_of_the_model_are_kept_and_recipients_nobody_offered_are_left_out() -> None:
    reader = AnswerReader(form_of("kimi-k2"), FUNCTIONS)
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.book:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    )
    assert {(call.id, call.name) for call in reader.feed(text).calls} == {("functions.book:7", "book")}
    harmony = AnswerForm(TOOL_FORMS["harmony"], REASONING_FORMS["harmony"])
    text = "<|channel|>commentary to=python<|message|>1+1<|end|><|start|>assistant<|channel|>final<|message|>2"
    assert read(harmony, list(text), "<|start|>assistant") == ("2", "", [])


def test_only_so_many_calls_as_are_meant() -> None:
    reader = AnswerReader(form_of("hermes"), FUNCTIONS, max_calls=1)
    call = '<tool_call>\n{"name": "list-all", "arguments": {}}\n</tool_call>\n'
    assert {piece.index for piece in reader.feed(call * 3).calls} == {0}


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "a <tool_ca",
        '<tool_call>\n{"nothing": 1}',
        "<tool_call>\n[1, 2]",
        '{"a": {"b": "}"}} and more',
        '{"name": 3, "parameters": {}}',
        '{"name": "half',
        "[1, 2]",
        "",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for name in TOOL_FORMS:
        if name in ("harmony", "granite-3.1", "qwen3-coder", "glm", "hunyuan-v3"):
            continue
        shown, thought, calls = read(form_of(name), random_cuts(text, seeded_random()))
        assert not calls
        assert not thought
        assert shown.replace("\n", "") == text.replace("\n", ""), name


def test_other_orders_of_members_and_ends_within_a_call() -> None:
    llama3 = form_of("llama3")
    for text in (
        '{"parameters": {"city": "Ulm"}, "name": "book"}',
        '{"type": "function", "name": "book", "parameters": {"city": "Ulm"}}',
        '<|python_tag|>{"type": "function", "function": {"name": "book", "arguments": "{\\"city\\": \\"Ulm\\"}"}}',
    ):
        assert read(llama3, list(text)) == ("", "", [("book", {"city": "Ulm"})])
    assert read(llama3, ['{"name": "nobody\'s", "parameters": {}}'])[2] == []  # an answer in JSON
    reader = AnswerReader(form_of("hermes"), FUNCTIONS)
    piece = reader.feed('<tool_call>\n{"name": "f", "arguments": {"a": "be')
    assert (piece.text, [(call.name, call.arguments) for call in piece.calls]) == ("", [("f", ""), ("f", '{"a": "be')])
    assert reader.flush(is_cut=True).text == ""
    reader = AnswerReader(form_of("hermes"), FUNCTIONS)
    assert reader.feed('<tool_call>\n{"name": "f", "arguments": {}}\n</tool').text == ""
    assert reader.flush().text == ""  # an answer that ends within what closes a call
    assert read(llama3, ['{"name": "book", "parameters": {}} that is all'])[0].strip() == "that is all"


def test_a_cut_call_is_not_closed_and_a_forgotten_end_is() -> None:
    text = "<tool_call>\n<function=book>\n<parameter=city>\nUlm\n</parameter>\n"

    def arguments(*, is_cut: bool) -> str:
        reader = AnswerReader(form_of("qwen3-coder"), FUNCTIONS)
        pieces = [reader.feed(text), reader.flush(is_cut=is_cut)]
        return "".join(call.arguments for piece in pieces for call in piece.calls)

    assert arguments(is_cut=True) == '{"city": "Ulm'
    assert arguments(is_cut=False) == '{"city": "Ulm"}'


def test_the_same_arguments_as_text_where_a_template_wants_one() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "book", "arguments": {"city": "Ulm"}}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render_chat(tokenizer_of(TEMPLATES["deepseek-v3.1"]), chat)
    assert '{"city": "Ulm"}' in text
    assert '{"city": "Ulm"}' in render_chat_template(HERMES, "x", chat, [], {})


def test_a_developer_is_the_system_to_a_template_that_knows_none() -> None:
    body = "[{{ m.role }}] {{ m.content }}\n"
    plain = "{% for m in messages %}{% if m.role in ['user', 'system'] %}" + body + "{% endif %}{% endfor %}"
    chat = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    assert render_chat(tokenizer_of(plain), chat) == "[system] a\n\nb\n[user] c\n"
    known = plain.replace("'system'", "'system', 'developer'")
    assert render_chat(tokenizer_of(known), chat) == "[system] a\n[developer] b\n[user] c\n"


def test_pieces_of_one_call_are_one() -> None:
    pieces = [CalledTool(0, "a", "f", ""), CalledTool(1, "b", "g", "{}"), CalledTool(0, "a", "f", "{}")]
    assert whole_calls(pieces) == (CalledTool(0, "a", "f", "{}"), CalledTool(1, "b", "g", "{}"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "deepseek-v3.2",
            '<|DSML|function_calls>\n<|DSML|invoke name="free">\n<|DSML|parameter name="a" string="true">12'
            '</|DSML|parameter>\n<|DSML|parameter name="b" string="false">12</|DSML|parameter>\n</|DSML|invoke>\n'
            "</|DSML|function_calls>".replace("|", "\uff5c"),
        ),
        (
            "kimi-k3",
            '<|open|>tools<|sep|><|open|>call tool="free" index="7"<|sep|>'
            '<|open|>argument key="a" type="string"<|sep|>12'
            '<|close|>argument<|sep|><|open|>argument key="b" type="number"<|sep|>12<|close|>argument<|sep|>'
            "<|close|>call<|sep|><|close|>tools<|sep|>",
        ),
    ],
)
def test_a_form_that_says_the_type_of_a_value_is_believed_where_the_schema_says_none(name: str, text: str) -> None:
    form = AnswerForm(TOOL_FORMS[name])
    reader = AnswerReader(form, [Function(name="free")])
    pieces = [*map(reader.feed, text), reader.flush()]
    (call,) = whole_calls([call for piece in pieces for call in piece.calls])
    assert json.loads(call.arguments) == {"a": "12", "b": 12}


def test_keys_of_kimi_k3_are_escaped_as_in_xml_and_values_are_not() -> None:
    keys = {"q&a": {"const": "fish &amp; chips"}, 'say "hi"': {"const": "<hi>"}}
    function = Function(name="save", parameters={"type": "object", "properties": keys, "required": list(keys)})
    lark = LarkGrammar({})
    grammar = LLMatcher.grammar_from_lark(lark.text(call_rule(lark, TOOL_FORMS["kimi-k3"], [function])))
    text = (
        '<|open|>tools<|sep|><|open|>call tool="save" index="1"<|sep|><|open|>argument key="q&amp;a" type="string"'
        '<|sep|>fish &amp; chips<|close|>argument<|sep|><|open|>argument key="say &quot;hi&quot;" type="string"<|sep|>'
        "<hi><|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    for pieces in ([text], list(text)):
        reader = AnswerReader(AnswerForm(TOOL_FORMS["kimi-k3"]), [function])
        (call,) = whole_calls([call for piece in pieces for call in reader.feed(piece).calls])
        assert json.loads(call.arguments) == {"q&a": "fish &amp; chips", 'say "hi"': "<hi>"}
    prefix = TOOL_FORMS["kimi-k3"].prefix
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    allowed = matcher.try_consume_tokens(list(text.removeprefix(prefix).encode()))
    assert text.removeprefix(prefix)[:allowed].endswith("<|close|>call<|sep|>")  # what a forced call may write


@pytest.mark.parametrize("name", [name for name in TOOL_FORMS if name != "harmony"])
def test_a_form_is_found_where_prompts_begin_a_thought(name: str) -> None:
    """The text that the template writes behind a prompt then begins as a marker of calls does: with the same sign."""
    template = TEMPLATES[name] + "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert answer_form(tokenizer_of(template), has_tools=True).tools is TOOL_FORMS[name]
    for one in (template, TEMPLATES[name]):
        forms = template_forms(tokenizer_of(one), one)
        assert (forms.has_text_arguments, forms.has_short_ids) == (name == "deepseek-v3.1", False)


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMS.items() if form.mark])
@pytest.mark.parametrize("mark", ["\uff5c\uff5cDSML\uff5c\uff5c", "|DSML|", "||dsml||", "\uff5cDsml\uff5c\uff5c"])
def test_marks_with_other_bars_and_letters_are_those_that_are_meant(name: str, mark: str) -> None:
    """As models write them in long chats."""
    rng = seeded_random()
    calls = random_calls(rng)
    _, text = written(TEMPLATES[name], calls)
    assert TOOL_FORMS[name].mark in text
    drifted = "So: " + text.replace(TOOL_FORMS[name].mark, mark)
    for pieces in ([drifted], list(drifted), *(random_cuts(drifted, rng) for _ in range(5))):
        assert read(form_of(name), pieces) == ("So:", "", calls)
    for other in ("a < b", "<", "</", "a <|", "<|DSM", "if x <|y| else", "<|DSML", "</||DSM\n"):
        assert read(form_of(name), list(other))[0].rstrip() == other.rstrip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{city: "O\'Neil, {and} \\"sons\\"", nights:3}', {"city": 'O\'Neil, {and} "sons"', "nights": 3}),
        ('{"city":"Ulm","guests":["a, b", <|"|>c "d" }<|"|>]}', {"city": "Ulm", "guests": ["a, b", 'c "d" }']}),
        ('{city:3" pipe,nights:1}', {"city": '3" pipe', "nights": 1}),
    ],
)
def test_texts_in_plain_quotes_are_texts_in_gemma_s_calls(text: str, expected: dict[str, Any]) -> None:
    answer = f"<|tool_call>call:book{text}<tool_call|>Well."
    for pieces in ([answer], list(answer), random_cuts(answer, seeded_random())):
        assert read(form_of("gemma4"), pieces) == ("Well.", "", [("book", expected)])


def test_values_in_tags_of_their_own_may_have_members_of_the_same_name() -> None:
    mark = "]<]minimax[>["
    leaf = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    parameters = {
        "type": "object",
        "properties": {"a": leaf, "l": {"type": "array", "items": leaf}, "s": {"type": "string"}},
    }
    function = Function(name="f", parameters=parameters)

    def tag(name: str, inner: str) -> str:
        return f"{mark}<{name}>{inner}{mark}</{name}>"

    a = tag("a", "\n" + tag("a", "7") + tag("b", "12") + "\n")
    items = tag("l", tag("item", tag("b", "x < y")) + tag("item", tag("a", "many")))
    body = f"\n{a}\n{items}{tag('s', ' <b>] ')}\n{mark}</invoke>{mark}</tool_call>"
    text = f'Ok.{mark}<tool_call>{mark}<invoke name="f">{body}'
    expected = {"a": {"a": 7, "b": "12"}, "l": [{"b": "x < y"}, {"a": "many"}], "s": " <b>] "}
    for pieces in ([text], list(text), random_cuts(text, seeded_random())):
        reader = AnswerReader(AnswerForm(TOOL_FORMS["minimax-m3"]), [function])
        read_back = [*map(reader.feed, pieces), reader.flush()]
        (call,) = whole_calls([call for piece in read_back for call in piece.calls])
        assert json.loads(call.arguments) == expected
        assert "".join(piece.text for piece in read_back) == "Ok."
    reader = AnswerReader(AnswerForm(TOOL_FORMS["minimax-m3"]), [function])
    pieces = [reader.feed(text[: text.index("many")]), reader.flush(is_cut=True)]
    cut = "".join(call.arguments for piece in pieces for call in piece.calls)
    assert cut == '{"a": {"a": 7, "b": "12"}, "l": '
    lark = LarkGrammar({})
    grammar = LLMatcher.grammar_from_lark(lark.text(call_rule(lark, TOOL_FORMS["minimax-m3"], [function])))
    forced = (
        f'f">{tag("a", tag("a", "7"))}{tag("l", tag("item", tag("b", "x < y")) * 2)}{tag("s", "<b>")}{mark}</invoke>'
    )
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.try_consume_tokens(list(forced.encode())) == len(forced.encode())
    assert matcher.is_accepting()


THINKING = [name for name, form in REASONING_FORMS.items() if name != "harmony" and form.ends_with_calls]


def mixed(name: str, thinks: str, rng: random.Random) -> str:
    """Return an answer of thoughts, texts and calls in any order, as a family writes them."""
    opening, closing = (
        f"\n{one}\n" for one in (REASONING_FORMS[thinks].openings or ("",))[:1] + REASONING_FORMS[thinks].closings[:1]
    )
    parts = []
    for _ in range(rng.randint(1, 5)):
        kind, text = rng.choice(["thought", "text", "calls"]), rng.choice([*TEXTS[1:], "I write <tool_call> and {"])
        if name == "harmony" and kind != "calls":
            channel = "analysis" if kind == "thought" else "final"
            parts.append(f"<|channel|>{channel}<|message|>{text}<|end|><|start|>assistant")
        elif kind == "calls":
            calls = random_calls(rng)[: 1 if name == "harmony" else None]
            parts.append(
                written(TEMPLATES[name], calls)[1] + ("<|call|><|start|>assistant" if name == "harmony" else "")
            )
        else:
            parts.append(opening + text + closing if kind == "thought" else text)
    return "".join(parts)


def read_raw(
    form: AnswerForm, pieces: Sequence[str], begun: str, *, is_cut: bool
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the parts that are read, with the arguments of calls as they came: they may have no end."""
    reader = AnswerReader(form, FUNCTIONS)
    found = [reader.feed(begun), *map(reader.feed, pieces), reader.flush(is_cut=is_cut)]
    calls = whole_calls([call for piece in found for call in piece.calls])
    texts = "".join(piece.text for piece in found), "".join(piece.reasoning for piece in found)
    return *texts, [(call.name, call.arguments) for call in calls]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", TOOL_FORMS)
def test_streamed_answers_are_the_whole_ones_wherever_they_end(name: str) -> None:
    """Thoughts, texts and several calls in any order, ended anywhere: by the bound on tokens, or by themselves."""
    rng = seeded_random()
    for _ in range(25):
        thinks = "harmony" if name == "harmony" else rng.choice(THINKING)
        form = AnswerForm(TOOL_FORMS[name], REASONING_FORMS[thinks])
        text = mixed(name, thinks, rng)
        begun = "<|start|>assistant" if name == "harmony" else rng.choice(("", *REASONING_FORMS[thinks].openings[:1]))
        for size in (len(text), rng.randrange(1, len(text) + 1), rng.randrange(1, len(text) + 1)):
            cut, is_cut = text[:size], rng.random() < 0.5
            whole = read_raw(form, [cut], begun, is_cut=is_cut)
            for pieces in (list(cut), random_cuts(cut, rng), random_cuts(cut, rng)):
                assert read_raw(form, pieces, begun, is_cut=is_cut) == whole, (thinks, begun, cut)
