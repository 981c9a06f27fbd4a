"""Readers of one tool call as its text comes, a class for each kind of syntax. `answer_reader.py` finds the beginnings.

A reader takes text off a `Tape` and writes to `Calls`. The taken text stays on the tape's `raw` until it is certain
that it is a call.
"""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from deployments.engines.llm.answer_forms import Tags, ToolForm
from deployments.engines.llm.call_arguments import (
    braces_object,
    nested_tags,
    nested_value,
    python_calls,
    to_json,
    types_of,
    value_of_text,
)
from deployments.engines.llm.chat import CalledTool, Function

_TEXT: Final = r'"(?:[^"\\]|\\.)*"'
_HEAD: Final = re.compile(
    rf'\{{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*{_TEXT}\s*,\s*)*"(?:name|tool_name)"\s*:\s*({_TEXT})\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME: Final = re.compile(r"[^\s<>{}\[\]()\"'|]{1,256}")
_NUMBERED: Final = re.compile(r"(?:functions\.)?(.+):\d+")  # the name of a call with the model's own id
_MAX_NAME: Final = 512  # characters, with those that may stand beside it
_FENCE: Final = "```json"
_SAID: Final = re.compile(r'(?:string|type)="(\w+)"')  # the type of an argument
_AS_TEXT: Final = frozenset({"string"})
_NO_TEXT: Final = frozenset({"number", "boolean", "array", "object", "null"})
_BARS: Final = "\uff5c|"
_BESIDE: Final = "` \n\t"  # what may stand between arguments and the end of a call

Step = Literal["wait", "on", "ended", "no call"]


class Markers:
    """Texts to find in text that comes in pieces: the first of them, or its possible beginning."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._all = tuple(dict.fromkeys(marker for marker in markers if marker))
        ordered = sorted(self._all, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._starts = frozenset(marker[:size] for marker in self._all for size in range(1, len(marker)))
        self._longest = max(map(len, self._all), default=1) - 1

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Return the place of the first marker, and the marker."""
        found = self._pattern.search(text, start)
        return None if found is None else (found.start(), found[0])

    def at_beginning(self, text: str) -> bool | None:
        """Return whether the text begins with one; None if that is not decided yet."""
        if self._pattern.match(text):
            return True
        return None if not text or text in self._starts else False

    def num_safe(self, text: str) -> int:
        """Return how many characters of a text without markers are certainly not the beginning of one."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._starts:
                return len(text) - size
        return len(text)


@functools.lru_cache(maxsize=256)
def markers_of(*markers: str) -> Markers:
    return Markers(markers)


class MarkSpelling:
    """Writes the mark of a family's markers as it is meant, whatever its bars and letters are, in text in pieces."""

    def __init__(self, mark: str) -> None:
        self._mark, name = mark, mark.strip(_BARS)
        self._pattern = re.compile(rf"(</?)[{_BARS}]{{1,2}}{re.escape(name)}[{_BARS}]{{1,2}}", re.IGNORECASE)
        rest = f"[{_BARS}]?"
        for letter in reversed(name):
            rest = f"(?:{re.escape(letter)}{rest})?"
        self._begun = re.compile(rf"</?(?:[{_BARS}]{{1,2}}{rest})?\Z", re.IGNORECASE)  # what may yet become one
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that is certain now."""
        text = self._held + piece
        at = text.rfind("<")
        size = at if at >= 0 and self._begun.match(text, at) else len(text)
        self._held = text[size:]
        return self._spelled(text[:size])

    def flush(self) -> str:
        """Return the text held back."""
        held, self._held = self._held, ""
        return self._spelled(held)

    def _spelled(self, text: str) -> str:
        return self._pattern.sub(lambda found: found[1] + self._mark, text)


class Tape:
    """The text of an answer: what is `held` until it is read, and the `raw` text of what may be a call.

    A `mark` of the family's markers is spelled as it is meant.
    """

    def __init__(self, mark: str = "") -> None:
        self.held = self.raw = ""
        self.keeps_raw = False
        self._spelling = MarkSpelling(mark) if mark else None

    def put(self, piece: str) -> None:
        """Put a piece on it."""
        self.held += piece if self._spelling is None else self._spelling.feed(piece)

    def put_rest(self) -> None:
        """Put on it what may have become a mark, at the end of the answer."""
        if self._spelling is not None:
            self.held += self._spelling.flush()

    def skip(self, size: int) -> None:
        """Take off text of a possible call."""
        if self.keeps_raw:
            self.raw += self.held[:size]
        self.held = self.held[size:]

    def certain(self) -> None:
        """Note that the text taken off belongs to a call."""
        self.raw, self.keeps_raw = "", False


class Calls:
    """The calls of an answer in progress, which may call `functions`."""

    def __init__(self, functions: Sequence[Function], max_calls: int | None) -> None:
        self._functions: Mapping[str, Function] = {function.name: function for function in functions}
        self._max_calls = max_calls
        self._pieces: list[CalledTool] = []
        self._id = self._name = ""
        self._num_members = 0
        self.num_calls = 0

    def knows(self, name: str) -> bool:
        """Return whether a function may be called."""
        return name in self._functions

    def begin(self, name: str, arguments: str = "", id_: str = "") -> None:
        """Begin a call."""
        self._id, self._name = id_ or f"call_{uuid.uuid4().hex[:24]}", name
        self.num_calls += 1
        self._num_members = 0
        self._pieces.append(CalledTool(self.num_calls - 1, self._id, name, arguments))

    def add(self, piece: str) -> None:
        """Add to the arguments."""
        if piece:
            self._pieces.append(CalledTool(self.num_calls - 1, self._id, self._name, piece))

    def add_key(self, key: str) -> tuple[Any, Mapping[str, Any]]:
        """Add the key of an argument, and return the schema of its value, with the one that this may refer to."""
        self.add(("{" if not self._num_members else ", ") + to_json(key) + ": ")
        self._num_members += 1
        function = self._functions.get(self._name)
        schema = function.parameters if function is not None else {}
        properties = schema.get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None, schema

    def end(self) -> None:
        """End arguments that came one by one."""
        self.add("}" if self._num_members else "{}")

    def take(self) -> tuple[CalledTool, ...]:
        """Return the new pieces of the calls that count."""
        pieces, self._pieces = self._pieces, []
        most = self._max_calls
        return tuple(piece for piece in pieces if most is None or piece.index < most)


class CallReader(Protocol):
    """The reader of one call: a step at a time, as far as the tape goes."""

    def step(self) -> Step:
        """Read on. After the call has ended, or was none, there is no further step."""

    def flush(self) -> None:
        """End a call whose end was forgotten, at the end of an answer."""


class JsonScan:
    """Finds the end of a JSON object in pieces of text. The first piece begins with its brace."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._is_escaped = False

    def end_of(self, piece: str) -> int | None:
        """Return the place in the piece where the object ends, or None when it goes on."""
        for place, character in enumerate(piece):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


class JsonCall:
    """A call with a JSON object as arguments: a member of the call's own object, or after the name.

    With `must_know`, only the call of a known function counts.
    """

    def __init__(self, tape: Tape, calls: Calls, form: ToolForm, *, must_know: bool = False) -> None:
        self._tape, self._calls, self._form, self._must_know = tape, calls, form, must_know
        self._scan, self._num_scanned = JsonScan(), 0
        self._name = ""
        self._is_member = tape.held.lstrip().startswith("{")
        self._state = self._read_object if self._is_member else self._read_name

    @classmethod
    def named(cls, tape: Tape, calls: Calls, form: ToolForm, name: str) -> JsonCall:
        """Return the reader of the arguments of a call that has begun."""
        reader = cls(tape, calls, form)
        reader._name, reader._is_member, reader._state = name, False, reader._read_arguments
        return reader

    def step(self) -> Step:
        return self._state()

    def flush(self) -> None:
        pass

    def _begin(self, name: str, arguments: str = "", id_: str = "") -> bool:
        if self._must_know and not self._calls.knows(name):
            return False
        self._calls.begin(name, arguments, id_)
        self._tape.certain()
        return True

    def _read_object(self) -> Step:
        """Begin a call once its name is known, or give up an object that is none."""
        tape = self._tape
        if self._num_scanned < _MAX_NAME and (found := _HEAD.match(tape.held)):
            name = json.loads(found[1], strict=False)
            if not self._begin(name):
                tape.skip(1)
                return "no call"
            tape.held = tape.held[found.end() :]
            self._state, self._scan = self._read_json, JsonScan()
            return "on"
        end = self._scan.end_of(tape.held[self._num_scanned :])
        if end is None:
            self._num_scanned = len(tape.held)
            return "wait"
        end += self._num_scanned
        call = _call_of(tape.held[:end])
        if call is None or not self._begin(*call):
            tape.skip(end)
            return "no call"
        tape.held = tape.held[end:]
        return "ended"

    def _read_name(self) -> Step:
        found = name_in(self._tape, self._form)
        if isinstance(found, str):
            self._name, self._state = found, self._read_arguments
            return "on"
        return found.step

    def _read_arguments(self) -> Step:
        """Read up to the arguments of a call with a known name."""
        body, close = self._tape.held.lstrip(), self._form.call[1].strip(_BESIDE)
        if body.startswith(_FENCE):
            body = body[len(_FENCE) :].lstrip()
        elif _FENCE.startswith(body):
            return "wait"
        if not body or (close and body != close and close.startswith(body)):
            return "wait"
        is_empty = bool(close) and body.startswith(close)
        numbered = _NUMBERED.fullmatch(self._name)
        name, id_ = (numbered[1], self._name) if numbered else (self._name, "")
        if (body[0] != "{" and not is_empty) or not self._begin(name.removeprefix("functions."), id_=id_):
            return "no call"
        self._tape.held = body
        if is_empty:
            self._calls.add("{}")
        self._state = self._read_end if is_empty else self._read_json
        return "on"

    def _read_json(self) -> Step:
        tape = self._tape
        end = self._scan.end_of(tape.held)
        piece = tape.held if end is None else tape.held[:end]
        tape.held = tape.held[len(piece) :]
        self._calls.add(piece)
        if end is None:
            return "wait"
        self._state, self._scan = self._read_rest if self._is_member else self._read_end, JsonScan(1)
        return "on"

    def _read_rest(self) -> Step:
        """Skip the members of a call's object after its arguments, and its end, which may be missing."""
        tape = self._tape
        body = tape.held.lstrip()
        if not body:
            return "wait"
        if body[0] not in ",}":
            return "ended"
        end = self._scan.end_of(tape.held)
        tape.held = "" if end is None else tape.held[end:]
        return "wait" if end is None else "ended"

    def _read_end(self) -> Step:
        """Skip the end of a call."""
        body, close = self._tape.held.lstrip(_BESIDE), self._form.call[1].strip(_BESIDE)
        if not close:
            return "ended"
        if not body or (close != body and close.startswith(body)):
            return "wait"
        self._tape.held = body.removeprefix(close)
        return "ended"


class _NoName:
    """Raised without a name, yet or at all."""

    def __init__(self, step: Step) -> None:
        self.step = step


_NOT_YET: Final = _NoName("wait")
_NONE: Final = _NoName("no call")


def name_in(tape: Tape, form: ToolForm) -> str | _NoName:
    """Take the name of a call off the tape, with the text after it."""
    held = tape.held
    key = form.tags.key[0].strip() if form.tags else ""
    end = form.name_end.rstrip() or form.name_end
    found = markers_of(end, end.strip() or end, key, form.call[1].strip()).find(held)
    if found is None:
        return _NONE if len(held) > _MAX_NAME or "{" in held else _NOT_YET
    name = held[: found[0]].partition("[CALL_ID]")[0].strip(" \n\t\"'")
    if not _NAME.fullmatch(name):
        return _NONE
    is_end = found[1] in (end, end.strip())
    tape.skip(found[0] + (len(found[1]) if is_end else 0))
    return name


class TaggedCall:
    """A call with each argument in tags of its own."""

    def __init__(self, tape: Tape, calls: Calls, form: ToolForm, *, must_know: bool = False) -> None:
        assert form.tags is not None
        self._tape, self._calls, self._tags, self._must_know = tape, calls, form.tags, must_know
        self._form = form
        self._key, self._call = form.tags.key[0].strip(), form.call[0].strip()
        self._close, self._section = form.call[1].strip(), form.section[1].strip()
        self._value: _Value | None = None
        self._nest: NestScan | None = None
        self._closing = ""
        self._state = self._read_name

    def step(self) -> Step:
        return self._state()

    def flush(self) -> None:
        if self._value is not None:
            self._read_value(is_last=True)
        if self._state == self._read_key:
            self._calls.end()

    def _read_name(self) -> Step:
        found = name_in(self._tape, self._form)
        if not isinstance(found, str):
            return found.step
        if self._must_know and not self._calls.knows(found):
            return "no call"
        self._calls.begin(found)
        self._tape.certain()
        self._state = self._read_key
        return "on"

    def _read_key(self) -> Step:
        """Read up to the next argument, and its key, or to the end of a call."""
        tape = self._tape
        markers = markers_of(self._key, self._close, self._section, self._call)
        found = markers.find(tape.held)
        if found is None:
            tape.held = tape.held[markers.num_safe(tape.held) :]
            return "wait"
        at, marker = found
        if marker != self._key:
            tape.held = tape.held[at + (len(marker) if marker == self._close else 0) :]
            self._calls.end()
            return "ended"
        rest = tape.held[at + len(marker) :]
        behind, value = self._tags.key[1], self._tags.value[0].strip()
        end = rest.find(behind)
        start = rest.find(value, end + len(behind)) if end >= 0 else -1
        if start < 0:
            tape.held = tape.held[at:]
            return "wait"
        tape.held = rest[start + len(value) if value else end + len(behind) :]
        key = rest[:end].strip(" \n\t\"'")
        schema, root = self._calls.add_key(self._tags.read_key(key))
        types = types_of(schema, root)
        if said := _SAID.search(rest[end + len(behind) : start]) if self._tags.said[0] else None:
            types = _AS_TEXT if said[1] in ("true", "string") else types - _AS_TEXT or _NO_TEXT
        self._value, self._closing = _Value(types, self._tags, schema, root), self._tags.closing(key).strip()
        self._nest = NestScan(self._tags.nested) if self._tags.nested else None
        self._state = self._read_value
        return "on"

    def _read_value(self, *, is_last: bool = False) -> Step:
        assert self._value is not None
        tape = self._tape
        size, length, is_end = self._end_of_value(tape.held, is_last=is_last)
        self._calls.add(self._value.feed(tape.held[:size]))
        if not is_end:
            tape.held = tape.held[size:]
            return "wait"
        self._calls.add(self._value.end())
        tape.held = tape.held[size + length :]
        self._value, self._state = None, self._read_key
        return "on"

    def _end_of_value(self, text: str, *, is_last: bool) -> tuple[int, int, bool]:
        """Return how many characters are certainly the value's, the length of the marker after it, and whether it ends.

        A value may contain the marker: it ends the value only before another marker that may follow, or at the end.
        """
        if self._nest is not None:
            return self._nest.end_of(text, is_last=is_last)
        end, forgotten = self._closing, self._tags.key[0]
        markers, at = markers_of(end, self._close, forgotten if forgotten.startswith("\n") else ""), 0
        while found := markers.find(text, at):
            at, marker = found
            if marker == forgotten != end:
                return at, 0, True
            if marker == end:
                behind = markers_of(self._key, self._close, self._section, self._call)
            else:
                behind = markers_of(self._section or self._close, self._call)
            rest = text[at + len(marker) :].lstrip()
            following = behind.at_beginning(rest)
            if following is None and not is_last:
                return at, len(marker), False
            if following or not rest:
                return at, len(marker) if marker == end else 0, True
            at += len(marker)
        return max(at, markers.num_safe(text)), 0, False


class WholeCall:
    """Calls that are read at their end: a list of Python's, or a name and braces."""

    def __init__(self, tape: Tape, calls: Calls, form: ToolForm, stop: str, *, must_know: bool = False) -> None:
        self._tape, self._calls, self._form, self._must_know = tape, calls, form, must_know
        self._brackets = _Brackets((form.quote, '"') if form.quote else ("'", '"'), stop, only_values=bool(form.quote))
        self._state = self._read_whole

    def step(self) -> Step:
        return self._state()

    def flush(self) -> None:
        pass

    def _read_whole(self) -> Step:
        tape = self._tape
        end = self._brackets.end_of(tape.held)
        if end is None:
            return "wait"
        found = self._read_calls(tape.held[:end])
        if found is None or (self._must_know and not all(self._calls.knows(name) for name, _ in found)):
            tape.skip(end)
            return "no call"
        for name, arguments in found:
            self._calls.begin(name, arguments)
        tape.certain()
        tape.held, self._state = tape.held[end:], self._read_end
        return "on"

    def _read_calls(self, text: str) -> list[tuple[str, str]] | None:
        if self._form.syntax == "python":
            return python_calls(text)
        name, brace, _ = text.partition("{")
        arguments = braces_object(text[len(name) :], self._form.quote) if brace else None
        return [(name.strip(), arguments)] if arguments is not None and name.strip() else None

    def _read_end(self) -> Step:
        body = self._tape.held.lstrip()
        close = self._form.call[1].strip() or self._form.section[1].strip()
        if not body or (body != close and close.startswith(body)):
            return "wait"
        if close and body.startswith(close):
            self._tape.held = body[len(close) :]
        return "ended"


class _Value:
    """The value of an argument in tags, as JSON: a string as it comes, any other at its end.

    A newline at either side belongs to the tags if their form has one.
    """

    def __init__(self, types: frozenset[str], tags: Tags, schema: Any, root: Mapping[str, Any]) -> None:
        self._types, self._schema, self._root, self._mark = types, schema, root, tags.nested
        self._is_text = types == {"string"}
        opening, closing = tags.value
        self._first = "\n" if opening.endswith("\n") and closing.startswith("\n") else ""
        self._has_begun = False
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the JSON of the certain part."""
        self._held += piece
        if not self._is_text or not self._held:
            return ""
        begun = ""
        if not self._has_begun:
            self._has_begun, begun = True, '"'
            self._held = self._held.removeprefix(self._first)
        body = self._held.removesuffix(self._first)
        self._held = self._held[len(body) :]
        return begun + to_json(body)[1:-1]

    def end(self) -> str:
        """Return the JSON of the rest."""
        text = self._held.removesuffix(self._first)
        if self._is_text:
            return ('"' if not self._has_begun else "") + to_json(text)[1:-1] + '"'
        if self._mark:
            try:
                return to_json(nested_value(text, self._mark, self._schema, self._root))
            except (ValueError, RecursionError):
                return to_json(text)
        return value_of_text(text.removeprefix(self._first), self._types)


class NestScan:
    """Finds the tag that ends a value, past those within it, in a text of which what is certain is taken off."""

    def __init__(self, mark: str) -> None:
        self._tags, self._starts = nested_tags(mark), Markers([f"{mark}<"])
        self._depth = 0

    def end_of(self, text: str, *, is_last: bool) -> tuple[int, int, bool]:
        """Return how much of a text is certainly a value's, how long the tag behind it is, and whether it ends."""
        at = 0
        for tag in self._tags.finditer(text):
            if tag[1] and not self._depth:
                return tag.start(), tag.end() - tag.start(), True
            self._depth += -1 if tag[1] else 1
            at = tag.end()
        if is_last:
            return len(text), 0, False
        begun = self._starts.find(text, at)
        return max(at, begun[0] if begun else self._starts.num_safe(text)), 0, False


class _Brackets:
    """Finds the end of a bracketed text that grows. Brackets within `quotes` do not count.

    In a quote of one character a backslash takes the next one's meaning; with `only_values` it is one where a value or
    a key begins. A `stop` outside of brackets is the end, too.
    """

    def __init__(self, quotes: tuple[str, ...], stop: str, *, only_values: bool = False) -> None:
        self._quotes, self._stop, self._only_values = quotes, stop, only_values
        self._at = self._depth = 0
        self._quote = ""

    def end_of(self, text: str) -> int | None:
        """Return the place of the end, None before it is there. `text` begins with that of the last call."""
        longest = max(map(len, (*self._quotes, self._stop, "x")))
        while self._at < len(text):
            at, character = self._at, text[self._at]
            if at + longest > len(text) and character == "<" and longest > 1:
                return None  # a marker may be cut
            if self._quote:
                is_end = text.startswith(self._quote, at)
                is_escape = character == "\\" and len(self._quote) == 1
                self._at += len(self._quote) if is_end else 1 + is_escape
                self._quote = "" if is_end else self._quote
                continue
            if self._stop and not self._depth and text.startswith(self._stop, at):
                return at
            opened = next((quote for quote in self._quotes if text.startswith(quote, at)), "")
            if len(opened) == 1 and self._only_values and text[:at].rstrip()[-1:] not in ("{", "[", ",", ":"):
                opened = ""
            self._quote = opened
            self._at += len(opened) or 1
            if character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0 and (not self._stop or character == "}"):
                    return self._at
        return None


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call with members in another order; None for another object."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    inner = found.get("function")
    found = inner if isinstance(inner, dict) else found
    name = found.get("name", found.get("tool_name", inner))
    arguments: Any = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return None
    return name, to_json(arguments or {})
