"""Every key of a config says whom it concerns, and two configs differ in what was changed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from configs.changes import BEYOND, DONE, RULES, Change, Concern, _concerns_of, changes, values_of, with_live_values
from configs.cluster import ClusterConfig

MODELS = [{"id": "m", "path": "/m"}, {"id": "n", "path": "/n"}]


def config(**more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"models": MODELS} | more)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield all keys: those of sections, and sections themselves where they lie in another."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if is_section(field.annotation):
            yield from keys_of(field.annotation, f"{key}.")  # type: ignore[arg-type]
        else:
            yield key


def test_every_key_of_every_section_is_classified_by_a_rule_of_its_own() -> None:
    direct = {".".join(key.split(".")[:2]) for key in keys_of(ClusterConfig)}
    assert direct - RULES.keys() == set(), "say in configs/changes.py whom a new key concerns"
    known = direct | set(keys_of(ClusterConfig))
    assert RULES.keys() - known == set(), "rules of keys that are gone"
    assert DONE.keys() == set(Concern)


def test_a_longer_rule_goes_before_a_shorter_one_and_without_one_there_is_an_error() -> None:
    assert _concerns_of("text_encoder.batching.max_queue_delay_us") == (Concern.LIMITS,)
    assert Concern.LIMITS not in _concerns_of("text_encoder.batching.max_batch_size")
    with pytest.raises(KeyError, match=r"worker\.new"):
        _concerns_of("worker.new")


@pytest.mark.parametrize(
    ("change", "key", "concerns"),
    [
        ({"admission": {"max_waiting": 5}}, "admission.max_waiting", {Concern.LIMITS}),
        ({"controller": {"policy": "throughput-first"}}, "controller.policy", {Concern.LIMITS}),
        ({"controller": {"models": {"m": "batch"}}}, "controller.models.m", {Concern.LIMITS}),
        ({"controller": {"scaling": {"max_workers": 2}}}, "controller.scaling", {Concern.LIMITS, Concern.NUMBER}),
        ({"controller": {"enabled": False}}, "controller.enabled", {Concern.CONTROL_PLANE}),
        ({"worker": {"num_replicas": 3}}, "worker.num_replicas", {Concern.NUMBER}),
        ({"worker": {"kv_cache_bytes": "64 MiB"}}, "worker.kv_cache_bytes", {Concern.WORKER}),
        ({"worker": {"max_num_seqs": 3}}, "worker.max_num_seqs", {Concern.WORKER, Concern.INGRESS}),
        ({"ingress": {"limits": {"max_images": 3}}}, "ingress.limits.max_images", {Concern.INGRESS}),
        ({"grpc": {}}, "grpc", {Concern.INGRESS}),
        ({"store": {"verify": False}}, "store.verify", {Concern.CONTROL_PLANE}),
        ({"store": {"path": "/elsewhere"}}, "store.path", {Concern.IDENTITY}),
        ({"http": {"port": 8123}}, "http.port", {Concern.RAY}),
        ({"simulated": {"host_ops": ["aten::add"]}}, "simulated.host_ops", {Concern.TEXT_ENCODER, Concern.WORKER}),
    ],
)
def test_a_changed_value_is_found_with_whom_it_concerns(
    change: dict[str, Any], key: str, concerns: set[Concern]
) -> None:
    (found,) = changes(config(), config(**change))
    assert (found.key, set(found.concerns)) == (key, concerns)
    (back,) = changes(config(**change), config())
    assert (back.before, back.after) == (found.after, found.before)


def test_entries_are_compared_by_id_wherever_they_stand_and_field_by_field() -> None:
    after = [{"id": "new", "path": "/new"}, {"id": "n", "path": "/n", "description": "another"}]
    found = {change.key: (change.before, change.after) for change in changes(config(), config(models=after))}
    assert found.keys() == {"models.m", "models.new", "models.n.description"}
    assert found["models.m"][1] is None
    assert found["models.new"][1]["path"] == "/new"
    assert found["models.n.description"] == ("", "another")
    assert changes(config(), config(models=MODELS[::-1])) == []


def test_what_the_controller_goes_by_is_set_while_it_serves_and_each_entry_of_a_mapping_is_a_change() -> None:
    gold, silver = {"target_s": 2.0, "weight": 1.0}, {"target_s": 9.0, "weight": 1.0}
    before = {"tick_s": 0.25, "slo_classes": {"gold": gold, "plain": {}}, "scaling": {"max_workers": 2, "drain_s": 5}}
    after = {"tick_s": 0.5, "slo_classes": {"gold": silver, "fast": {}}, "scaling": {"max_workers": 3, "drain_s": 5}}
    found = changes(config(controller=before), config(controller=after))
    assert {change.key: (change.before, change.after) for change in found} == {
        "controller.tick_s": (0.25, 0.5),
        "controller.scaling.max_workers": (2, 3),
        "controller.slo_classes.gold.target_s": (2.0, 9.0),
        "controller.slo_classes.plain": ({"target_s": 60.0, "weight": 1.0}, None),
        "controller.slo_classes.fast": (None, {"target_s": 60.0, "weight": 1.0}),
    }
    concerns = {concern for change in found for concern in change.concerns}
    assert concerns <= {Concern.LIMITS, Concern.NUMBER}, "no replica is replaced, no control plane starts anew"


def test_equal_configs_differ_in_nothing_and_defaults_that_are_written_out_are_no_change() -> None:
    assert changes(config(), config(worker={"num_replicas": 1}, http={"port": 8000})) == []


def test_the_values_of_a_concern_change_with_its_keys_alone() -> None:
    def worker(**more: Any) -> dict[str, Any]:
        return values_of(config(**more), Concern.WORKER)

    assert worker() == worker(http={"web": False}, admission={"max_waiting": 3}, models=MODELS[:1])
    assert worker() == worker(worker={"num_replicas": 3})
    assert worker() != worker(worker={"max_num_seqs": 3})
    pipeline = {
        "id": "p",
        "inputs": {"x": "text"},
        "stages": [{"name": "m", "model": "m", "inputs": {"message": "$x"}}],
    }
    with_one = config(pipelines=[{**pipeline, "outputs": {"y": "$m"}}])
    assert values_of(with_one, Concern.INGRESS) != values_of(config(), Concern.INGRESS)
    assert values_of(with_one, Concern.WORKER) == worker()


def test_what_no_running_cluster_takes_is_known_by_its_concern() -> None:
    beyond: list[Change] = [one for one in changes(config(), config(name="other")) if BEYOND & {*one.concerns}]
    assert [one.key for one in beyond] == ["name"]


def test_what_is_taken_live_is_all_that_needs_no_other_replica() -> None:
    before = config(text_encoder={"cache_bytes": "3 MiB"})
    after = config(
        models=[*MODELS, {"id": "new", "path": "/new"}],
        admission={"max_waiting": 5},
        controller={"tick_s": 0.5, "scaling": {"max_workers": 2}},
        text_encoder={"cache_bytes": "9 MiB", "batching": {"max_queue_delay_us": 7}},
        worker={"num_replicas": 2},
    )
    live = with_live_values(before, after)
    kept = {"text_encoder.cache_bytes", "worker.num_replicas", "controller.scaling"}
    assert {change.key for change in changes(live, after)} == kept
    assert {change.key for change in changes(before, after)} - kept == {change.key for change in changes(before, live)}
    assert live.text_encoder.cache_bytes == 3 * 2**20
