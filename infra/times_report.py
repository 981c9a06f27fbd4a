"""Report the times of tests: `python infra/times_report.py FILES [--to PAGE]`, from files of `pytest --times`.

Seconds of the processor come first: those that pass are others on a busy machine.
"""

from __future__ import annotations

import argparse
import functools
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple


class Taken(NamedTuple):
    """The total times of tests."""

    processor_s: float = 0.0
    passed_s: float = 0.0
    num_tests: int = 0

    def plus(self, other: Taken) -> Taken:
        return Taken(*(mine + its for mine, its in zip(self, other, strict=True)))


def read_times(path: Path) -> dict[str, Taken]:
    """Return the time of each test of a file."""
    lines = [line.split("\t", 2) for line in path.read_text().splitlines()]
    return {test: Taken(float(processor_s), float(passed_s), 1) for processor_s, passed_s, test in lines}


def sums(times: dict[str, Taken], separator: str) -> dict[str, Taken]:
    """Return the sums of tests that are called the same before a separator, the largest first."""
    total: dict[str, Taken] = defaultdict(Taken)
    for test, taken in times.items():
        name = test.partition(separator)[0]
        total[name] = total[name].plus(taken)
    return dict(sorted(total.items(), key=lambda one: -one[1].processor_s))


def report(runs: dict[str, dict[str, Taken]], num_rows: int) -> str:
    """Return tables of runs, of their files, and of tests with all of their cases."""
    every = {test: taken for times in runs.values() for test, taken in times.items()}
    tables = {
        "run": {name: _total(times) for name, times in runs.items()},
        "file": sums(every, "::"),
        "test, with all of its cases": sums(every, "["),
    }
    return "\n".join(_table(what, list(rows.items())[:num_rows]) for what, rows in tables.items())


def _total(times: dict[str, Taken]) -> Taken:
    return functools.reduce(Taken.plus, times.values(), Taken())


def _table(what: str, rows: list[tuple[str, Taken]]) -> str:
    lines = [f"| processor s | passed s | tests | {what} |", "|---|---|---|---|"]
    lines += [f"| {one.processor_s:.1f} | {one.passed_s:.1f} | {one.num_tests} | {name} |" for name, one in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--to", type=Path, help="write a page instead of printing")
    arguments = parser.parse_args()
    runs = {path.stem: read_times(path) for path in arguments.files}
    if arguments.to is None:
        print(report(runs, 12))
    else:
        what = f"`make {arguments.to.stem}` writes this page of the last run. Begin at the top."
        arguments.to.write_text(f"# What the tests take\n\n{what}\n\n{report(runs, 60)}")


if __name__ == "__main__":
    main()
