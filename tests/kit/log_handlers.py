"""pytest's handlers of logs, attached without a look at all loggers: it attaches two in each of a test's three phases.

A pytest plugin. Libraries make some thousand loggers, and a look at all of them six times a test was a fortieth of the
unit tests' time. Those that pass nothing on to the root are looked for when there are more loggers than before.
"""

from __future__ import annotations

import logging
from typing import Any

from _pytest import logging as of_pytest


class _Silent:
    """The loggers that pass nothing on, as of the time when there were `num_loggers`."""

    num_loggers = -1
    loggers: tuple[logging.Logger, ...] = ()

    @classmethod
    def found(cls) -> tuple[logging.Logger, ...]:
        known = logging.root.manager.loggerDict
        if len(known) != cls.num_loggers:
            made = [one for one in list(known.values()) if isinstance(one, logging.Logger)]
            cls.num_loggers, cls.loggers = len(known), tuple(one for one in made if not one.propagate)
        return cls.loggers


class _Catching(of_pytest.catching_logs):  # type: ignore[type-arg]
    """A handler at the root and at loggers that pass nothing on to it.

    These are some fifty: `addHandler` and `removeHandler`, which lock what a list does at once, were a fifth of the
    time of an empty test.
    """

    def __enter__(self) -> Any:
        root = logging.getLogger()
        self.attached_loggers = [root, *_Silent.found()]
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        for logger in self.attached_loggers:
            if self.handler not in logger.handlers:
                logger.handlers.append(self.handler)
        return self.handler

    def __exit__(self, *exception: object) -> None:
        if self.level is not None:
            logging.getLogger().setLevel(self.orig_level)
        for logger in self.attached_loggers:
            if self.handler in logger.handlers:
                logger.handlers.remove(self.handler)


def pytest_configure() -> None:
    of_pytest.catching_logs = _Catching  # type: ignore[misc]
