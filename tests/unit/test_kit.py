"""The kit that tests share: draws that are repeated, waits that end."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from _pytest.logging import catching_logs
from kit import seeding, unsynced
from kit.nested import Run, plugins, run_pytest
from kit.waiting import until, wait_until

from infra.ports import free_port

TESTS = Path(__file__).parents[1]
DRAWING = """
import random
import numpy as np
import pytest
import torch
from kit.seeding import seeded_random, seeded_rng

def draws():
    return [random.random(), float(np.random.rand()), float(torch.rand(())), seeded_random().random(),
            float(seeded_rng().random())]

OF_MODULE = draws()

@pytest.fixture(scope="module")
def wide():
    return draws()

def test_first(wide):
    print("first", OF_MODULE, wide, draws())

def test_second(wide):
    print("second", OF_MODULE, wide, draws())
    assert False
"""

# As the library, whose import takes two seconds: it draws by a generator of its own, which starts anywhere.
TORCH = """
import random

class Generator(random.Random):
    manual_seed, get_state, set_state = random.Random.seed, random.Random.getstate, random.Random.setstate

default_generator = Generator()

def rand(shape):
    return default_generator.random()
"""


def drawn(printed: str) -> dict[str, str]:
    """Return the draws of each test."""
    return dict(re.findall(r"(first|second) (\[.*\])", printed))


@pytest.mark.slow
def test_a_seed_gives_a_test_the_same_draws_alone_as_among_others(tmp_path: Path) -> None:
    (tmp_path / "test_drawing.py").write_text(DRAWING)
    (tmp_path / "torch.py").write_text(TORCH)
    words, environment = [*plugins("seeding"), "-s", "test_drawing.py"], {seeding.VARIABLE: "7"}
    runs = [Run([*words, *options], environment) for options in ([], ["-k", "second"])]
    printed, alone = (done.out for done in run_pytest(tmp_path, *runs))
    assert "ATELIER_TEST_SEED=7 draws the same again" in printed
    both = drawn(printed)
    numbers = re.findall(r"0\.\d+", both["first"] + both["second"])
    assert len(set(numbers)) == 20, "the module's and the fixture's once, five of each test"
    assert drawn(alone) == {"second": both["second"]}


@pytest.mark.slow
def test_a_seed_gives_hypothesis_the_same_examples_where_ci_is_set_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_examples.py").write_text(
        "from hypothesis import given, settings, strategies\n\n"
        "@settings(max_examples=20)\n@given(strategies.integers())\n"
        "def test_integers(number):\n    print(number)\n"
    )

    words = ["-p", "_hypothesis_pytestplugin", *plugins("seeding"), "-s", "--quiet", "test_examples.py"]
    environments: list[dict[str, str]] = [{seeding.VARIABLE: seed} for seed in ("7", "7", "8")]
    environments[1]["CI"] = "true"
    monkeypatch.delenv("CI", raising=False)
    done = run_pytest(tmp_path, *(Run(words, one) for one in environments), libraries=["hypothesis"])
    first, in_ci, other = (re.findall(r"^-?\d+$", one.out, re.MULTILINE) for one in done)
    assert len(first) == 20
    assert in_ci == first != other


def test_another_seed_gives_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for seed, name in (("7", "a"), ("8", "a"), ("7", "b"), ("7", "a")):
        monkeypatch.setattr(seeding, "SEED", seed)
        with seeding._seeded_apart(name):
            found.add((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert [len(set(draws)) for draws in zip(*found, strict=True)] == [3, 3, 3]


def test_the_python_files_are_the_seed(tmp_path: Path) -> None:
    (tmp_path / "tests/kit").mkdir(parents=True)
    seeds = [seeding.default_seed(tmp_path)]
    for name, text in (("a.py", "one"), ("a.py", "two"), ("b.py", ""), ("kit/b.py", "")):
        (tmp_path / "tests" / name).write_text(text)
        seeds.append(seeding.default_seed(tmp_path))
    assert len(set(seeds)) == 5
    (tmp_path / "tests/a.txt").write_text("no code")
    assert seeding.default_seed(tmp_path) == seeds[-1]


def test_a_wait_ends_with_the_value_or_says_what_did_not_come() -> None:
    values = iter([0, 0, 3])
    assert wait_until(lambda: next(values)) == 3
    with pytest.raises(TimeoutError, match=r"an answer was not true within 0\.02 s .*test_kit\.py"):
        wait_until(lambda: False, "an answer", timeout_s=0.02)


async def test_tasks_go_on_while_one_awaits_a_condition() -> None:
    begun = asyncio.Event()

    async def found() -> str:
        return "it" if begun.is_set() else ""

    asyncio.get_running_loop().call_later(0.01, begun.set)
    assert await until(found) == "it"
    with pytest.raises(TimeoutError, match="within 0 s"):
        await until(lambda: None, timeout_s=0)


@pytest.fixture
def silent_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("silent in this test")
    logger.propagate = False
    yield logger
    logger.propagate = True


def test_logs_that_are_not_passed_on_are_captured_too(
    silent_logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    silent_logger.warning("told here alone")
    logging.getLogger("another").warning("told to all")
    assert [record.getMessage() for record in caplog.records] == ["told here alone", "told to all"]
    with catching_logs(logging.NullHandler(), logging.DEBUG) as handler:
        assert handler in silent_logger.handlers
        assert logging.root.level == logging.DEBUG
    assert handler not in [*silent_logger.handlers, *logging.root.handlers]
    assert logging.root.level != logging.DEBUG


def test_clients_share_the_usual_certificates_and_no_others() -> None:
    assert httpx.create_ssl_context() is httpx.create_ssl_context()
    assert ssl.create_default_context() is not ssl.create_default_context()
    none, usual = httpx.create_ssl_context(verify=False), httpx.create_ssl_context()
    assert (none.verify_mode, usual.verify_mode) == (ssl.CERT_NONE, ssl.CERT_REQUIRED)


@pytest.mark.parametrize(("more_bytes", "expected"), [(0, True), (-1, False)])
def test_folders_are_kept_in_memory_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more_bytes: int, expected: bool
) -> None:
    monkeypatch.setattr(unsynced, "_MEMORY", tmp_path)
    free_bytes = unsynced._ROOM_BYTES + more_bytes
    monkeypatch.setattr(shutil, "disk_usage", {tmp_path: SimpleNamespace(free=free_bytes)}.__getitem__)
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", "")  # so that it is as before behind this test
    monkeypatch.delenv("PYTEST_DEBUG_TEMPROOT")
    unsynced.keep_folders_in_memory()
    assert os.environ.get("PYTEST_DEBUG_TEMPROOT") == (str(tmp_path) if expected else None)


def test_a_port_is_of_one_process_alone_while_it_lives() -> None:
    """Also while nobody listens there, as between the choice and the start of a server."""
    code = "from infra.ports import free_port; print(*[free_port() for _ in range(500)], flush=True); input()"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TESTS)
        for _ in range(2)
    ]
    given = [free_port(), *range(first := free_port(in_a_row=8), first + 8)]
    try:
        for process in processes:
            assert process.stdout is not None
            given += map(int, process.stdout.readline().split())
    finally:
        for process in processes:
            process.communicate(b"\n")
    assert len(given) == len({*given}) == 1_009
