"""Tests that copies of one process run: `--forks`, in a run of pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PLUGINS = [word for name in ("seeding", "times", "forks") for word in ("-p", f"kit.{name}")]
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
        def test_waits(): time.sleep(1.0)
        def test_waits_again(): time.sleep(1.0)
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


def run(folder: Path, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    for name, source in files.items():
        (folder / f"test_{name}.py").write_text(re.sub(r"^ {4,8}", "", source, flags=re.MULTILINE))
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, "-p", "no:cacheprovider", "-rA", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall(r"^(?:PASSED|FAILED|ERROR|SKIPPED) .*", done.stdout, re.MULTILINE))


def draws(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall(r"^drew .*", done.stdout, re.MULTILINE))


@pytest.mark.slow
def test_copies_tell_what_one_process_tells(tmp_path: Path) -> None:
    alone = run(tmp_path, FILES, "--times", "alone.tsv")
    told = run(tmp_path, FILES, "--times", "copies.tsv", "--forks", "3")
    assert alone.returncode == told.returncode == pytest.ExitCode.TESTS_FAILED, told.stdout + told.stderr
    assert outcomes(alone) == outcomes(told)
    assert len(outcomes(told)) == 12
    assert draws(alone) == draws(told)
    assert len(draws(told)) == 3
    assert "of sums" in told.stdout
    assert told.stdout.count(" passed") == 1, "one of them writes"
    timed = [
        {line.split("\t")[2] for line in (tmp_path / f"{name}.tsv").read_text().splitlines()}
        for name in ("alone", "copies")
    ]
    assert timed[0] == timed[1]
    assert len(timed[0]) == 11


@pytest.mark.slow
def test_a_copy_that_ends_fails_the_tests_that_it_had_left(tmp_path: Path) -> None:
    done = run(tmp_path, {"ends": ENDS, **{name: FILES[name] for name in ("quick", "others")}}, "--forks", "2")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    found = {(word, name) for word, name in re.findall(r"^(PASSED|FAILED) \S+::(\w+)", done.stdout, re.MULTILINE)}
    passed = {("PASSED", name) for name in ("test_before", "test_nothing", "test_others")}
    assert found == passed | {("FAILED", "test_ends_its_process"), ("FAILED", "test_behind")}
    assert re.search(r"ended with 7 behind the beginning of test_ends\.py::test_ends_its_process", done.stdout)


@pytest.mark.slow
def test_the_first_failure_may_end_all_copies(tmp_path: Path) -> None:
    files = {"fails": "def test_fails(): assert False", "waits": "import time\ndef test_waits(): time.sleep(60)"}
    done = run(tmp_path, files, "--forks", "2", "--exitfirst")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "stopping after 1 failures" in done.stdout


@pytest.mark.slow
def test_threads_of_collecting_are_refused(tmp_path: Path) -> None:
    source = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\ndef test_x(): pass"
    )
    done = run(tmp_path, {"threads": source}, "--forks", "2")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "has begun threads" in done.stderr
