"""One share of the tests: `--share 8` runs an eighth of those chosen, drawn by the seed, `--share 3/8` the third.

A pytest plugin. The name of a test says which share it is in, so that all shares together are all tests. Tests on Ray
stay with the others of their file, which may share a cluster.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import pytest
from kit import seeding

_RAY: Final = "ray"


def share_of(name: str, num_shares: int) -> int:
    """Return the share of a name, from 1."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % num_shares + 1


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
    names = [item.nodeid.partition("::")[0] if item.get_closest_marker(_RAY) else item.nodeid for item in items]
    is_in = [share_of(name, num_shares) == number for name in names]
    config.hook.pytest_deselected(items=[item for item, chosen in zip(items, is_in, strict=True) if not chosen])
    items[:] = [item for item, chosen in zip(items, is_in, strict=True) if chosen]


def parse_share(text: str) -> tuple[int, int]:
    """Return the number of a share, from 1, and of how many; drawn by the seed where the text names none."""
    match = re.fullmatch(r"(?:([1-9]\d*)/)?([1-9]\d*)", text)
    number = match and int(match[1] or share_of(f"{seeding.SEED} share", int(match[2])))
    if not match or not number or number > int(match[2]):
        raise ValueError(text)  # which argparse tells with the option's name
    return number, int(match[2])
