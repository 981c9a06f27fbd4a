"""Chat templates: the text that transformers makes of them, and an end of those that have none."""

from __future__ import annotations

import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from deployments.engines.libraries.chat_rendering import (
    MAX_NODES,
    MAX_SOURCE,
    prepare_chat_template,
    render_chat_template,
)
from deployments.engines.records.protocol import EngineError

DEMO = Path(__file__).resolve().parents[4] / "infra/demo/models"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'
    + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\n\n" + system_message + "<|eot|>" }}
{%- if tools is not none and not messages | length == 0 %}
    {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start|>user<|end|>\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool-call at once") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is not string %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}"""

# Blocks of earlier thoughts left out, results of tools joined, the last question found from behind.
THINKING = """{%- macro render(content, many) %}{%- if content is string %}{{- content }}
{%- else %}{%- for item in content %}{{- item.text ~ many }}{%- endfor %}{%- endif %}{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}{{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
           not(message.content.startswith('<response>') and message.content.endswith('</response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = render(message.content, 2) %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<response>\n' }}{{- content }}{{- '\n</response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Whatever else such templates use.
ODDS = """{%- macro type_of(schema, depth=0) -%}
    {%- if schema.type == 'array' -%}List[{{ type_of(schema['items'], depth + 1) }}]
    {%- elif schema.type == 'object' and schema.properties -%}
        { {%- for key, value in schema.properties | dictsort %}{{ key }}: {{ type_of(value, depth + 1) }}
        {%- if not loop.last %}, {% endif %}{% endfor -%} }
    {%- else -%}{{ {'string': 'str', 'integer': 'int'}.get(schema.type, schema.type) }}{%- endif -%}
{%- endmacro -%}
{{ '%s has %d' | format('chat', messages | length) }}
{{ '{} of {:>4}'.format(1, 'b') }}|{{ '%05.1f' % 3.14159 }}
{% for group in messages | groupby('role') %}
{{ group.grouper }}:{{ group.list | map(attribute='content') | join('/') }}{% endfor %}
{% for tool in tools or [] %}{{ type_of(tool.function.parameters) }}
{{ tool | tojson(indent=2) | indent(4, true) }}{% endfor %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users | length }}
{{ users | map(attribute='content') | map('upper') | join(', ') }} {{ messages[1:3:1] | length }} {{ 'ab'[::-1] }}
{% for number in range(3) if number != 1 %}{{ loop.cycle('a', 'b') }}{{ loop.revindex }}{% else %}none{% endfor %}
{% for number in range(10) %}{% if number == 2 %}{% continue %}{% elif number > 4 %}{% break %}{% endif %}
{{- number }}{%- endfor %}
{% set text %}{{ messages[0].content | title | replace('e', 'E') }}{% endset %}
{{ text | center(40) }}|
{% filter upper %}mixed {{ messages[-1].role }}{% endfilter %} {{ 7 // 2 }} {{ 2 ** 10 }} {{ -7 % 3 }} {{ 1 / 4 }}
{{ [3, 1, 2] | sort | join }} {{ [1, 2, 3] | sum }} {{ ['b', 'a', 'b'] | unique | list }} {{ (1, 2) + (3,) }}
{{ [1, 2, 3, 4, 5] | batch(2, 'x') | list }} {{ [1, 2, 3] | slice(2) | list }} {{ [1, 2] in [[1, 2]] }}
{{ 'é' | urlencode }}
{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':'), sort_keys=true) }} {{ dict(a=1).items() | list }} {{ nothing }}
{{ messages[0] == messages[0] }} {{ 'a' < 'b' }} {{ ('1', '2') | map('int') | max }} {{ 'x y' | wordcount }}
{{ '<' | e }} {{ '1.7' | float | round | int }} {{ none is none }} {{ 'a' ~ 1 ~ [2] }} {{ 'x' * 3 }}{{ [0] * 2 }}
{%- macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}{% call(value) twice() %}<{{ value }}>{% endcall %}
{% generation %}{{ messages[-1].content | default('', true) | truncate(20) }}{% endgeneration %}"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the wéather <now>",
            "parameters": {
                "type": "object",
                "properties": {
                    "places": {"type": "array", "items": {"type": "string"}},
                    "day": {
                        "type": "object",
                        "properties": {"number": {"type": "integer"}, "month": {"type": "string"}},
                    },
                },
            },
        },
    }
]


def chat(chance: random.Random, num_turns: int, *, with_tools: bool) -> list[dict[str, Any]]:
    def text() -> str:
        words = ["hello", "<think>\n", "</think>", "'quoted'", '"', "\n", "  ", "ünïcode", "{{ x }}", "7", "<|im_end|>"]
        return " ".join(chance.choices(words, k=chance.randrange(1, 30)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": text()}]
    for turn in range(num_turns):
        messages.append({"role": "user", "content": text()})
        if with_tools and chance.random() < 0.5:
            arguments = {"places": [text()], "day": {"number": turn}}
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": json.dumps([text()]), "tool_call_id": f"c{turn}"})
        messages.append({"role": "assistant", "content": text()})
    return [*messages, {"role": "user", "content": text()}]


def theirs(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    rendered, _ = render_jinja_template(
        [messages], tools=tools or None, chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    return str(rendered[0])


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("source", [CHATML, HEADERS, THINKING, ODDS], ids=["chatml", "headers", "thinking", "odds"])
def test_a_chat_is_the_text_that_transformers_makes_of_it(source: str, with_tools: bool) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for num_turns in (0, 1, 2, 7, 40):
        messages = chat(chance, num_turns, with_tools=with_tools and source is not CHATML)
        tools = TOOLS if with_tools else []
        assert render_chat_template(source, "default", messages, tools, SPECIAL) == theirs(source, messages, tools), (
            seed
        )


def has_chats(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").exists() or (config.exists() and "chat_template" in config.read_text())


@pytest.mark.parametrize("name", sorted(folder.name for folder in DEMO.iterdir() if has_chats(folder)))
def test_a_demo_models_chat_is_what_its_tokenizer_makes_of_it(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / name, local_files_only=True)
    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    source = tokenizer.get_chat_template()
    assert render_chat_template(source, "default", messages, [], tokenizer.special_tokens_map) == expected


def test_a_long_chat_is_not_taken_for_an_endless_template() -> None:
    """Many turns, long texts, many tools."""
    chance = random.Random(5)
    many = chat(chance, 1000, with_tools=True)
    long = [{"role": "user", "content": "word " * 400_000}, {"role": "assistant", "content": "\n" * 500_000}]
    for source in (HEADERS, THINKING):
        for messages, tools in ((many, TOOLS), (long, TOOLS), (many[:2], TOOLS * 100)):
            assert render_chat_template(source, "default", messages, tools, SPECIAL) == theirs(source, messages, tools)


DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}"
TWICE = DOUBLED.replace("START", "[1]").replace("NEXT", "[ns.x, ns.x]")
PAIRS = DOUBLED.replace("START", "(1, 2)").replace("NEXT", "(ns.x, ns.x)")
GROWN = DOUBLED.replace("START", "'xxxxxxxx'").replace("NEXT", "OP")
LONG = "{% set t = 'ab ' * 10000 %}{% for i in range(100000) %}WHAT{% endfor %}"
LIST = "{% set t = range(30000) | list %}{% for i in range(100000) %}WHAT{% endfor %}"
ENDLESS = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "nested loops with text": "{% for a in range(99999) %}" + "text " * 5000 + "{% endfor %}",
    "a filtered loop": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a recursive macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a tree of macros": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a tree of callers": "{% macro m(n) %}{% if n %}{% for i in [1, 2] %}{% call m(n - 1) %}{% endcall %}{% endfor %}"
    "{% endif %}{{ caller is defined and caller() }}{% endmacro %}{{ m(60) }}",
    "a tree of blocks": "{% block a %}{% for i in [1, 2] %}{{ self.b() }}{% endfor %}{% endblock %}"
    "{% block b %}{{ self.a() }}{% endblock %}",
    "a text times a number": "{{ 'x' * 10**9 }}",
    "a number times a text": "{{ 10**10 * 'xyz' }}",
    "a list times a number": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ 10**(10**10) }}",
    "squares": DOUBLED.replace("START", "9").replace("NEXT", "ns.x * ns.x") + "{{ ns.x % 10 }}",
    "doubling by +": GROWN.replace("OP", "ns.x + ns.x"),
    "doubling by ~": GROWN.replace("OP", "ns.x ~ ns.x"),
    "doubling by *": GROWN.replace("OP", "ns.x * 2"),
    "doubling by join": GROWN.replace("OP", "[ns.x, ns.x] | join"),
    "doubling by replace": GROWN.replace("OP", "ns.x | replace('x', 'xx')"),
    "doubling by a method": GROWN.replace("OP", "ns.x.replace('x', 'xx')"),
    "doubling by %": GROWN.replace("OP", "'%s%s' % (ns.x, ns.x)"),
    "doubling by format": GROWN.replace("OP", "'{0}{0}'.format(ns.x)"),
    "doubling by a block": DOUBLED.replace("START", "'x'").replace(
        "{% set ns.x = NEXT %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "doubling of lists": DOUBLED.replace("START", "[1]").replace("NEXT", "ns.x + ns.x"),
    "text of a graph": TWICE + "{{ ns.x }}",
    "text of a graph by ~": TWICE + "{{ ns.x ~ '' }}",
    "text of a graph by a filter": TWICE + "{% set y = ns.x | string %}",
    "JSON of a graph": TWICE + "{{ ns.x | tojson }}",
    "a graph joined": TWICE + "{{ ns.x | join }}",
    "a graph formatted": TWICE + "{{ '%s' % (ns.x,) }}",
    "a graph in a format": TWICE + "{{ '{}'.format(ns.x) }}",
    "a graph in a dict": TWICE + "{{ {'a': ns.x}.items() }}",
    "a graph in a namespace": DOUBLED.replace("START", "1").replace("NEXT", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "a graph compared": TWICE + "{% set a = ns.x %}" + TWICE + "{{ a == ns.x }}",
    "a graph in a list": TWICE + "{% set a = ns.x %}" + TWICE + "{{ ns.x in [a] }}",
    "a graph tested": TWICE + "{% set a = ns.x %}" + TWICE + "{{ a is eq ns.x }}",
    "a graph selected": TWICE + "{% set a = ns.x %}" + TWICE + "{{ [a] | select('eq', ns.x) | list | length }}",
    "a graph hashed": PAIRS + "{{ {ns.x: 1} | length }}",
    "a graph looked up": PAIRS + "{{ {}[ns.x] }}",
    "a graph got": PAIRS + "{{ {}.get(ns.x) }}",
    "a graph as a set": PAIRS + "{{ [ns.x] | unique | list | length }}",
    "a graph sorted": TWICE + "{% set a = ns.x %}" + TWICE + "{{ [a, ns.x] | sort | length }}",
    "a graph counted": TWICE + "{% set a = ns.x %}" + TWICE + "{{ [a].count(ns.x) }}",
    "a graph in a changed loop": TWICE + "{% for i in range(2) %}{{ loop.changed(ns.x) }}{% endfor %}",
    "center": "{{ 'x' | center(10**9) }}",
    "the method center": "{{ 'x'.center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**9) }}",
    "bytes": "{{ (5).to_bytes(10**9) | length }}",
    "translate": "{{ ('a' * 10000).translate({97: 'b' * 10000}) | length }}",
    "join": "{{ range(10000) | join('x' * 10000) }}",
    "the method join": "{{ ('x' * 10000).join(['a'] * 10000) | length }}",
    "lists of ranges": "{% for i in range(1000) %}{% set x = range(100000) | list %}{% endfor %}",
    "batch": "{{ [1] | batch(10**9, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "indent": "{{ ('\n' * 10000) | indent(10**6) }}",
    "indent by a text": "{{ ('\n' * 10000) | indent('x' * 10000, true) }}",
    "indented JSON": "{{ [[1]] | tojson(indent=10**9) }}",
    "separators": "{{ ([1] * 10000) | tojson(separators=('x' * 10000, ':')) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width of an argument": "{{ '%*d' % (10**9, 1) }}",
    "a width by the filter": "{{ '%1000000000d' | format(1) }}",
    "a width of a field": "{{ '{:1000000000}'.format(1) }}",
    "a width in a width": "{{ '{:{}}'.format(1, 10**9) }}",
    "a width by format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "a field many times": "{{ ('{0}' * 10000).format('x' * 10000) | length }}",
    "replaced nothing": "{{ ('x' * 10000) | replace('', 'x' * 10000) }}",
    "sum of lists": "{{ ([[1] * 100] * 10000) | sum(start=[]) | length }}",
    "mapped": "{% for i in range(1000) %}{{ range(100000) | map('string') | list | length }}{% endfor %}",
    "selected": "{% for i in range(1000) %}{{ range(100000) | select('gt', 10**6) | first }}{% endfor %}",
    "a generator of text": "{{ lipsum(n=10**6) }}",
    "many a search": LONG.replace("WHAT", "{% if 'c' in t %}{% endif %}"),
    "many a split": LONG.replace("WHAT", "{% set x = t.split() %}"),
    "many an upper": LONG.replace("WHAT", "{% set x = t | upper %}"),
    "many a comparison": LIST.replace("WHAT", "{% if t == i %}{% endif %}{% if t[1:] == t[1:] %}{% endif %}"),
    "many a slice": LIST.replace("WHAT", "{% set x = t[1:] %}"),
    "many an output": LONG.replace("WHAT", "{{ t }}"),
    "many a search in a list": LIST.replace("WHAT", "{% if 'c' in t %}{% endif %}"),
    "many a reversal": LIST.replace("WHAT", "{% set x = t | reverse | list %}"),
    "escapes": "{% autoescape true %}{{ '<' }}{% endautoescape %}",
}  # fmt: skip


@pytest.mark.drawn(3)
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_ends_with_an_error(source: str) -> None:
    gc.collect()
    began_s = time.thread_time()
    why = "is broken: it takes|not supported|'lipsum' is undefined|maximum recursion"
    with pytest.raises(EngineError, match=why):
        render_chat_template(source, "default", [{"role": "user", "content": "Hi"}], [], SPECIAL)
    assert time.thread_time() - began_s < 0.5


def test_what_ends_with_few_turns_and_not_with_many_is_said() -> None:
    with pytest.raises(EngineError, match=r"the chat template 'tool_use' is broken: it takes more than \d+ steps"):
        render_chat_template(ENDLESS["nested loops"], "tool_use", [{"role": "user", "content": "Hi"}], TOOLS, SPECIAL)


def test_a_template_that_refuses_is_quoted() -> None:
    with pytest.raises(EngineError, match="the chat template 'default' refuses the messages: no robots"):
        render_chat_template("{{ raise_exception('no robots') }}", "default", [{"role": "r"}], [], SPECIAL)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("x" * (MAX_SOURCE + 1), f"may have {MAX_SOURCE}"),
        ("{{ a }}" * (MAX_SOURCE // 7), f"may have {MAX_NODES}"),
        ("{{ " + "[" * 5000 + "]" * 5000 + " }}", "recursion"),
        ("{% for %}", "Expected an expression"),
        ("{{ 'x' | pprint }}", "No filter named 'pprint'"),
    ],
)
def test_what_cannot_be_compiled_is_told_to_every_chat_at_once(source: str, why: str) -> None:
    prepare_chat_template(source)
    began_s = time.thread_time()
    for _ in range(100):
        with pytest.raises(EngineError, match=f"the chat template 'tool_use' is broken: .*{why}"):
            render_chat_template(source, "tool_use", [{"role": "user", "content": "Hi"}], [], SPECIAL)
    assert time.thread_time() - began_s < 0.1


def test_what_was_paid_in_one_chat_is_not_missing_in_another() -> None:
    source = "{% for i in range(10000) %}{% endfor %}{{ messages[0].content }}"
    texts = [render_chat_template(source, "default", [{"content": str(n)}], [], SPECIAL) for n in range(20)]
    assert texts == [str(n) for n in range(20)]
