"""Cases that are drawn for `make test`, shares and times of tests, in a run of pytest of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit import seeding
from kit.nested import Run, plugins, run_pytest
from kit.seeding import seeded_rng
from kit.shares import parse_share, shares_of

SOURCE = """
import time
import pytest
from kit.drawing import seeds

@pytest.mark.drawn(3)
@pytest.mark.parametrize("number", range(20))
def test_three(number): pass

@pytest.mark.drawn(by="kind")
@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["a", "b"])
def test_one_of_a_kind(kind, number): pass

@pytest.mark.parametrize("rule", [object(), object()], ids="xy")
@seeds(50)
def test_property(seed, rule): pass

def test_plain(): time.sleep(0.3)

def test_busy():
    while time.process_time() - BEGUN < 0.2: pass

BEGUN = time.process_time()
"""
WAYS = """
import pytest
pytestmark = pytest.mark.drawn(2, of="file")

@pytest.mark.parametrize("number", range(2))
def test_way(number): pass

def test_way_of_its_own(): pass

@pytest.mark.drawn
@pytest.mark.parametrize("number", range(4))
def test_table(number): pass
"""
TABLES = {"test_three": 20, "test_one_of_a_kind": 6, "test_property": 100, "test_plain": 1, "test_busy": 1}
TABLES |= {"test_way": 2, "test_way_of_its_own": 1, "test_table": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawing")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    long: left for later\n    ray: a cluster\n")
    (folder / "test_drawn.py").write_text(SOURCE)
    (folder / "test_ways.py").write_text(WAYS)
    return folder


def run(folder: Path, *runs: tuple[int, tuple[str, ...]]) -> list[list[str]]:
    """Return the names of the tests that runs have chosen, each of a seed and of options."""
    files = sorted(file.name for file in folder.glob("test_*.py"))
    words = [*plugins("seeding", "drawing", "times", "shares"), "--verbose", *files]
    done = run_pytest(folder, *(Run([*words, *options], {seeding.VARIABLE: str(seed)}) for seed, options in runs))
    assert all(one.code in (0, pytest.ExitCode.NO_TESTS_COLLECTED) for one in done), done
    return [re.findall(r"::(test_\S+) PASSED", one.out) for one in done]


@pytest.mark.slow
def test_few_cases_are_drawn_and_the_long_run_has_all_others(folder: Path) -> None:
    quick, long = run(folder, (7, ("-m", "not long", "--times", "times.tsv")), (7, ("-m", "long")))
    counts = {name: sum(test.partition("[")[0] == name for test in quick) for name in TABLES}
    assert counts.pop("test_way") + counts.pop("test_way_of_its_own") == 2, "of all tests of the file"
    assert counts.pop("test_table") == 1, "a table's own mark comes first"
    assert counts == {"test_three": 3, "test_one_of_a_kind": 2, "test_property": 2, "test_plain": 1, "test_busy": 1}
    assert {test[-4] for test in quick if "kind" in test} == {"a", "b"}
    assert {test[-2] for test in quick if "property" in test} == {"x", "y"}
    assert not {*quick} & {*long}
    assert len(quick) + len(long) == sum(TABLES.values())
    lines = [line.split("\t") for line in (folder / "times.tsv").read_text().splitlines()]
    assert {name.partition("::")[2] for *_, name in lines} == {*quick}
    assert lines[0][2].endswith("test_busy")
    plain = next(line for line in lines if line[2].endswith("test_plain"))
    assert float(plain[0]) < 0.2 < float(plain[1]), "a test that waits needs no processor"


@pytest.mark.slow
def test_a_seed_draws_the_same_cases_again_and_others_draw_others(folder: Path) -> None:
    options = ("-m", "not long", "-k", "three or property")
    drawn = run(folder, *((seed, options) for seed in (7, 7, 8)))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_shares_are_all_tests_once_and_a_drawn_one_is_one_of_them(folder: Path) -> None:
    (ray := folder / "ray").mkdir()
    (ray / "pytest.ini").write_text((folder / "pytest.ini").read_text())
    plain = "import pytest\n\n@pytest.mark.parametrize('number', range(20))\ndef test_plain(number): pass\n"
    clustered = plain.replace("test_plain", "test_ray").replace("@pytest", "@pytest.mark.ray\n@pytest", 1)
    (ray / "test_drawn.py").write_text(plain + clustered)
    *shares, drawn = map(set, run(ray, *((7, ("--share", share)) for share in ("1/3", "2/3", "3/3", "3"))))
    assert sum(map(len, shares)) == len(set.union(*shares)) == 40
    assert sorted(map(len, shares)) == [10, 10, 20], "each takes as long as another"
    assert sorted(sum("ray" in test for test in share) for share in shares) == [0, 0, 20], "they share a cluster"
    assert drawn in shares


def test_no_share_is_longer_than_another_by_more_than_one_test() -> None:
    rng = seeded_rng()
    seconds = {f"test_{number}": float(rng.exponential(10)) for number in range(int(rng.integers(1, 60)))}
    shares = shares_of(seconds, 8)
    assert shares.keys() == seconds.keys()
    taken = [sum(seconds[name] for name in seconds if shares[name] == number) for number in range(1, 9)]
    assert sum(taken) == pytest.approx(sum(seconds.values())), "shares are from 1 to 8"
    assert max(taken) - min(taken) <= max(seconds.values()) + 1e-9
    assert shares_of(dict(reversed(seconds.items())), 8) == shares, "their order says nothing"


def test_the_seed_draws_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in ("7", "7", *map(str, range(50))):
        monkeypatch.setattr(seeding, "SEED", seed)
        found.append(parse_share("3"))
    assert found[0] == found[1]
    assert set(found) == {(1, 3), (2, 3), (3, 3)}


@pytest.mark.parametrize("text", ["0", "9/8", "0/8", "x", "1/0", "1/2/3", "-1"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_share(text)
