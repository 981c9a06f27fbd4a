"""Random breaks, and the tests that each of them has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from coverage import CoverageData

from infra import mutation_sample
from infra.mutation_sample import Recording, breaks_of

SOURCE = """
LIMIT = 3

def outer(a, b=1):
    @kept(2)
    def inner():
        return not a
    if a < b and inner():
        log(f"{a}")
        stop(
            a + 1,
        )
        close()
    return "é", a is None
"""


def test_each_place_inside_of_functions_is_broken_once() -> None:
    found = list(breaks_of(SOURCE))
    assert sorted((one.lines[0], one.lines[-1], one.said) for one in found) == [
        (5, 5, "2 -> 3"),
        (7, 7, "not a -> a"),
        (8, 8, "a < b -> (a <= b)"),
        (8, 8, "a < b and inner() -> (a < b or inner())"),
        (10, 11, "1 -> 2"),
        (10, 11, "a + 1 -> (a - 1)"),
        (13, 13, "close() -> pass"),
        (14, 14, "a is None -> (a is not None)"),
    ]
    for one in found:
        compile(one.text, "broken.py", "exec")
        different = [a != b for a, b in zip(SOURCE.splitlines(), one.text.splitlines(), strict=True)]
        assert different.index(True) + 1 == one.lines[-1]
        assert sum(different) == 1


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[int]]], Recording]:
    """A recording of module `a/b/c.py`, of the lines of each context."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("tests/unit/a/test_near.py", "from a.b.c import d\n"), ("tests/unit/a/test_far.py", "")):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

    def of(lines: dict[str, list[int]]) -> Recording:
        mutation_sample.RECORDED.parent.mkdir(parents=True)
        data = CoverageData(str(mutation_sample.RECORDED))
        for context, numbers in lines.items():
            data.set_context(context)
            data.add_lines({"a/b/c.py": numbers})
        data.write()
        times = "".join(f"1\t{len(test)}\t{test}\n" for test in lines)
        mutation_sample.RECORDED.with_name("unit.tsv").write_text(times)
        return Recording()

    return of


def test_a_break_has_the_tests_that_run_its_line_the_near_and_quick_first(
    recorded: Callable[[dict[str, list[int]]], Recording],
) -> None:
    near, far, quick = "tests/unit/a/test_near.py::test_x", "tests/unit/a/test_far.py::test_yz", "tests/unit/a/t.py::t"
    recording = recorded({"": [1, 9, 10], near: [2], far: [2, 3], quick: [3, 2, 10]})
    assert recording.tests_of(Path("a/b/c.py"), range(2, 3)) == [near, quick, far]
    assert recording.tests_of(Path("a/b/c.py"), range(3, 5)) == [quick, far]
    assert recording.tests_of(Path("a/b/c.py"), range(9, 10)) == ["tests/unit/a"]  # another process runs it
    assert recording.tests_of(Path("a/b/c.py"), range(10, 11)) == [quick, "tests/unit/a"]
    assert recording.tests_of(Path("a/b/c.py"), range(4, 5)) == ["tests/unit/a/test_near.py"]  # or a process of theirs
