"""Tensors on a device already are not loaded again, as long as somebody uses them."""

from __future__ import annotations

import threading

import pytest
import torch

from weights.loading.loader import LoadedFiles


def memory(nbytes: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def refuse() -> torch.Tensor:
    raise AssertionError("loaded again")


def test_a_file_is_loaded_once_per_device() -> None:
    files, loaded = LoadedFiles(), memory()
    first = files.get("cpu", "a", lambda: loaded)
    again = files.get("cpu", "a", refuse)
    assert again.data_ptr() == first.data_ptr() == loaded.data_ptr()
    assert torch.equal(again, loaded)
    other = files.get("cuda:0", "a", memory)
    assert other.data_ptr() != first.data_ptr()
    assert files.num_loads == {("cpu", "a"): 1, ("cuda:0", "a"): 1}


def test_a_part_of_a_storage_is_found_again_as_that_part() -> None:
    files, whole = LoadedFiles(), memory()
    files.get("cpu", "a", lambda: whole[10:30])
    assert torch.equal(files.get("cpu", "a", refuse), whole[10:30])


@pytest.mark.parametrize(
    "use",
    [
        lambda base: base,
        lambda base: base[8:16],
        lambda base: base[8:16].view(torch.float32),
        lambda base: torch.nn.Parameter(base[8:16].view(torch.float32), requires_grad=False),
    ],
)
def test_an_entry_lives_as_long_as_what_uses_its_memory(use) -> None:
    files = LoadedFiles()
    used = use(files.get("cpu", "a", memory))
    assert ("cpu", "a") in files
    files.get("cpu", "a", refuse)
    del used
    assert ("cpu", "a") not in files
    files.get("cpu", "a", memory)
    assert files.num_loads["cpu", "a"] == 2


def test_a_dropped_entry_is_loaded_again_and_its_users_keep_their_memory() -> None:
    files, loaded = LoadedFiles(), memory()
    before = files.get("cpu", "a", lambda: loaded)
    files.drop("cpu", "a")
    files.drop("cpu", "never")
    after = files.get("cpu", "a", memory)
    assert before.data_ptr() != after.data_ptr()
    assert torch.equal(before, loaded)


def test_only_what_is_missing_is_loaded() -> None:
    files, held = LoadedFiles(), memory()
    files.get("cpu", "b", lambda: held)
    asked: list[str] = []

    def load(locations: list[str]) -> dict[str, torch.Tensor]:
        asked.extend(locations)
        return {location: memory() for location in locations}

    assert set(files.get_all("cpu", ["a", "b", "c"], load)) == {"a", "b", "c"}
    assert asked == ["a", "c"]


def test_of_many_threads_one_loads() -> None:
    files, results = LoadedFiles(), []
    inside, go_on = threading.Event(), threading.Event()

    def load() -> torch.Tensor:
        inside.set()
        go_on.wait(10)
        return memory()

    threads = [threading.Thread(target=lambda: results.append(files.get("cpu", "a", load))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len({tensor.data_ptr() for tensor in results}) == 1
    assert len(results) == 8
    assert files.num_loads["cpu", "a"] == 1


def test_who_waits_for_one_file_loads_the_others_meanwhile() -> None:
    files, has_claimed, other_is_loaded = LoadedFiles(), threading.Event(), threading.Event()
    results: list[dict[str, torch.Tensor]] = []

    def slow(locations: list[str]) -> dict[str, torch.Tensor]:
        has_claimed.set()
        assert other_is_loaded.wait(10)
        return {location: memory() for location in locations}

    def quick(locations: list[str]) -> dict[str, torch.Tensor]:
        assert locations == ["z"]
        other_is_loaded.set()
        return {"z": memory()}

    first = threading.Thread(target=lambda: results.append(files.get_all("cpu", ["x", "y"], slow)))
    second = threading.Thread(target=lambda: results.append(files.get_all("cpu", ["y", "z"], quick)))
    first.start()
    assert has_claimed.wait(10)
    second.start()
    first.join(10)
    second.join(10)
    by_first, by_second = sorted(results, key=lambda found: "z" in found)
    assert by_first["y"].data_ptr() == by_second["y"].data_ptr()


def test_a_failed_load_is_its_callers_and_the_next_one_tries_again() -> None:
    files, inside, go_on = LoadedFiles(), threading.Event(), threading.Event()
    errors: list[Exception] = []

    def fail() -> torch.Tensor:
        inside.set()
        go_on.wait(10)
        raise OSError("disk")

    def first() -> None:
        try:
            files.get("cpu", "a", fail)
        except OSError as error:
            errors.append(error)

    failing = threading.Thread(target=first)
    failing.start()
    assert inside.wait(10)
    loaded: list[torch.Tensor] = []
    waiting = threading.Thread(target=lambda: loaded.append(files.get("cpu", "a", memory)))
    waiting.start()
    go_on.set()
    failing.join(10)
    waiting.join(10)
    assert [str(error) for error in errors] == ["disk"]
    assert len(loaded) == 1
