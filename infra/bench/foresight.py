"""The schedule of one who knows by which law requests come, yet no request before it comes.

For one worker of one slot. Whenever it is free, each of its choices (to serve a model that waits, or to wait for the
next request) is played to the end in the same `NUM_FUTURES` futures, drawn by the law, and the one with the least mean
latency is taken. In a play the worker serves next what ends most per second, the way there and back counted. More than
a controller can know goes into it: the law, how many requests are still to come, and how much work all of them are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

NUM_FUTURES: Final = 20
Future = Sequence[tuple[float, int]]  # requests, in the order of their arrival: when, and for which model


def expecting_latencies(
    coming: Future,
    switch_s: Sequence[Sequence[float]],
    service_s: Sequence[float],
    futures_of: Callable[[float, int], Sequence[Future]],
) -> list[tuple[int, float]]:
    """Return each request's model and latency.

    `futures_of` draws futures of the requests after a moment, by the number of those that have come. The last row of
    `switch_s` is from nothing.
    """
    left, queues, found = deque(coming), [deque[float]() for _ in service_s], list[tuple[int, float]]()
    now_s, attached = 0.0, -1
    while left or any(queues):
        while left and left[0][0] <= now_s:
            at_s, model = left.popleft()
            queues[model].append(at_s)
        waiting = [len(queue) for queue in queues]
        choices = [model for model, num in enumerate(waiting) if num]
        if choices and left and attached not in choices:
            choices.append(-1)  # to wait; while some wait for the loaded model, that loses
        if len(choices) > 1:
            futures = futures_of(now_s, len(coming) - len(left)) if left else [()]
            least_s = [
                sum([played_s(one, future, now_s, attached, waiting, switch_s, service_s) for future in futures])
                for one in choices
            ]
            choices = [choices[least_s.index(min(least_s))]]
        if not choices or choices[0] < 0:
            now_s = left[0][0]
            continue
        model = choices[0]
        now_s += switch_s[attached][model] + service_s[model]
        found.append((model, now_s - queues[model].popleft()))
        attached = model
    return found


def played_s(
    first: int,
    future: Future,
    now_s: float,
    attached: int,
    waiting: Sequence[int],
    switch_s: Sequence[Sequence[float]],
    service_s: Sequence[float],
) -> float:
    """Return the seconds that all requests wait together from now on, the `first` choice being made; -1 is to wait."""
    counts, num, total_s, come = list(waiting), sum(waiting), 0.0, 0
    if first < 0:
        total_s, now_s = num * (future[0][0] - now_s), future[0][0]
    while True:
        for at_s, model in islice(future, come, None):
            if at_s > now_s:
                break
            come, counts[model], num, total_s = come + 1, counts[model] + 1, num + 1, total_s + now_s - at_s
        if not num:
            if come == len(future):
                return total_s
            now_s = future[come][0]
            continue
        model = first if first >= 0 else _ends_most(counts, attached, switch_s, service_s)
        took_s = switch_s[attached][model] + service_s[model]
        total_s, now_s = total_s + num * took_s, now_s + took_s
        counts[model], num, attached, first = counts[model] - 1, num - 1, model, -1


def _ends_most(
    counts: Sequence[int], attached: int, switch_s: Sequence[Sequence[float]], service_s: Sequence[float]
) -> int:
    best, most = -1, -math.inf
    for model, num in enumerate(counts):
        if num:
            way_s = switch_s[attached][model]
            if way_s and attached >= 0 and counts[attached]:
                way_s += switch_s[model][attached]
            per_s = num / (way_s + num * service_s[model])
            if per_s > most:
                best, most = model, per_s
    return best
