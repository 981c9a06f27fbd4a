"""Tests that copies of one process run: `--forks`, in a run of pytest of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.nested import Done, Run, plugins, run_pytest

FILES = {
    "sound": """
        import os, random
        import pytest

        @pytest.fixture(scope="module")
        def once():
            yield {"made": 0}

        @pytest.mark.parametrize("number", range(3))
        def test_draws(once, number, tmp_path):
            once["made"] += 1
            assert once["made"] == number + 1  # in one process, in their order
            print("drew", random.random())
            (tmp_path / "x").write_text("")
    """,
    "broken": """
        import pytest

        @pytest.fixture
        def broken():
            yield
            raise ValueError("at its end")

        def test_fails(): assert 1 + 1 == 3, "of sums"
        def test_passes(): pass
        def test_is_skipped(): pytest.skip("for a reason")
        def test_ends_badly(broken): pass
    """,
    "waiting": """
        import time
        def test_waits(): time.sleep(0.5)
        def test_waits_again(): time.sleep(0.5)
    """,
    "quick": "def test_nothing(): pass",
    "others": "def test_others(): pass",
}
ENDS = """
    import os
    def test_before(): pass
    def test_ends_its_process(): os._exit(7)
    def test_behind(): pass
"""


def run(folder: Path, files: dict[str, str], *runs: tuple[str, ...]) -> list[Done]:
    """Run the tests of files, each time with options."""
    for name, source in files.items():
        (folder / f"test_{name}.py").write_text(re.sub(r"^ {4,8}", "", source, flags=re.MULTILINE))
    (folder / "pytest.ini").write_text("[pytest]\n")
    words = [*plugins("seeding", "times", "forks"), "-rA"]
    return run_pytest(folder, *(Run([*words, *options]) for options in runs))


def outcomes(done: Done) -> list[str]:
    return sorted(re.findall(r"^(?:PASSED|FAILED|ERROR|SKIPPED) .*", done.out, re.MULTILINE))


def draws(done: Done) -> list[str]:
    return sorted(re.findall(r"^drew .*", done.out, re.MULTILINE))


@pytest.mark.slow
def test_copies_tell_what_one_process_tells(tmp_path: Path) -> None:
    alone, told = run(tmp_path, FILES, ("--times", "alone.tsv"), ("--times", "copies.tsv", "--forks", "3"))
    assert alone.code == told.code == pytest.ExitCode.TESTS_FAILED, told.out + told.err
    assert outcomes(alone) == outcomes(told)
    assert len(outcomes(told)) == 12
    assert draws(alone) == draws(told)
    assert len(draws(told)) == 3
    assert "of sums" in told.out
    assert told.out.count(" passed") == 1, "one of them writes"
    timed = [
        {line.split("\t")[2] for line in (tmp_path / f"{name}.tsv").read_text().splitlines()}
        for name in ("alone", "copies")
    ]
    assert timed[0] == timed[1]
    assert len(timed[0]) == 11


@pytest.mark.slow
def test_a_copy_that_ends_fails_the_tests_that_it_had_left(tmp_path: Path) -> None:
    files = {"ends": ENDS, **{name: FILES[name] for name in ("quick", "others")}}
    (done,) = run(tmp_path, files, ("--forks", "2"))
    assert done.code == pytest.ExitCode.TESTS_FAILED, done.out + done.err
    found = {(word, name) for word, name in re.findall(r"^(PASSED|FAILED) \S+::(\w+)", done.out, re.MULTILINE)}
    passed = {("PASSED", name) for name in ("test_before", "test_nothing", "test_others")}
    assert found == passed | {("FAILED", "test_ends_its_process"), ("FAILED", "test_behind")}
    assert re.search(r"ended with 7 behind the beginning of test_ends\.py::test_ends_its_process", done.out)


@pytest.mark.slow
def test_the_first_failure_may_end_all_copies(tmp_path: Path) -> None:
    files = {"fails": "def test_fails(): assert False", "waits": "import time\ndef test_waits(): time.sleep(60)"}
    (done,) = run(tmp_path, files, ("--forks", "2", "--exitfirst"))
    assert done.code == pytest.ExitCode.TESTS_FAILED, done.out + done.err
    assert "stopping after 1 failures" in done.out


@pytest.mark.slow
def test_threads_of_collecting_are_refused(tmp_path: Path) -> None:
    source = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\ndef test_x(): pass"
    )
    (done,) = run(tmp_path, {"threads": source}, ("--forks", "2"))
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert "has begun threads" in done.err
