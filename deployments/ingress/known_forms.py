"""The forms of requests, so that the queue can be asked about one before it is read: reading takes milliseconds.

The form of a request is all of it that says whose it is and what it costs, without what it says: its path, terms, key
and options, and roughly the length of its texts. What the last one of a form needed is remembered.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from cluster.control.lanes import Ask
from deployments.errors import ServiceError

_MAX_FORMS: Final = 4096
_MAX_BYTES: Final = 2**14  # of a body that is looked at twice
_MARKED: Final = 1024  # characters
_TERMS: Final = (b"authorization", b"x-api-key", b"x-priority", b"x-tenant", b"x-request-timeout-seconds")
_TEXTS: Final = ("prompt", "messages", "input")
_NO_OPTIONS: Final = {*_TEXTS, "seed"}


def mark_of_text(model: str, text: str) -> int:
    """Return a number that says what is asked, but for the seed, which may be drawn: who asks again has the same."""
    return zlib.crc32(f"{model} {text[:_MARKED]}".encode("utf-8", "surrogatepass")) or 1


@dataclass(frozen=True, slots=True)
class Form:
    """The form of one request, as a hash: keys of clients are kept nowhere. `mark` is that of what it says."""

    key: bytes
    mark: int

    @classmethod
    def of(cls, path: str, headers: Mapping[bytes, bytes], body: bytes) -> Form | None:
        """Return the form of a request; None of one that is no JSON object with texts."""
        if len(body) > _MAX_BYTES:
            return None
        try:
            fields: Any = json.loads(body)
            texts = [text for name in _TEXTS if name in fields for text in _texts_of(fields[name])]
            if not texts or not isinstance(fields["model"], str):
                return None
            options = {name: value for name, value in fields.items() if name not in _NO_OPTIONS}
            mark = mark_of_text(fields["model"], texts[-1] if "messages" in fields else texts[0])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        sizes = len(texts), sum(map(len, texts)).bit_length()
        terms = [headers.get(name, b"").decode("latin-1") for name in _TERMS]
        form = json.dumps([path, terms, sizes, options], sort_keys=True)
        return cls(hashlib.blake2b(form.encode(), digest_size=16).digest(), mark)


class KnownForms:
    """The needs of requests, by their form. `why_refused` is the queue's answer to a need, with the seconds left."""

    def __init__(self, why_refused: Callable[[Ask], ServiceError | None]) -> None:
        self._why_refused = why_refused
        self._asks: OrderedDict[bytes, Ask] = OrderedDict()

    def note_ask(self, form: Form, ask: Ask, waited_s: float) -> None:
        """Remember what a request needed that had waited so long."""
        self._asks[form.key] = replace(ask, deadline_s=ask.deadline_s + waited_s)
        self._asks.move_to_end(form.key)
        if len(self._asks) > _MAX_FORMS:
            self._asks.popitem(last=False)

    def why_refused(self, form: Form, waited_s: float) -> ServiceError | None:
        """Return why a request is refused that has waited so long; None if it has to be read to know that."""
        ask = self._asks.get(form.key)
        if ask is None:
            return None
        return self._why_refused(replace(ask, mark=form.mark, deadline_s=ask.deadline_s - waited_s))


def _texts_of(value: Any) -> list[str]:
    """Return the texts of a field. Raises TypeError, KeyError when it has something else."""
    if isinstance(value, str):
        return [value]
    texts = [one["content"] if isinstance(one, dict) else one for one in value]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(value)
    return texts
