"""One share of the tests: `--share 8` runs an eighth of those chosen, drawn by the seed, `--share 3/8` the third.

A pytest plugin. All shares together are all tests, and each takes as long as the others by `tests/times-long.md`. Tests
on Ray stay with the others of their file, which may share a cluster.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from typing import Final

import pytest
from kit import seeding
from kit.times import LONG_PAGE, stored_seconds

_RAY: Final = "ray"
_UNKNOWN_S: Final = 2.0  # a file that the page of the longest ones does not name


def shares_of(seconds: dict[str, float], num_shares: int) -> dict[str, int]:
    """Return the share of each name, from 1: the longest first, each to the share that has least."""
    taken = [0.0] * num_shares
    found = {}
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        least = taken.index(min(taken))
        taken[least] += seconds[name]
        found[name] = least + 1
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=parse_share, help="N: one drawn share of N; K/N: share K")


def pytest_report_header(config: pytest.Config) -> list[str]:
    share = config.getoption("--share")
    return ["share of the tests: {}/{}".format(*share)] if share else []


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := config.getoption("--share")) is None:
        return
    number, num_shares = share
    files = [item.nodeid.partition("::")[0] for item in items]
    names = [file if item.get_closest_marker(_RAY) else item.nodeid for file, item in zip(files, items, strict=True)]
    stored, counts = stored_seconds(LONG_PAGE), Counter(files)
    seconds: dict[str, float] = defaultdict(float)
    for file, name in zip(files, names, strict=True):
        seconds[name] += stored.get(file, _UNKNOWN_S) / counts[file]
    shares = shares_of(seconds, num_shares)
    is_in = [shares[name] == number for name in names]
    config.hook.pytest_deselected(items=[item for item, chosen in zip(items, is_in, strict=True) if not chosen])
    items[:] = [item for item, chosen in zip(items, is_in, strict=True) if chosen]


def parse_share(text: str) -> tuple[int, int]:
    """Return the number of a share, from 1, and of how many; drawn by the seed where the text names none."""
    match = re.fullmatch(r"(?:([1-9]\d*)/)?([1-9]\d*)", text)
    number = match and int(match[1] or _drawn(int(match[2])))
    if not match or not number or number > int(match[2]):
        raise ValueError(text)  # which argparse tells with the option's name
    return number, int(match[2])


def _drawn(num_shares: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seeding.SEED} share".encode()).digest()[:8]) % num_shares + 1
