"""Orders by hand: what each changes, what is refused, and what a file keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.records.errors import NotKept, OverrideRefused
from cluster.records.overrides import OverrideChange, Overrides, changed
from cluster.registry.registrations import overrides_file

WORKERS = ("w-one", "w-two", "x-three")


def after(*changes: OverrideChange, overrides: Overrides | None = None) -> Overrides:
    overrides = overrides or Overrides()
    for change in changes:
        overrides = changed(overrides, change, WORKERS, {"a", "b"})
    return overrides


def freeze(worker: str = "", is_on: bool = True) -> OverrideChange:
    return OverrideChange("freeze", is_on, worker)


def pin(worker: str, model: str, is_on: bool = True) -> OverrideChange:
    return OverrideChange("pin", is_on, worker, model)


def test_each_change_does_one_thing_and_its_end_undoes_it() -> None:
    for change in (freeze(), freeze("w-one"), OverrideChange("drain", True, "x"), pin("w-two", "a")):
        begun = after(change)
        assert begun != Overrides()
        assert after(change, change) == begun
        end = OverrideChange(change.kind, False, change.worker, change.model)
        assert after(change, end) == after(end) == Overrides()


def test_pins_add_up_by_worker() -> None:
    found = after(pin("w-one", "a"), pin("w-one", "b"), pin("x", "a"), pin("w-one", "a", False))
    assert found.pins == {"w-one": {"b"}, "x-three": {"a"}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (freeze("nobody"), "no worker 'nobody' .workers: w-one, w-two, x-three"),
        (freeze("w"), "2 workers begin with 'w'"),
        (OverrideChange("drain", True), "no worker ''"),
        (pin("x", "ghost"), "no worker serves 'ghost' .models: a, b"),
    ],
)
def test_what_nobody_knows_is_refused_with_the_known_names(change: OverrideChange, problem: str) -> None:
    with pytest.raises(OverrideRefused, match=problem):
        after(change)


def test_what_was_ordered_for_a_worker_that_is_gone_can_be_ended() -> None:
    old = Overrides(frozen=frozenset({"gone"}), pins={"gone-too": frozenset({"a"})})
    assert after(freeze("gone", False), pin("gone-too", "a", False), overrides=old) == Overrides()
    with pytest.raises(OverrideRefused, match="no worker 'gone'"):
        after(freeze("gone"), overrides=old)


def test_a_file_keeps_them_and_a_damaged_one_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = overrides_file(tmp_path, "one")
    assert file.read() is None
    wanted = after(freeze(), freeze("x"), pin("w-one", "a"), OverrideChange("drain", True, "w-two"))
    file.save(wanted)
    assert file.read() == wanted
    assert [found.name for found in (tmp_path / "overrides").iterdir()] == ["one.json"]
    (tmp_path / "overrides" / "one.json").write_text('{"frozen": 7}')
    assert file.read() is None
    assert "one.json" in caplog.text


def test_a_disk_that_does_not_take_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "overrides").write_text("")
    with pytest.raises(NotKept, match="cannot be written"):
        overrides_file(tmp_path, "one").save(Overrides())
