"""The replicas of one pool: what each has room for, and the models that it is believed to have at hand. Pure."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

MAX_RECENT: Final = 4  # models that a replica is believed to have at hand: those that it ran last
JOIN_DELAYS: Final = 2.0  # a request that joins a batch is delayed by each of the others, and delays each of them
ROUNDING: Final = 1e-9  # of shares that add up to 1


@dataclass(slots=True)
class Replica:
    """One replica. `clock` counts seconds per unit of share: it is slower the more requests run together."""

    limit: float = 1.0  # of the shares that this queue may run
    used: float = 0.0
    load_s: float = 0.0
    others: Mapping[str, int] = field(default_factory=dict)  # running for other ingresses, by model
    others_used: float = 0.0
    others_load_s: float = 0.0
    ready_at_s: float = -math.inf  # when the switch ends that a request began
    clock: float = 0.0
    clock_at_s: float = 0.0
    is_gone: bool = False
    models: Counter[str] = field(default_factory=Counter)  # running
    recent: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def all_used(self) -> float:
        return self.used + self.others_used

    @property
    def num_running(self) -> int:
        return self.models.total() + sum(self.others.values())

    def clock_at(self, now_s: float) -> float:
        used = self.all_used
        return self.clock + (max(0.0, now_s - self.clock_at_s) / used if used > ROUNDING else 0.0)

    def advance(self, now_s: float) -> None:
        self.clock = self.clock_at(now_s)
        self.clock_at_s = now_s

    def delay_s(self, model: str, joining_s: float) -> float:
        num, num_alike = self.num_running, self.models[model] + self.others.get(model, 0)
        load_s = self.load_s + self.others_load_s
        return JOIN_DELAYS * joining_s * num_alike + load_s * (num - num_alike) / max(num, 1)

    def has_room(self, share: float) -> bool:
        return not self.is_gone and self.used + share <= self.limit + ROUNDING

    def num_places(self, share: float, most: int) -> int:
        """Return how many requests of that share it could start, at `most` so many."""
        return 0 if self.is_gone else max(0, int(min(most, (self.limit - self.used) / share + ROUNDING)))


class Replicas(dict[str, Replica]):
    """The replicas of one pool, by name; one that is gone stays as long as something runs on it."""

    def __init__(self) -> None:
        super().__init__()
        self._num_at_hand: Counter[str] = Counter()  # replicas, by model

    def among(self, names: Collection[str] | None = None) -> Iterable[tuple[str, Replica]]:
        """Return the replicas with their names: all, or those of `names` that there are."""
        return self.items() if names is None else [(name, self[name]) for name in names if name in self]

    def names(self) -> list[str]:
        """Return the replicas that can be given work."""
        return [name for name, replica in self.items() if not replica.is_gone]

    def has_room(self, share: float, among: Collection[str] | None = None) -> bool:
        """Return whether any replica, or any of those named, could start a request of that share."""
        return any(replica.has_room(share) for _, replica in self.among(among))

    def drop(self, name: str) -> None:
        """Forget a replica."""
        self.believe(self[name], ())
        del self[name]

    def has_only_one(self, model: str) -> bool:
        """Return whether exactly one replica is believed to have the model."""
        return self._num_at_hand[model] == 1

    def believe(self, replica: Replica, models: Iterable[str]) -> None:
        """Believe that the replica has these models at hand, the last one used last, and no others."""
        self._num_at_hand.subtract(replica.recent.keys())
        for model in replica.recent:
            if not self._num_at_hand[model]:
                del self._num_at_hand[model]
        replica.recent = OrderedDict.fromkeys(models)
        self._num_at_hand.update(replica.recent.keys())

    def forget_model(self, name: str, model: str) -> None:
        """Stop believing that the replica has the model at hand."""
        if name in self:
            self.believe(self[name], [each for each in self[name].recent if each != model])

    def set_resident(self, resident: Mapping[str, Iterable[str]]) -> None:
        """Believe that these models are at hand, by replica, and no others.

        A replica with another running model is left out: that request started after the report was made.
        """
        for name, models in resident.items():
            replica = self.get(name)
            running = replica.models.keys() | replica.others.keys() if replica else ()
            if replica is not None and set(running) <= set(models):
                last = [model for model in replica.recent if model in models]  # the order of use stays
                self.believe(replica, [*(model for model in models if model not in last), *last])
