"""The directory tells each watcher exactly what it has not heard yet."""

from __future__ import annotations

import random
from collections.abc import Iterable

from kit.drawing import seeds
from unit.counting import operations

from cluster.registry.directory import MAX_REMEMBERED_REMOVALS, Directory, DirectoryChange, ModelRecord
from configs.model import AdapterConfig, ModelConfig


def ready(id_: str, fingerprint: str = "one") -> ModelRecord:
    return ModelRecord(id_, "ready", "llm", 10, fingerprint, entry=ModelConfig(id=id_, path="/m"))


def directory(ids: Iterable[str], epoch: str = "first") -> Directory:
    made = Directory(epoch)
    for id_ in ids:
        made.apply(ready(id_))
    return made


def heard(copy: Directory, source: Directory) -> DirectoryChange:
    change = source.changes_since(copy.revision, copy.epoch)
    copy.absorb(change)
    return change


def by_id(found: Directory) -> dict[str, ModelRecord]:
    return {record.id: record for record in found}


def test_a_newcomer_is_told_everything_in_order() -> None:
    source, copy = directory("cab"), Directory("")
    source.apply(ready("c", "two"))
    assert heard(copy, source).full
    assert [record.id for record in copy] == ["c", "a", "b"]
    assert not heard(copy, source)


def test_later_changes_alone_are_sent() -> None:
    source, copy = directory("abc"), Directory("")
    heard(copy, source)
    source.apply(ready("b", "two"))
    source.apply(ready("b", "three"))
    source.remove("c")
    source.apply(ready("d"))
    change = heard(copy, source)
    assert [record.id for record in change.changed] == ["b", "d"]
    assert (change.removed, change.full) == (("c",), False)
    assert by_id(copy) == by_id(source)


def test_a_model_that_was_removed_and_registered_again_is_there() -> None:
    source, copy = directory("ab"), Directory("")
    heard(copy, source)
    source.remove("a")
    source.apply(ready("a", "two"))
    change = heard(copy, source)
    assert ([record.id for record in change.changed], change.removed) == (["a"], ())
    assert copy.get("a") == source.get("a")


def test_another_life_of_the_registry_is_taken_anew() -> None:
    copy = Directory("")
    heard(copy, directory("abc"))
    restarted = directory("bd", epoch="second")
    assert heard(copy, restarted).full
    assert by_id(copy) == by_id(restarted)
    assert "a" not in copy


def test_a_revision_from_the_future_is_not_believed() -> None:
    assert directory("a").changes_since(99, "first").full


def test_a_known_version_serves_while_a_restarted_registry_looks_at_it() -> None:
    copy = Directory("")
    heard(copy, directory("ab"))
    restarted = Directory("second")
    for id_ in "abn":
        restarted.apply(ModelRecord(id_, "registering", entry=ModelConfig(id=id_, path="/m")))
    heard(copy, restarted)
    known = copy.get("a")
    assert known
    assert (known.state, known.kind, known.fingerprint) == ("updating", "llm", "one")
    unknown = copy.get("n")
    assert unknown
    assert (unknown.state, unknown.serves) == ("registering", False)
    restarted.apply(ready("a", "two"))
    heard(copy, restarted)
    assert copy.get("a") == restarted.get("a")


def test_a_watcher_that_missed_too_many_removals_is_sent_everything() -> None:
    source, copy = directory(["stays"]), Directory("")
    heard(copy, source)
    for number in range(MAX_REMEMBERED_REMOVALS + 1):
        source.apply(ready(f"m{number}"))
        source.remove(f"m{number}")
    assert heard(copy, source).full
    assert by_id(copy) == by_id(source)


@seeds(50)
def test_watchers_that_listen_now_and_then_end_with_the_same_records(seed: int) -> None:
    chance = random.Random(seed)
    source, copies = Directory("first"), [Directory("") for _ in range(3)]
    for _ in range(200):
        id_ = chance.choice("abcdefgh")
        if id_ in source and chance.random() < 0.4:
            source.remove(id_)
        else:
            source.apply(ready(id_, str(chance.random())))
        if chance.random() < 0.3:
            heard(chance.choice(copies), source)
    for copy in copies:
        heard(copy, source)
        assert by_id(copy) == by_id(source)


def test_a_record_has_the_defaults_and_base_of_its_entry() -> None:
    model = ModelConfig.model_validate({"id": "m", "path": "/m", "description": "adds", "defaults": {"max_tokens": 3}})
    record = ModelRecord("m", "registering", entry=model)
    assert (record.description, record.defaults.max_tokens, record.base) == ("adds", 3, ())
    adapter = ModelRecord("l", "registering", entry=AdapterConfig(id="l", path="/l", base=("m",)))
    assert (adapter.description, adapter.defaults.max_tokens, adapter.base) == ("", None, ("m",))
    assert ModelRecord("d", "unavailable", error="damaged").base == ()


def test_with_ten_thousand_models_a_watcher_is_sent_only_changes() -> None:
    def costs(num_models: int) -> int:
        """Count the operations of a hundred changes that a watcher hears of."""
        source, copy = directory(f"m{number}" for number in range(num_models)), Directory("")
        heard(copy, source)

        def change() -> None:
            for number in range(100):
                source.apply(ready(f"m{number}", "two"))
                assert len(heard(copy, source).changed) == 1
                assert copy.get(f"m{number}") == source.get(f"m{number}")

        return operations(change)

    assert costs(10_000) < 1.1 * costs(200)
