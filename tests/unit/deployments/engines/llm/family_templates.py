"""Chat templates that write calls as each family does, small ones of our own, and how a call of it looks."""

from __future__ import annotations

from typing import Final

_START: Final = "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
_END: Final = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS: Final = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_PAIRS: Final = "{% for k, v in f.arguments | items %}"
_VALUE: Final = "{{ v if v is string else v | tojson }}"


def _template(calls: str, before: str = "", behind: str = "") -> str:
    body = f"{{% if m.tool_calls %}}{before}{_CALLS}{calls}{{% endfor %}}{behind}{{% endif %}}"
    return _START + body + _END


def _array(before: str, behind: str, name: str = '"name"', arguments: str = '"arguments"', more: str = "") -> str:
    call = f"{{{more}{name}: {{{{ f.name | tojson }}}}, {arguments}: {{{{ f.arguments | tojson }}}}}}"
    return _template(call + "{{ ', ' if not loop.last }}", before + "[", "]" + behind)


def _deepseek(*words: str) -> str:
    return "<\uff5c" + "\u2581".join(("tool", *words)) + "\uff5c>"


_PYTHON: Final = (
    "{% macro py(v) %}{% if v is string %}'{{ v | replace('\\\\', '\\\\\\\\') | replace(\"'\", \"\\\\'\") "
    "| replace('\\n', '\\\\n') }}'"
    "{% elif v is sequence and v is not mapping %}[{% for x in v %}{{ py(x) }}{{ ', ' if not loop.last }}{% endfor %}]"
    "{% elif v is mapping %}{ {%- for k, x in v | items %}{{ py(k) }}: {{ py(x) }}"
    "{{ ', ' if not loop.last }}{% endfor -%} }"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_PYTHON_CALL: Final = (
    f"{{{{ f.name }}}}({_PAIRS}{{{{ k }}}}={{{{ py(v) }}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}})"
)


def _braces(quote: str) -> str:
    return (
        f"{{% macro value(v) %}}{{% if v is string %}}{quote}{{{{ v }}}}{quote}"
        "{% elif v is mapping %}{{ object(v) }}"
        "{% elif v is sequence %}[{% for x in v %}{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "{% macro object(o) %}{ {%- for k, v in o | items %}{{ k }}:{{ value(v) }}{{ ',' if not loop.last }}"
        "{% endfor -%} }"
        "{% endmacro %}"
    )


def _dsml(section: str, blank: str = "") -> str:
    mark = f"\uff5cDSML\uff5c{blank}"
    said = "{{ 'true' if v is string else 'false' }}"
    return _template(
        f'<{mark}invoke name="{{{{ f.name }}}}">{_PAIRS}\n<{mark}parameter name="{{{{ k }}}}" string="{said}">{_VALUE}'
        f"</{mark}parameter>{{% endfor %}}\n</{mark}invoke>\n",
        f"<{mark}{section}>\n",
        f"</{mark}{section}>",
    )


_M3: Final = "]<]minimax[>["
_NESTED: Final = (
    "{% macro nested(v) %}{% if v is mapping %}{% for k, x in v | items %}MARK<{{ k }}>{{ nested(x) }}MARK</{{ k }}>"
    "{% endfor %}{% elif v is string %}{{ v }}{% elif v is sequence %}{% for x in v %}MARK<item>{{ nested(x) }}"
    "MARK</item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
).replace("MARK", _M3)
_TYPE: Final = (
    "{{ 'string' if v is string else 'boolean' if v is boolean else 'null' if v is none else 'number' if v is number "
    "else 'object' if v is mapping else 'array' }}"
)
HERMES: Final = _template(
    '\n<tool_call>\n{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
)
TEMPLATES: Final = {
    "hermes": HERMES,
    "llama3": _template(
        '{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}{{ "; " if not loop.last }}'
    ),
    "llama4": _PYTHON + _template(_PYTHON_CALL + "{{ ', ' if not loop.last }}", "[", "]"),
    "olmo3": _PYTHON + _template(_PYTHON_CALL + "\n", "<function_calls>\n", "</function_calls>"),
    "mistral": _array("[TOOL_CALLS]", ""),
    "mistral-args": _template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek-v3": _template(
        f"{_deepseek('call', 'begin')}function{_deepseek('sep')}{{{{ f.name }}}}\n```json\n"
        "{{ f.arguments | tojson }}"
        f"\n```{_deepseek('call', 'end')}{{{{ '\\n' if not loop.last }}}}".replace("\\\\n", "\\n"),
        _deepseek("calls", "begin"),
        _deepseek("calls", "end"),
    ),
    "deepseek-v3.1": _template(
        f"{_deepseek('call', 'begin')}{{{{ f.name }}}}{_deepseek('sep')}"
        + "{{ '' + f.arguments }}"
        + _deepseek("call", "end"),
        _deepseek("calls", "begin"),
        _deepseek("calls", "end"),
    ),
    "kimi-k2": _template(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "command": _array("<|START_ACTION|>", "<|END_ACTION|>", '"tool_name"', '"parameters"', '"tool_call_id": "0", '),
    "granite-3.0": _array("<|tool_call|>", ""),
    "granite-3.1": _array("<tool_call>", ""),
    "granite-20b": _template(
        '<function_call> {"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}'
    ),
    "phi4": _array("functools", ""),
    "hunyuan": _array("<tool_calls>", "</tool_calls>"),
    "minimax-m1": _template(
        '{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}\n', "<tool_calls>\n", "</tool_calls>"
    ),
    "nemotron": _array("<TOOLCALL>", "</TOOLCALL>"),
    "internlm": _template(
        '<|action_start|><|plugin|>{"name": {{ f.name | tojson }}, "parameters": {{ f.arguments | tojson }}}'
        "<|action_end|>"
    ),
    "qwen3-coder": _template(
        f"\n<tool_call>\n<function={{{{ f.name }}}}>{_PAIRS}\n<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>"
        "{% endfor %}\n</function>\n</tool_call>"
    ),
    "seed-oss": _template(
        f"<seed:tool_call>\n<function={{{{ f.name }}}}>{_PAIRS}\n<parameter={{{{ k }}}}>{_VALUE}</parameter>"
        "{% endfor %}\n</function>\n</seed:tool_call>"
    ),
    "minimax-m2": _template(
        f'<invoke name="{{{{ f.name }}}}">{_PAIRS}\n<parameter name="{{{{ k }}}}">{_VALUE}</parameter>{{% endfor %}}'
        "\n</invoke>\n",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "minimax-m3": _NESTED
    + _template(
        f'{_M3}<invoke name="{{{{ f.name }}}}">{{{{ nested(f.arguments) }}}}{_M3}</invoke>\n',
        f"{_M3}<tool_call>\n",
        f"{_M3}</tool_call>",
    ),
    "deepseek-v3.2": _dsml("function_calls"),
    "deepseek-v4": _dsml("tool_calls"),
    "deepseek-v4.1": _dsml("calls", " "),
    "step3": _template(
        '<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c><steptml:invoke name="{{ f.name }}">'
        f'{_PAIRS}<steptml:parameter name="{{{{ k }}}}">{_VALUE}</steptml:parameter>{{% endfor %}}'
        "</steptml:invoke><\uff5ctool_call_end\uff5c>",
        "<\uff5ctool_calls_begin\uff5c>",
        "<\uff5ctool_calls_end\uff5c>",
    ),
    "kimi-k3": _template(
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        f'{_PAIRS}<|open|>argument key="{{{{ k }}}}" type="{_TYPE}"<|sep|>{_VALUE}<|close|>argument<|sep|>'
        "{% endfor %}<|close|>call<|sep|>",
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
    ),
    "glm": _template(
        f"\n<tool_call>{{{{ f.name }}}}\n{_PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n"
        "{% endfor %}</tool_call>"
    ),
    "hunyuan-v3": _template(
        f"<tool_call>{{{{ f.name }}}}<tool_sep>\n{_PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n"
        f"<arg_value>{_VALUE}</arg_value>\n"
        "{% endfor %}</tool_call>\n",
        "<tool_calls>\n",
        "</tool_calls>",
    ),
    "gemma4": _braces('<|"|>') + _template("<|tool_call>call:{{ f.name }}{{ object(f.arguments) }}<tool_call|>"),
    "function-gemma": _braces("<escape>")
    + _template("<start_function_call>call:{{ f.name }}{{ object(f.arguments) }}<end_function_call>"),
    "harmony": (
        "{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}<|start|>assistant to=functions."
        "{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>"
        "{% else %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
        "<|end|>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        "{# <|channel|>analysis #}"
    ),
}
