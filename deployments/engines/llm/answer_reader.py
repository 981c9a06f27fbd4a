"""Reading an answer as its text comes: what is shown, what is reasoning, and what calls tools, by the model's form.

One machine for all forms. It takes text in pieces, cut anywhere, and gives out what is certain; what it gives in all
does not depend on the cuts. What looks like a call and is none stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from deployments.engines.llm.answer_forms import AnswerForm
from deployments.engines.llm.call_readers import (
    CallReader,
    Calls,
    JsonCall,
    Markers,
    TaggedCall,
    Tape,
    WholeCall,
    markers_of,
)
from deployments.engines.llm.chat import CalledTool, Function

_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_PEOPLE: Final = ("user", "assistant", "all")
_HEADS: Final = ("<|start|>", "<|channel|>")
_BODY: Final = "<|message|>"


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What a piece of an answer adds to its text, to its reasoning and to its calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CalledTool, ...] = ()


class _Shown:
    """Text for the reader of an answer, without blanks beside what is not shown."""

    def __init__(self, *, holds_blanks: bool) -> None:
        self._holds_blanks = holds_blanks
        self._pieces: list[str] = []
        self._blanks = ""
        self.has_text = False
        self.is_inner = False  # something that is not shown has come: blanks before the next text are beside it

    def add(self, text: str) -> None:
        body = text.strip()
        if not body:
            if self.has_text and not self._holds_blanks and not self.is_inner:
                self._pieces.append(text)
            else:
                self._blanks += text
            return
        start = text.index(body[0])
        blanks = self._blanks + text[:start]
        if self.has_text or not self.is_inner:
            self._pieces.append(blanks)
        end = start + len(body)
        self._blanks = ""
        self.has_text, self.is_inner = True, False if not self._holds_blanks else self.is_inner
        self._pieces.append(body)
        self.add(text[end:]) if text[end:] else None

    def end(self) -> None:
        """Take no more: blanks at the end are shown where nothing was left out beside them."""
        if not self.is_inner:
            self._pieces.append(self._blanks)
        self._blanks = ""

    def take(self) -> str:
        """Return what was added since the last time."""
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)


class AnswerReader:
    """Parts the text of one answer. `functions` are those that it may call; behind `max_calls` calls are left out."""

    def __init__(self, form: AnswerForm, functions: Sequence[Function] = (), max_calls: int | None = None) -> None:
        self._tools, self._form = form.tools, form.reasoning
        self._text = _Shown(holds_blanks=form.tools is not None or bool(form.reasoning and form.reasoning.around))
        self._thought = _Shown(holds_blanks=True)
        self._thought.is_inner = True
        self._tape, self._calls = Tape(), Calls(functions, max_calls)
        self._call: CallReader | None = None
        self._met_in: Callable[[], bool] = self._read_start  # where what may be a call was met
        self._state: Callable[[], bool] = self._read_start
        is_channels = self._tools is not None and self._tools.syntax == "channels"
        openings = self._tools.openings if self._tools is not None else ()
        self._openings = _HEADS if is_channels else openings
        thought = self._form
        ends = [end.strip() for end in (self._tools.section[1], self._tools.call[1])] if self._tools else []
        self._around = frozenset((*(thought.around if thought else ()), *ends)) - {""}
        if thought is not None and not is_channels:
            self._around -= {*thought.openings, *thought.closings}
        closings = thought.closings if thought is not None else ()
        self._in_text = Markers((*self._openings, *self._around, *(thought.openings if thought else ()), *closings))
        self._in_thought = Markers((*(self._openings if thought and thought.ends_with_calls else ()), *closings))

    @property
    def num_calls(self) -> int:
        """Return how many calls have begun."""
        return self._calls.num_calls

    def feed(self, piece: str) -> AnswerPiece:
        """Return what is certain now."""
        self._tape.held += piece
        while self._tape.held and self._state():
            pass
        return self._taken()

    def flush(self, *, is_cut: bool = False) -> AnswerPiece:
        """Return what was held back, at the end of the answer; `is_cut`: it would have gone on."""
        if not is_cut and self._state == self._read_call and self._call is not None:
            self._call.flush()
        held, self._tape.held = self._tape.held, ""
        if self._state == self._read_thought:
            self._thought.add(held)
        elif self._state in (self._read_start, self._read_text):
            self._text.add(held)
        elif self._may_be_text(self._tape.raw + held):
            self._tape.raw += held
            self._give_up()
        self._text.end()
        return self._taken()

    def _may_be_text(self, raw: str) -> bool:
        """Return whether something was read that was no call, and is more than an opening of one."""
        is_marked = self._tools is not None and self._tools.syntax in ("braces", "channels")  # by tokens of its own
        return self._tape.keeps_raw and not is_marked and raw.strip() not in self._openings

    def _taken(self) -> AnswerPiece:
        return AnswerPiece(self._text.take(), self._thought.take(), self._calls.take())

    # Text and reasoning

    def _read_start(self) -> bool:
        """Read up to the first character of an answer, which in some forms decides whether it is calls."""
        tape, tools = self._tape, self._tools
        body = tape.held.lstrip()
        if not body:
            return False
        if tools is not None and tools.is_bare and body[0] == ("{" if tools.syntax == "object" else "["):
            self._text.add(tape.held[: len(tape.held) - len(body)])
            tape.held = body
            self._open("")
        else:
            self._state = self._read_text
        return True

    def _read_up_to(self, markers: Markers, shown: _Shown) -> str | None:
        """Show what stands before the next marker, and return that; None where there is none yet."""
        tape = self._tape
        found = markers.find(tape.held)
        at, marker = found or (markers.num_safe(tape.held), "")
        if at:
            shown.add(tape.held[:at])
        tape.held = tape.held[at + len(marker) :]
        return marker if found else None

    def _read_text(self) -> bool:
        marker = self._read_up_to(self._in_text, self._text)
        if marker is None:
            return False
        if marker in self._openings:
            self._open(marker)
        elif marker not in self._around and self._form is not None and marker in self._form.openings:
            self._text.is_inner = True
            self._state = self._read_thought
        elif marker not in self._around and self._text.has_text:
            self._text.add(marker)  # the end of a thought that nobody began, within a text
        else:
            self._text.is_inner = True
        return True

    def _read_thought(self) -> bool:
        marker = self._read_up_to(self._in_thought, self._thought)
        if marker is None:
            return False
        if marker in self._openings:
            self._open(marker)
        else:
            self._text.is_inner = self._thought.is_inner = True
            self._state = self._read_text if self._text.has_text else self._read_start
        return True

    # What may be calls

    def _open(self, marker: str) -> None:
        """Begin to read what may be calls."""
        assert self._tools is not None
        tools, tape = self._tools, self._tape
        tape.raw, tape.keeps_raw, self._met_in = marker, True, self._state
        if tools.syntax == "channels":
            self._state = self._read_head
        elif tools.syntax in ("braces", "python"):
            stop = tools.call[1] if tools.syntax == "braces" else tools.section[1] if marker else ""
            self._begin(WholeCall(tape, self._calls, tools, stop, must_know=self._must_know))
        elif marker and marker == tools.call[0].strip() and tools.syntax != "object":
            self._state = self._read_kind
        else:
            self._state = self._read_section

    def _begin(self, call: CallReader) -> None:
        self._call, self._state = call, self._read_call

    @property
    def _must_know(self) -> bool:
        """Whether only a known name makes a call: no marker says that it is one, or it stands in a thought."""
        assert self._tools is not None
        return self._tools.is_bare or (self._tape.keeps_raw and self._met_in == self._read_thought)

    def _give_up(self) -> bool:
        """Leave what was no call to the text, or to the reasoning, that it was met in."""
        raw, within = self._tape.raw, self._met_in == self._read_thought and self._tape.keeps_raw
        self._tape.certain()
        self._state = self._read_thought if within else self._read_text
        (self._thought if within else self._text).add(raw)
        return True

    def _read_call(self) -> bool:
        assert self._call is not None
        num_before = self._calls.num_calls
        step = self._call.step()
        if self._calls.num_calls > num_before:
            self._text.is_inner = self._thought.is_inner = True
        if step == "no call":
            return self._give_up()
        if step == "ended":
            assert self._tools is not None
            is_last = self._tools.syntax in ("braces", "python", "channels")
            self._state = self._read_text if is_last else self._read_section
        return step != "wait"

    def _read_section(self) -> bool:
        """Read what is between calls, up to the next one or to the end of all."""
        assert self._tools is not None
        tools, tape = self._tools, self._tape
        body = tape.held.lstrip()
        begin = tools.call[0].strip() if tools.syntax != "object" else ""
        last, end = tools.section[1].strip(), tools.call[1].strip()
        if not body:
            return False
        if tools.syntax == "named" and last:
            return self._read_noise(begin, last)
        blanks = len(tape.held) - len(body)
        markers = tuple(dict.fromkeys(one for one in (begin, tools.section[0].strip(), last, end) if one))
        for marker in markers:
            if body.startswith(marker):
                tape.skip(blanks + len(marker))
                self._state = self._read_kind if marker == begin else self._state
                return self._give_up() if marker == last else True
        if any(marker.startswith(body) for marker in markers):
            return False
        if tools.syntax in ("object", "named") and body[0] in "{[],;":
            is_call = body[0] == "{"
            tape.skip(blanks + (not is_call))
            if is_call:
                self._begin(JsonCall(tape, self._calls, tools, must_know=self._must_know))
            return True
        return self._give_up()

    def _read_noise(self, begin: str, end: str) -> bool:
        """Skip what stands between calls of a family whose markers are tokens of their own: nothing there is text."""
        found = markers_of(begin, end).find(self._tape.held)
        if found is None:
            return False
        self._tape.skip(found[0] + len(found[1]))
        self._state = self._read_kind if found[1] == begin else self._read_text
        if found[1] == end:
            self._tape.certain()
            self._text.is_inner = True
        return True

    def _read_kind(self) -> bool:
        """Begin a call behind its opening. A family may write its older form, in JSON alone."""
        assert self._tools is not None
        tools, tape = self._tools, self._tape
        if tools.syntax == "tagged":
            self._begin(TaggedCall(tape, self._calls, tools, must_know=self._must_know))
            return True
        body = tape.held.lstrip()
        if body[:1] in ("[", "{"):
            self._state = self._read_section
        elif body:
            self._begin(JsonCall(tape, self._calls, tools, must_know=self._must_know))
        return bool(body)

    # Messages with heads

    def _read_head(self) -> bool:
        """Read the head of a message: its body is reasoning, text, or the arguments of a call."""
        tape, tools = self._tape, self._tools
        found = markers_of(_BODY, _HEADS[0], "<|end|>").find(tape.held)
        if found is None or tools is None:
            return False
        head = tape.raw + tape.held[: found[0]]
        tape.held = tape.held[found[0] + len(found[1]) :]
        tape.certain()
        self._thought.is_inner = self._text.is_inner = True
        if found[1] != _BODY:  # no head
            self._state = self._read_head if found[1] == _HEADS[0] else self._read_text
            return True
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.findall(head)
        if recipient is not None and recipient[1] not in _PEOPLE:
            name = recipient[1].removeprefix("functions.")
            if self._calls.knows(name):
                self._begin(JsonCall.named(tape, self._calls, tools, name))
            else:
                self._state = self._read_unwanted
            return True
        self._state = self._read_thought if channel[-1:] == ["analysis"] else self._read_text
        return True

    def _read_unwanted(self) -> bool:
        """Skip the body of a message to a tool that nobody offered."""
        found = self._in_text.find(self._tape.held)
        self._tape.held = self._tape.held[found[0] if found else self._in_text.num_safe(self._tape.held) :]
        self._state = self._read_text if found else self._state
        return found is not None
