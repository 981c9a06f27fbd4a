"""Reads an answer as its text comes, and separates text, reasoning and tool calls by the model's form.

One machine for all forms. It takes text in pieces, cut anywhere, and returns the certain part; the whole result
does not depend on the cuts. Text that only looks like a call stays text.
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
    """A piece's additions to the text, the reasoning and the calls of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CalledTool, ...] = ()


class _Shown:
    """Text for the reader of an answer, without blanks beside hidden parts."""

    def __init__(self, *, holds_blanks: bool) -> None:
        self._holds_blanks = holds_blanks
        self._pieces: list[str] = []
        self._blanks = ""
        self.has_text = False
        self.is_inner = False  # a hidden part has come: blanks before the next text are beside it

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
        """End the text: blanks at its end are shown unless a hidden part is beside them."""
        if not self.is_inner:
            self._pieces.append(self._blanks)
        self._blanks = ""

    def take(self) -> str:
        """Return the text added since the last call."""
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)


class AnswerReader:
    """Parts the text of one answer. It may call `functions`; calls after the first `max_calls` are left out."""

    def __init__(self, form: AnswerForm, functions: Sequence[Function] = (), max_calls: int | None = None) -> None:
        self._tools, self._form = form.tools, form.reasoning
        self._text = _Shown(holds_blanks=form.tools is not None or bool(form.reasoning and form.reasoning.around))
        self._thought = _Shown(holds_blanks=True)
        self._thought.is_inner = True
        self._tape = Tape(form.tools.mark if form.tools is not None else "")
        self._calls = Calls(functions, max_calls)
        self._call: CallReader | None = None
        self._met_in: Callable[[], bool] = self._read_start  # the state in which a possible call was met
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
        """Return the number of calls that have begun."""
        return self._calls.num_calls

    @property
    def is_thinking(self) -> bool:
        """Return whether the next text belongs to a thought, if only as its end."""
        return self._state == self._read_thought

    def feed(self, piece: str) -> AnswerPiece:
        """Read a piece, and return the part of the answer that is certain now."""
        self._tape.put(piece)
        while self._tape.held and self._state():
            pass
        return self._take_piece()

    def flush(self, *, is_cut: bool = False) -> AnswerPiece:
        """Return the text held back, at the end of the answer. `is_cut`: a limit ended the answer before its end."""
        self._tape.put_rest()
        while self._tape.held and self._state():
            pass
        if not is_cut and self._state == self._read_call and self._call is not None:
            self._call.flush()
        held, self._tape.held = self._tape.held, ""
        # What was read and is no call is text if it is more than an opening, and that is no token of its own.
        is_text = self._tape.keeps_raw and (self._tape.raw + held).strip() not in self._openings
        if self._state == self._read_thought:
            self._thought.add(held)
        elif self._state in (self._read_start, self._read_text):
            self._text.add(held)
        elif is_text and self._tools is not None and self._tools.syntax not in ("braces", "channels"):
            self._tape.raw += held
            self._give_up()
        self._text.end()
        return self._take_piece()

    def _take_piece(self) -> AnswerPiece:
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
        """Show the text before the next marker, and return the marker; None where there is none yet."""
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
            self._text.add(marker)  # the end of a thought without a beginning, within a text
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

    # Possible calls

    def _open(self, marker: str) -> None:
        """Begin to read possible calls."""
        assert self._tools is not None
        tools, tape = self._tools, self._tape
        tape.raw, tape.keeps_raw, self._met_in = marker, True, self._state
        if tools.syntax == "channels":
            self._state = self._read_head
        elif tools.syntax in ("braces", "python"):
            stop = tools.call[1] if tools.syntax == "braces" else tools.section[1] if marker else ""
            call = WholeCall(tape, self._calls, tools, stop, must_know=self._must_know)
            self._call, self._state = call, self._read_call
        elif marker and marker == tools.call[0].strip() and tools.syntax != "object":
            self._state = self._read_kind
        else:
            self._state = self._read_section

    @property
    def _must_know(self) -> bool:
        """True where a call counts only if its function is known: without a marker, and in thoughts."""
        assert self._tools is not None
        return self._tools.is_bare or (self._tape.keeps_raw and self._met_in == self._read_thought)

    def _give_up(self) -> bool:
        """Give text that is no call back to the text or the reasoning in which it was met."""
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
        """Read the text between calls, up to the next one or to the end of all."""
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
                call = JsonCall(tape, self._calls, tools, must_know=self._must_know)
                self._call, self._state = call, self._read_call
            return True
        return self._give_up()

    def _read_noise(self, begin: str, end: str) -> bool:
        """Skip text between calls of a family whose markers are special tokens: none of it is shown."""
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
        """Begin a call after its opening. A family may write its older form, in JSON alone."""
        assert self._tools is not None
        tools, tape = self._tools, self._tape
        if tools.syntax == "tagged":
            call = TaggedCall(tape, self._calls, tools, must_know=self._must_know)
            self._call, self._state = call, self._read_call
            return True
        body = tape.held.lstrip()
        if body[:1] in ("[", "{"):
            self._state = self._read_section
        elif body:
            self._call, self._state = JsonCall(tape, self._calls, tools, must_know=self._must_know), self._read_call
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
                self._call, self._state = JsonCall.named(tape, self._calls, tools, name), self._read_call
            else:
                self._state = self._read_unwanted
            return True
        self._state = self._read_thought if channel[-1:] == ["analysis"] else self._read_text
        return True

    def _read_unwanted(self) -> bool:
        """Skip the body of a message to a tool that was not offered."""
        found = self._in_text.find(self._tape.held)
        self._tape.held = self._tape.held[found[0] if found else self._in_text.num_safe(self._tape.held) :]
        self._state = self._read_text if found else self._state
        return found is not None
