"""The controller's decision for each reporter, until it is fetched. Lives on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from cluster.admission.records import Placement
from cluster.placement.reports import Orders


@dataclass(slots=True)
class Mail:
    """The answer to one reporter, under a revision. `changed` is set when a newer one comes."""

    content: Orders | Placement | None = None
    revision: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Mailboxes:
    """The answers to reporters, by name."""

    def __init__(self) -> None:
        self._mails: dict[str, Mail] = {}

    def open(self, name: str) -> Mail:
        """Return the mail of a reporter, and make its mailbox if it has none."""
        return self._mails.setdefault(name, Mail())

    async def receive(self, name: str, revision: str, wait_s: float) -> Mail:
        """Return the mail newer than `revision`, or the same again after `wait_s`."""
        mail = self.open(name)
        if mail.revision == revision:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await mail.changed.wait()
            mail = self._mails.get(name, mail)
        return mail

    def post(self, name: str, content: Orders | Placement) -> None:
        """Put a decision into a reporter's mailbox, unless the same is there already."""
        mail = self._mails.get(name)
        if mail is not None and mail.content == content:
            return
        self._mails[name] = Mail(content, uuid.uuid4().hex)
        if mail is not None:
            mail.changed.set()

    def keep(self, names: AbstractSet[str]) -> None:
        """Forget the mailboxes of all other reporters, which are gone."""
        for name in self._mails.keys() - names:
            del self._mails[name]
