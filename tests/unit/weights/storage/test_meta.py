"""meta.json: derived from the manifests, compact, the same after a round trip."""

from __future__ import annotations

import hashlib
import json
import random

import pytest
from pydantic import ValidationError

from weights.records.manifest import Component, ExtentRef, Layout, Manifest, TensorRef, extent_id
from weights.storage.index import StoreMeta, meta_of


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def extent(*names: str, pack: str = "p") -> ExtentRef:
    id_ = extent_id(sha(name) for name in names)
    return ExtentRef(id=id_, pack=pack, offset=4096, nbytes=512 * len(names), checksum="0" * 32)


def manifest(model: str, layout: Layout, *extents: tuple[str, ...]) -> Manifest:
    refs = [extent(*names, pack=model) for names in extents]
    tensors = {
        name: TensorRef(extent=ref.id, offset=512 * i, nbytes=4, dtype="F32", shape=(1,), sha256=sha(name))
        for ref, names in zip(refs, extents, strict=True)
        for i, name in enumerate(names)
    }
    part = Component(name="model", library="x", class_name=None, folder=".", tensors=tensors)
    return Manifest(
        model=model,
        kind="llm",
        class_name=None,
        skeleton=f"{model}/skeleton-0",
        source="",
        fingerprint="0",
        layout=layout,
        components={"model": part},
        extents={ref.id: ref for ref in refs},
    )


def places(meta: StoreMeta, name: str) -> list[tuple[ExtentRef, int]]:
    return [(meta.extent(id_), meta.extents[id_].tensors[sha(name)]) for id_ in meta.tensors.get(sha(name), ())]


def test_what_is_added_is_found_also_after_a_round_trip() -> None:
    meta = StoreMeta()
    meta.add_extent(extent("a", "b"), {sha("a"): 0, sha("b"): 512})
    meta.add_extent(extent("c"), {sha("c"): 0})
    for found in (meta, StoreMeta.model_validate_json(meta.model_dump_json())):
        assert set(found.tensors) == {sha("a"), sha("b"), sha("c")}
        assert places(found, "b") == [(extent("a", "b"), 512)]
        assert places(found, "c") == [(extent("c"), 0)]


def test_a_tensor_may_be_in_several_extents() -> None:
    meta = StoreMeta()
    meta.add_extent(extent("a"), {sha("a"): 0})
    meta.add_extent(extent("a", "b"), {sha("a"): 0, sha("b"): 512})
    assert places(meta, "a") == [(extent("a"), 0), (extent("a", "b"), 0)]
    meta.forget_extents([extent("a").id])
    assert places(meta, "a") == [(extent("a", "b"), 0)]
    meta.forget_extents([extent("a", "b").id])
    assert (dict(meta.tensors), meta.extents) == ({}, {})


def test_the_latest_place_of_an_extent_counts() -> None:
    meta = StoreMeta()
    meta.add_extent(extent("a", "b"), {sha("a"): 0})
    meta.add_extent(extent("a", "b", pack="q"), {sha("b"): 512})
    assert places(meta, "a") == [(extent("a", "b", pack="q"), 0)]
    assert places(meta, "b") == [(extent("a", "b", pack="q"), 512)]


def test_it_follows_from_the_manifests() -> None:
    manifests = [manifest("m", "combined", ("a", "b"), ("c",)), manifest("n", "separate", ("d",))]
    private = manifest("i", "inline", ("e",))
    random.shuffle(manifests)
    meta = meta_of([*manifests, private])
    assert set(meta.tensors) == {sha(name) for name in "abcd"}
    assert places(meta, "b") == [(extent("a", "b", pack="m"), 512)]
    assert places(meta, "d") == [(extent("d", pack="n"), 0)]


def test_of_several_places_the_one_of_before_stays() -> None:
    manifests = [manifest(model, "combined", ("a", "b")) for model in "xyz"]
    assert places(meta_of(manifests), "a")[0][0].pack == "x"
    for model in "xyz":
        before = meta_of([manifest(model, "combined", ("a", "b"))])
        assert meta_of(manifests, before) == before
    gone = meta_of([manifest("gone", "combined", ("a", "b"))])
    assert meta_of(manifests, gone) == meta_of(manifests)


@pytest.mark.parametrize(
    ("id_", "change"),
    [
        ("x", {"pack": "../p"}),
        ("x", {"offset": -1}),
        ("x", {"tensors": {"y": 0}}),
        ("x", {"checksum": "0"}),
        ("a b", {}),
    ],
)
def test_places_that_cannot_be_are_refused(id_: str, change: dict[str, object]) -> None:
    good = {"pack": "p", "offset": 0, "nbytes": 1, "checksum": "0" * 32, "tensors": {}}
    StoreMeta.model_validate_json(json.dumps({"extents": {"x": good}}))
    with pytest.raises(ValidationError):
        StoreMeta.model_validate_json(json.dumps({"extents": {id_: good | change}}))
