"""Random draws that can be replayed: ATELIER_TEST_SEED, which a failure prints, seeds every generator of a test.

A pytest plugin. The global generators of `random`, numpy and, once it is loaded, torch are seeded for each test by its
name, for the import of each module, and for each fixture that is wider than a test, so that a test draws the same alone
as among others; hypothesis has the same seed. Without the variable the Python files are the seed: who runs a commit
again, on whatever machine, sees what the first run saw, and with each change a run draws anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from kit.wide_fixtures import around_wide_fixtures

VARIABLE = "ATELIER_TEST_SEED"
FOLDERS = ("cluster", "configs", "deployments", "infra", "tests", "weights")


def default_seed(checkout: Path) -> str:
    """Return a seed of all Python files of a checkout: what their authors have run is what others run."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (checkout / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(checkout)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return str(int(digest.hexdigest()[:8], 16))


# In the environment: the processes of pytest-xdist and of scenarios have to draw the same.
SEED = os.environ.setdefault(VARIABLE, default_seed(Path(__file__).parents[2]))


def seeded_random() -> random.Random:
    """Return a generator of its own, seeded by the test, fixture or module that asks."""
    return random.Random(random.getrandbits(64))


def seeded_rng() -> np.random.Generator:
    """Return a numpy generator of its own, seeded by the test, fixture or module that asks."""
    return np.random.default_rng(random.getrandbits(64))


def _seed_generators(name: str) -> None:
    """Seed the global generators, differently for each name."""
    digest = hashlib.sha256(f"{SEED} {name}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4]))
    if (torch := sys.modules.get("torch")) is not None:  # torch.manual_seed would warn on simulated devices
        torch.default_generator.manual_seed(int.from_bytes(digest[:7]))


@contextlib.contextmanager
def _seeded_apart(name: str) -> Iterator[None]:
    """Seed the global generators for a while; then they go on as if nothing had been drawn."""
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state(), torch and torch.default_generator.get_state()
    _seed_generators(name)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch:
            torch.default_generator.set_state(before[2])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "hypothesis_seed", "no plugin") is None:
        config.option.hypothesis_seed = SEED
        _draw_by_the_seed_alone()


def _draw_by_the_seed_alone() -> None:
    """Have hypothesis draw the same everywhere: where CI is set it ignores seeds, and elsewhere it keeps a database."""
    from hypothesis import HealthCheck, settings

    slow = (HealthCheck.too_slow,)  # as the deadline: a matter of the machine
    settings.register_profile("seeded", deadline=None, database=None, derandomize=False, suppress_health_check=slow)
    settings.load_profile("seeded")


def pytest_report_header() -> str:
    return f"random draws: {VARIABLE}={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    if isinstance(collector, pytest.Module) and "torch" in collector.path.read_text():
        import torch  # noqa: F401  # seeds itself by the machine's entropy when it is loaded
    with _seeded_apart(collector.nodeid):
        return (yield)


pytest_fixture_setup = around_wide_fixtures(
    lambda fixture, request: _seeded_apart(
        f"{request.node.nodeid} {fixture.argname} {getattr(request, 'param_index', '')}"
    )
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed_generators(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("random draws", f"{VARIABLE}={SEED} draws the same again"))
    return report
