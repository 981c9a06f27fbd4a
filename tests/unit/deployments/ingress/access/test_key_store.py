"""Keys and the store of their hashes: which lines hold, what is said of the others, and how long a look takes."""

from __future__ import annotations

import hashlib
import json
import re
import string
import timeit
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.access.keys import KeyEntry, KeyStore, hash_of, new_key

NAMES = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=8).map(lambda text: f"k{text}")


def line(name: str, key: str, **fields: Any) -> bytes:
    return json.dumps({"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} | fields).encode()


def test_keys_are_long_random_and_safe_in_a_header() -> None:
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    for key in keys:
        assert key.startswith("atl_")
        assert len(key) == 4 + 43  # 256 bits, six a letter
        assert set(key) <= set(string.ascii_letters + string.digits + "_-")


@settings(deadline=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 9), st.booleans()), max_size=12))
def test_each_right_line_holds_and_each_other_one_is_a_problem_with_its_number(
    rows: list[tuple[str, int, bool]],
) -> None:
    """The reference takes the lines one by one: the first with a name and a key holds, unless it is broken."""
    names, expected, wrong, lines = set(), {}, [], []
    for number, (name, key, broken) in enumerate(rows, start=1):
        text = line(name, str(key))
        lines.append(text[:-1] if broken else text)
        if broken or name in names or str(key) in expected:
            wrong.append(number)
        else:
            names.add(name)
            expected[str(key)] = name
    store = KeyStore.parse(b"\n".join(lines))
    assert [problem.line for problem in store.problems] == wrong
    for key in map(str, range(10)):
        found = store.find(key)
        assert (found.name if found else None) == expected.get(key)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (b"atl_not-json", "JSON"),
        (b"[]", "object"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"name": "b"}', "required"),
        (b'{"name": "b", "sha256": "' + b"0" * 63 + b'"}', "pattern"),
        (b'{"name": "b", "sha256": "' + b"A" * 64 + b'"}', "pattern"),
        (line("", "b"), "pattern"),
        (line("two words", "b"), "pattern"),
        (line("b", "b", admin="yes"), "boolean"),
        (line("b", "b", admin=1), "boolean"),
        (line("b", "b", requests_per_s=0), "greater than 0"),
        (line("b", "b", requests_per_s=float("nan")), "finite|JSON"),
        (line("b", "b", requests_per_s=float("inf")), "finite|JSON"),
        (line("b", "b", max_concurrent=0), "greater than or equal to 1"),
        (line("b", "b", max_concurrent=1.5), "integer"),
        (line("b", "b", tenant="a\nb"), "pattern"),
        (line("b", "b", secret="s3cret"), "Extra"),
        (line("a", "b"), "'a' is on line 2 already"),
        (line("b", "a"), "same key as 'a'"),
    ],
)
def test_a_broken_line_is_named_and_the_others_hold(broken: bytes, words: str) -> None:
    store = KeyStore.parse(b"# a comment\n" + line("a", "a") + b"\r\n\n" + broken + b"\n  \n" + line("c", "c"))
    (problem,) = store.problems
    assert problem.line == 4
    assert re.search(words, problem.text), problem.text
    assert "not-json" not in problem.text  # who put a key there has enough trouble
    assert "s3cret" not in problem.text
    assert [entry.name for entry in store.entries.values()] == ["a", "c"]
    assert store.find("a") is not None
    assert store.find("b") is None


def test_what_a_line_may_say() -> None:
    text = line("a", "x", admin=True, tenant="team@x", requests_per_s=2, max_concurrent=3, created="today")
    entry = KeyStore.parse(text).find("x")
    assert entry == KeyEntry(
        name="a",
        sha256=hash_of("x"),
        admin=True,
        tenant="team@x",
        requests_per_s=2.0,
        max_concurrent=3,
        created="today",
    )
    assert entry.share == "team@x"
    plain = KeyStore.parse(line("b", "y")).find("y")
    assert plain is not None
    assert (plain.share, plain.admin) == ("b", False)


@pytest.mark.parametrize("key", ["", "\ud800", "x" * 10**6, "atl_", "\x00", hash_of("x")])
def test_what_is_no_key_is_not_found(key: str) -> None:
    assert KeyStore.parse(line("a", "x")).find(key) is None


def test_a_look_takes_no_longer_for_a_near_miss_a_late_line_or_a_large_book() -> None:
    """Ratios of the best of many interleaved tries: a comparison letter by letter, or line by line, shows."""
    keys = [new_key() for _ in range(5000)]
    store = KeyStore.parse(b"\n".join(line(f"k{number}", key) for number, key in enumerate(keys)))
    small = KeyStore.parse(line("a", keys[0]))
    near = keys[0][:-1] + ("A" if keys[0][-1] != "A" else "B")
    looks = {
        "first": lambda: store.find(keys[0]),
        "last": lambda: store.find(keys[-1]),
        "near": lambda: store.find(near),
        "far": lambda: store.find("B" + keys[0][1:]),
        "revoked": lambda: small.find(keys[1]),
    }
    best = dict.fromkeys(looks, float("inf"))
    for _ in range(300):
        for name, look in looks.items():
            best[name] = min(best[name], timeit.timeit(look, number=20))
    assert max(best.values()) < 3 * min(best.values()), best
