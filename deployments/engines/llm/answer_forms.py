"""The forms in which families of models write reasoning and tool calls: data that `answer_reader.py` reads.

A model's forms are found by its chat template: that of calls by rendering a call and reading it back, or else, like
that of reasoning, by the markers in the template's text.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from deployments.engines.records.protocol import EngineError

Syntax = Literal["object", "named", "tagged", "python", "braces", "channels"]


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around the key and around the value of an argument, where each has its own.

    Newlines beside a value are the tags', one on each side. `said` is what stands between the two of a text, and of any
    other value, where the form says which it is; TYPE is the type of JSON. Keys that stand in attributes may be
    escaped as XML does it. With a `nested` mark, which begins every tag, KEY in an end is the key, and objects and
    arrays are written in tags of their members, and of each `item`.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    said: tuple[str, str] = ("", "")
    escapes_keys: bool = False
    nested: str = ""

    def written_key(self, key: str) -> str:
        """Return a key as a model writes it."""
        return key.replace("&", "&amp;").replace('"', "&quot;") if self.escapes_keys else key

    def closing(self, key: str) -> str:
        """Return the tag after the value of a key."""
        return self.value[1].replace("KEY", key) if self.nested else self.value[1]

    def read_key(self, text: str) -> str:
        """Return the key that a model has written."""
        return html.unescape(text) if self.escapes_keys else text


@dataclass(frozen=True, slots=True)
class ToolForm:
    """A family's way to write calls.

    `section` is the text before the first of several calls and after the last, `call` that around each; the text
    is as templates write it, and blanks at its ends may be missing in answers. `name` is the form of a call's
    name, with NAME for the name itself, `name_end` follows it, and `first` follows that in the first call. By its
    syntax a call is
    - object: a JSON object that begins with `name`, with the arguments as a member; in an array if `is_array`;
    - named: the name, and the arguments as a JSON object;
    - tagged: the name, and each argument in `tags`;
    - python: calls of functions with keywords, in a list;
    - braces: the name, and {key:value} with texts in `quote`s;
    - channels: the body of a message whose head names its recipient, and of others the channel.
    A form that `is_bare` has no opening: the answer's first character says whether it is calls. `signs` are what a
    template has, all of them, that teaches the form without rendering calls. A `mark` is what all its markers have,
    which models write with bars of ASCII, with doubled ones, or in small letters, now and then.
    """

    syntax: Syntax
    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    name: str = "NAME"
    name_end: str = ""
    first: str = ""
    tags: Tags | None = None
    quote: str = ""
    is_array: bool = False
    is_bare: bool = False
    signs: tuple[str, ...] = ()
    mark: str = ""

    @property
    def prefix(self) -> str:
        """Return the beginning of an answer that is only a call."""
        if self.is_bare:
            return ""
        return self.section[0] + self.call[0] + ("[" if self.is_array else "")

    @property
    def openings(self) -> tuple[str, ...]:
        """Return the markers that begin calls in an answer."""
        return _stripped(self.section[0], self.call[0])

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all texts of the form that may be single tokens."""
        tags = () if self.tags is None else (*self.tags.key, *self.tags.value)
        return (*self.section, *self.call, self.name_end, self.quote, *tags)


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """The markers before and after a family's reasoning and around its answer. They are left out of the text.

    Most models forget to end their reasoning before a call, now and then. Without `ends_with_calls`, text that
    looks like a call is a thought.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    around: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    ends_with_calls: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openings, *self.closings, *self.around)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of a model's answers. A part is None if the model does not write it or nobody asked for it."""

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether all of an answer is text, which needs no reader."""
        return self.tools is None and self.reasoning is None

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all markers. They may be special tokens, which are otherwise left out of answers."""
        forms = [form for form in (self.tools, self.reasoning) if form is not None]
        return tuple(marker for form in forms for marker in form.markers if marker)

    def begun(self, prompt: str) -> str:
        """Return the beginning of the answer that the end of its prompt has already."""
        if self.tools is not None and self.tools.syntax == "channels":
            return HARMONY_START if prompt.endswith(HARMONY_START) else ""
        end = prompt.rstrip()
        for opening in self.reasoning.openings if self.reasoning is not None else ():
            if end.endswith(opening.rstrip()):
                return opening
        return ""


def _stripped(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


HARMONY_START: Final = "<|start|>assistant"
HARMONY_THOUGHT: Final = "<|channel|>analysis<|message|>"
_OBJECT: Final = '{"name": NAME, "arguments": '
_PARAMETERS: Final = '{"name": NAME, "parameters": '


_M3: Final = "]<]minimax[>["
_DSML: Final = "\uff5cDSML\uff5c"


def _deepseek(*words: str) -> str:
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


def _dsml(section: str, blank: str = "") -> ToolForm:
    """Return the markup of DeepSeek since V3.2: the section that calls stand in, and what is before each name."""
    mark = f"{_DSML}{blank}"
    return ToolForm(
        "tagged",
        section=(f"<{mark}{section}>\n", f"\n</{mark}{section}>"),
        call=(f'<{mark}invoke name="', f"\n</{mark}invoke>"),
        name_end='">',
        tags=Tags(
            (f'\n<{mark}parameter name="', '"'),
            (">", f"</{mark}parameter>"),
            (' string="true"', ' string="false"'),
        ),
        signs=(f"{mark}{section}",),
        mark=_DSML,
    )


# In the order in which they are tried: a form that reads others' texts as well comes after them.
TOOL_FORMS: Final[Mapping[str, ToolForm]] = MappingProxyType(
    {
        "harmony": ToolForm(
            "channels",
            section=("", "<|call|>"),
            call=("<|channel|>commentary to=functions.", "<|call|>"),
            name_end=" <|constrain|>json<|message|>",
            signs=("<|channel|>", "<|message|>"),
        ),
        "qwen3-coder": ToolForm(
            "tagged",
            section=("<tool_call>\n", "\n</tool_call>"),
            call=("<function=", "\n</function>"),
            name_end=">",
            tags=Tags(("\n<parameter=", ">"), ("\n", "\n</parameter>")),
            signs=("<function=", "<parameter=", "<tool_call>"),
        ),
        "seed-oss": ToolForm(
            "tagged",
            section=("<seed:tool_call>\n", "\n</seed:tool_call>"),
            call=("<function=", "\n</function>"),
            name_end=">",
            tags=Tags(("\n<parameter=", ">"), ("", "</parameter>")),
            signs=("<seed:tool_call>",),
        ),
        "minimax-m2": ToolForm(
            "tagged",
            section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
            call=('<invoke name="', "\n</invoke>"),
            name_end='">',
            tags=Tags(('\n<parameter name="', '">'), ("", "</parameter>")),
            signs=("<minimax:tool_call>",),
        ),
        "minimax-m3": ToolForm(
            "tagged",
            section=(f"{_M3}<tool_call>\n", f"\n{_M3}</tool_call>"),
            call=(f'{_M3}<invoke name="', f"{_M3}</invoke>"),
            name_end='">',
            tags=Tags((f"{_M3}<", ">"), ("", f"{_M3}</KEY>"), nested=_M3),
            signs=(_M3,),
        ),
        "deepseek-v3.2": _dsml("function_calls"),
        "deepseek-v4": _dsml("tool_calls"),
        "deepseek-v4.1": _dsml("calls", " "),
        "step3": ToolForm(
            "tagged",
            section=("<\uff5ctool_calls_begin\uff5c>", "<\uff5ctool_calls_end\uff5c>"),
            call=(
                '<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c><steptml:invoke name="',
                "</steptml:invoke><\uff5ctool_call_end\uff5c>",
            ),
            name_end='">',
            tags=Tags(('<steptml:parameter name="', '">'), ("", "</steptml:parameter>")),
            signs=("<steptml:invoke",),
        ),
        "kimi-k3": ToolForm(
            "tagged",
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            call=('<|open|>call tool="', "<|close|>call<|sep|>"),
            name_end='"',
            first=' index="1"<|sep|>',
            tags=Tags(
                ('<|open|>argument key="', '"'),
                ("<|sep|>", "<|close|>argument<|sep|>"),
                (' type="string"', ' type="TYPE"'),
                escapes_keys=True,
            ),
            signs=("<|open|>call",),
        ),
        "hunyuan-v3": ToolForm(
            "tagged",
            section=("<tool_calls>\n", "\n</tool_calls>"),
            call=("<tool_call>", "\n</tool_call>"),
            name_end="<tool_sep>",
            tags=Tags(("\n<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>")),
            signs=("<tool_sep>", "<arg_key>"),
        ),
        "glm": ToolForm(
            "tagged",
            call=("<tool_call>", "\n</tool_call>"),
            name_end="\n",
            tags=Tags(("<arg_key>", "</arg_key>"), ("\n<arg_value>", "</arg_value>\n")),
            signs=("<arg_key>", "<tool_call>"),
        ),
        "deepseek-v3": ToolForm(
            "named",
            section=(_deepseek("calls", "begin"), _deepseek("calls", "end")),
            call=(f"{_deepseek('call', 'begin')}function{_deepseek('sep')}", f"\n```{_deepseek('call', 'end')}"),
            name_end="\n```json\n",
            signs=(_deepseek("call", "begin"), "```json"),
        ),
        "deepseek-v3.1": ToolForm(
            "named",
            section=(_deepseek("calls", "begin"), _deepseek("calls", "end")),
            call=(_deepseek("call", "begin"), _deepseek("call", "end")),
            name_end=_deepseek("sep"),
            signs=(_deepseek("call", "begin"),),
        ),
        "kimi-k2": ToolForm(
            "named",
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call=("<|tool_call_begin|>", "<|tool_call_end|>"),
            name="functions.NAME:0",
            name_end="<|tool_call_argument_begin|>",
            signs=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        ),
        "mistral-args": ToolForm(
            "named", call=("[TOOL_CALLS]", ""), name_end="[ARGS]", signs=("[TOOL_CALLS]", "[ARGS]")
        ),
        "mistral": ToolForm(
            "object", section=("[TOOL_CALLS]", ""), name=_OBJECT, is_array=True, signs=("[TOOL_CALLS]",)
        ),
        "gemma4": ToolForm(
            "braces", call=("<|tool_call>call:", "<tool_call|>"), quote='<|"|>', signs=("<|tool_call>", '<|"|>')
        ),
        "function-gemma": ToolForm(
            "braces",
            call=("<start_function_call>call:", "<end_function_call>"),
            quote="<escape>",
            signs=("<start_function_call>",),
        ),
        "command": ToolForm(
            "object",
            section=("<|START_ACTION|>", "<|END_ACTION|>"),
            name='{"tool_call_id": "0", "tool_name": NAME, "parameters": ',
            is_array=True,
            signs=("<|START_ACTION|>",),
        ),
        "granite-3.0": ToolForm(
            "object", section=("<|tool_call|>", ""), name=_OBJECT, is_array=True, signs=("<|tool_call|>",)
        ),
        "granite-20b": ToolForm("object", section=("<function_call>", ""), name=_OBJECT, signs=("<function_call>",)),
        "phi4": ToolForm("object", section=("functools", ""), name=_OBJECT, is_array=True, signs=("functools",)),
        "hunyuan": ToolForm(
            "object", section=("<tool_calls>", "</tool_calls>"), name=_OBJECT, is_array=True, signs=("<tool_calls>[",)
        ),
        "minimax-m1": ToolForm(
            "object",
            section=("<tool_calls>\n", "\n</tool_calls>"),
            name=_OBJECT,
            signs=("<tool_calls>",),
        ),
        "nemotron": ToolForm(
            "object", section=("<TOOLCALL>", "</TOOLCALL>"), name=_OBJECT, is_array=True, signs=("<TOOLCALL>",)
        ),
        "internlm": ToolForm(
            "object",
            section=("<|action_start|><|plugin|>", "<|action_end|>"),
            name=_PARAMETERS,
            signs=("<|action_start|>", "<|plugin|>"),
        ),
        "olmo3": ToolForm("python", section=("<function_calls>", "</function_calls>"), signs=("<function_calls>",)),
        "granite-3.1": ToolForm("object", section=("<tool_call>", ""), name=_OBJECT, is_array=True),
        "hermes": ToolForm("object", section=("<tool_call>\n", "\n</tool_call>"), name=_OBJECT, signs=("<tool_call>",)),
        "llama4": ToolForm(
            "python",
            section=("<|python_start|>", "<|python_end|>"),
            is_bare=True,
            signs=("tool_calls", "func_name1(params_name1=params_value1"),
        ),
        "llama3": ToolForm(
            "object",
            section=("<|python_tag|>", ""),
            name=_PARAMETERS,
            is_bare=True,
            signs=("tool_calls", '"parameters"'),
        ),
    }
)

_THINK: Final = ReasoningForm(("<think>",), ("</think>",), signs=("</think>",))
REASONING_FORMS: Final[Mapping[str, ReasoningForm]] = MappingProxyType(
    {
        "harmony": ReasoningForm(
            (), ("<|end|>", "<|return|>", "<|call|>"), around=("<|end|>", "<|return|>"), signs=("<|channel|>analysis",)
        ),
        "gemma4": ReasoningForm(("<|channel>thought",), ("<channel|>",), signs=("<|channel>",)),
        "command": ReasoningForm(
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
            signs=("<|START_THINKING|>",),
        ),
        "kimi-k3": ReasoningForm(
            ("<|open|>think<|sep|>",),
            ("<|close|>think<|sep|>",),
            around=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
            signs=("<|open|>think",),
        ),
        "seed": ReasoningForm(("<seed:think>",), ("</seed:think>",), signs=("<seed:think>",)),
        "minimax-m3": ReasoningForm(("<mm:think>",), ("</mm:think>",), signs=("<mm:think>",)),
        "mistral": ReasoningForm(
            ("[THINK]", "<think>"), ("[/THINK]", "</think>"), signs=("[THINK]",), ends_with_calls=False
        ),
        "hunyuan": ReasoningForm(
            ("<think>",), ("</think>",), around=("<answer>", "</answer>"), signs=("<think>", "<answer>")
        ),
        "granite-3.3": ReasoningForm(
            ("<think>",), ("</think>",), around=("<response>", "</response>"), signs=("<think>", "<response>")
        ),
        "granite-3.2": ReasoningForm(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            signs=("Here is my thought process:",),
        ),
        "think": _THINK,
    }
)


def named_form(kind: Literal["tool_form", "reasoning_form"], name: str) -> ToolForm | ReasoningForm | None:
    """Return the form of a name, None for "none". Raises EngineError for an unknown name."""
    forms: Mapping[str, ToolForm | ReasoningForm] = TOOL_FORMS if kind == "tool_form" else REASONING_FORMS
    if name == "none":
        return None
    if name not in forms:
        raise EngineError(f"{kind} {name!r} is not known (known: none, {', '.join(forms)})")
    return forms[name]
