"""The batching delay and the best batch size of a group, learned from its arrivals and its batches' times. Pure.

A batch of n items takes about a + b n seconds; batching saves the a. Two questions follow, both about mean latency:

- *May a batch that could start wait for the next arrival?* With k requests waiting and the next one x seconds away,
  starting together costs each of the k its x + b, and spares the newcomer a - x of waiting for the batch to end. Over
  the gaps seen lately that are longer than the present one, `delay_s` is the wait of the best expected balance, 0
  when there is none. For Poisson arrivals this is the control limit that is optimal for batch service (Deb and
  Serfozo, "Optimal control of batch service queues", Adv. Appl. Prob. 5, 1973), with the look-ahead cut to one step.
  Gaps are remembered apart for arrivals that found nothing else under way: a caller that waits for its answer before
  it asks again leaves long ones there, whatever a crowd before it did.
- *How many of those that wait should one batch take?* All items of a batch end when the last one does, so where b
  outweighs a, small batches answer most requests sooner: `best_size`.

Nothing is known before two batch sizes were seen, and again when only one size came for long: then a batch starts
at once with all that fits, which is how the next two sizes come about.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

WINDOW: Final = 64  # gaps remembered
DECAY: Final = 0.98  # of a batch's weight with every later batch: about the last 50 count
MIN_SPREAD: Final = 1e-4  # of sizes, relative variance; below it a line through them is arbitrary
SLACK: Final = 1.25  # a gap so much longer than one seen before may still be the same
MARGIN: Final = 0.02  # of fixed_s, shared by those who wait: the next gap may be the longest yet, by a little
WORTH: Final = 0.95  # of the latency of full batches, which smaller ones have to stay below: estimates are noisy


class _ServiceCurve(NamedTuple):
    """The seconds of a batch of cost n: fixed_s + per_cost_s * n. Items cost 1 where nobody says otherwise."""

    fixed_s: float
    per_cost_s: float


class BatchingDelay:
    """The estimator of one group; `now_s` on the caller's clock."""

    def __init__(self) -> None:
        self._gaps_s = {is_alone: deque[float](maxlen=WINDOW) for is_alone in (False, True)}
        self._last_s: float | None = None
        self._was_alone = False  # the last one
        self._weight = self._cost = self._time = self._cost_cost = self._cost_time = 0.0

    def note_arrival(self, now_s: float, *, is_alone: bool = False) -> None:
        """Learn that one request came. `is_alone`: it found nobody waiting, and nothing running."""
        if self._last_s is not None:
            self._gaps_s[self._was_alone].append(max(0.0, now_s - self._last_s))
        self._last_s, self._was_alone = now_s, is_alone

    def note_served(self, cost: float, duration_s: float) -> None:
        """Learn that one batch of this cost took so long."""
        self._weight = self._weight * DECAY + 1.0
        self._cost = self._cost * DECAY + cost
        self._time = self._time * DECAY + duration_s
        self._cost_cost = self._cost_cost * DECAY + cost * cost
        self._cost_time = self._cost_time * DECAY + cost * duration_s

    def _curve(self) -> _ServiceCurve | None:
        """Return the line of least squares, neither part below zero; None while there is too little to tell."""
        spread = self._cost_cost * self._weight - self._cost * self._cost
        if spread <= MIN_SPREAD * self._cost * self._cost:
            return None
        slope = (self._cost_time * self._weight - self._cost * self._time) / spread
        slope = min(max(slope, 0.0), self._time / self._cost)
        return _ServiceCurve((self._time - slope * self._cost) / self._weight, slope)

    def delay_s(self, now_s: float, num_waiting: int, cost: float) -> float:
        """Return the seconds that are worth waiting for one more request of `cost` while `num_waiting` wait."""
        curve = self._curve()
        if curve is None or self._last_s is None:
            return 0.0
        fixed_s, extra_s = curve.fixed_s, curve.per_cost_s * cost
        if fixed_s <= num_waiting * extra_s:
            return 0.0
        gaps_s = sorted(self._gaps_s[self._was_alone])
        since_s = now_s - self._last_s
        ahead = [gap_s - since_s for gap_s in gaps_s[bisect_right(gaps_s, since_s * SLACK) :]]
        best, best_s, balance = 0.0, 0.0, 0.0
        for index, wait_s in enumerate(ahead):
            if wait_s >= fixed_s:
                break
            balance += fixed_s - wait_s - num_waiting * (wait_s + extra_s)
            in_vain = (len(ahead) - index - 1) * num_waiting * wait_s
            if balance - in_vain > best:
                best, best_s = balance - in_vain, wait_s
        return best_s * SLACK + MARGIN * fixed_s / num_waiting if best else 0.0

    def best_size(self, num_items: int, max_size: int, cost: float) -> int:
        """Return the best number of items for the next batch when `num_items` of about `cost` each wait."""
        most = min(num_items, max_size)
        curve = self._curve()
        if curve is None or most <= 1:
            return most
        fixed_s, item_s = curve.fixed_s, curve.per_cost_s * cost
        latency_s = {size: _total_latency_s(num_items, size, fixed_s, item_s) for size in range(1, most + 1)}
        best = min(latency_s, key=lambda size: (latency_s[size], -size))
        return best if latency_s[best] < WORTH * latency_s[most] else most


def _total_latency_s(num_items: int, size: int, fixed_s: float, item_s: float) -> float:
    """Return the sum over all items, served in one batch of `size` after the other."""
    num_full, rest = divmod(num_items, size)
    full_s = fixed_s + item_s * size
    last_s = num_full * full_s + fixed_s + item_s * rest
    return size * full_s * num_full * (num_full + 1) / 2 + rest * last_s
