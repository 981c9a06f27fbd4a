"""The worth of asking the shared tier before an encoding is computed. Pure.

An answer takes some milliseconds, which are lost for every text that nobody else has: a sentence of its own, say, whose
computation takes hardly longer. So the tier is asked while what it spares, by the share of texts that it has and by
what a computation costs, is more than the wait. All of that is measured, by module. Now and then it is asked in any
case, to hear whether that has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MAX_MODULES: Final = 1024
ASK_EVERY: Final = 16  # of what is not worth it
_NEW: Final = 1 / 16  # weight of a new time
_REMEMBERED: Final = 128  # answers, about


@dataclass(slots=True)
class _Module:
    """One encoder. `found_share` is the share of its texts that the tier had, all before the first answer."""

    found_share: float = 1.0
    num_answers: int = 1
    cost_s: float | None = None
    num_passed: int = 0  # questions since the last one that was asked


class AskingWorth:
    """The cost of questions and the computations that they spare, and whether the next one is worth it."""

    def __init__(self) -> None:
        self._answer_s = 0.0
        self._modules: OrderedDict[str, _Module] = OrderedDict()

    def is_worth_asking(self, modules: Iterable[str]) -> bool:
        """Return whether the tier is asked for texts of these modules, which are computed beside each other."""
        found = [self._module(name) for name in set(modules)]
        if any(one.cost_s is None or one.num_passed >= ASK_EVERY - 1 for one in found):
            is_asked = True
        else:
            is_asked = max(one.found_share * (one.cost_s or 0.0) for one in found) >= self._answer_s
        for one in found:
            one.num_passed = 0 if is_asked else one.num_passed + 1
        return is_asked

    def note_answers(self, answers: Iterable[tuple[str, bool]], took_s: float) -> None:
        """Learn from one question: for each text its module, and whether somebody else has or computes it."""
        # Falls at once and rises slowly: the first answer takes as long as the actor's start, others a busy moment.
        self._answer_s = min(took_s, self._answer_s + _NEW * (took_s - self._answer_s))
        for name, is_found in answers:
            module = self._module(name)
            module.num_answers = min(module.num_answers + 1, _REMEMBERED)
            module.found_share += (is_found - module.found_share) / module.num_answers

    def note_computed(self, name: str, cost_s: float) -> None:
        """Learn what it takes to compute texts of a module, the wait for a batch with it."""
        module = self._module(name)
        module.cost_s = cost_s if module.cost_s is None else module.cost_s + _NEW * (cost_s - module.cost_s)

    def _module(self, name: str) -> _Module:
        module = self._modules.setdefault(name, _Module())
        self._modules.move_to_end(name)
        if len(self._modules) > MAX_MODULES:
            self._modules.popitem(last=False)
        return module
