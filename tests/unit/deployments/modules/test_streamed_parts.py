"""The part of a request that is streamed, and its room, by what else the request needs."""

from __future__ import annotations

from typing import Any

from deployments.modules.builder import Builder
from deployments.modules.parts import Part, PartName, Streaming, device_footprint, distinct_bytes
from weights.records.manifest import Component, TensorRef

KIB = 1024


def part(name: str, sizes: dict[str, int], salt: str = "") -> Part:
    tensors = {
        leaf: TensorRef(
            extent="e",
            offset=0,
            nbytes=nbytes,
            dtype="U8",
            shape=(nbytes,),
            sha256=f"{hash((salt or name, leaf)) % 16**64:064x}",
        )
        for leaf, nbytes in sizes.items()
    }
    component = Component(name=name, library="diffusers", class_name="X", folder=name, tensors=tensors, config_hash="c")
    manifest: Any = None
    return Part(manifest, component, device_footprint(component, lambda nbytes: nbytes, 0))


def denoiser(num_blocks: int = 32, salt: str = "") -> Part:
    blocks = {f"blocks.{number}.linear.weight": 4 * KIB for number in range(num_blocks)}
    return part("denoiser", blocks | {"norm.weight": KIB}, salt)


class AllButVaes(Builder):
    """Lets everything be streamed but a VAE."""

    def can_stream(self, component: Component) -> bool:
        return component.name != "vae"


class Exact:
    """Memory in which a tensor takes its bytes."""

    def size_of(self, nbytes: int) -> int:
        return nbytes


def fitted(parts: list[Part], budget_kib: int, *, is_last_resort: bool = True) -> dict[str, Part]:
    streaming = Streaming(AllButVaes(), Exact())
    named = {PartName(one.component.name): one for one in parts}
    found = streaming.fit_parts(named, budget_kib * KIB, is_last_resort=is_last_resort)
    return {name.name: one for name, one in found.items()}


def total_kib(parts: dict[str, Part]) -> float:
    return distinct_bytes(*(one.footprint for one in parts.values())) / KIB


def test_what_has_room_stays_whole() -> None:
    parts = [denoiser(), part("vae", {"decoder.weight": 20 * KIB})]
    found = fitted(parts, 149)
    assert list(found.values()) == parts


def test_what_has_room_alone_is_streamed_as_a_last_resort_only() -> None:
    parts = [denoiser(), part("vae", {"decoder.weight": 30 * KIB})]
    assert list(fitted(parts, 140, is_last_resort=False).values()) == parts
    found = fitted(parts, 140)
    assert found["vae"] is parts[1]
    assert found["denoiser"].streamed is not None
    assert total_kib(found) <= 140


def test_what_is_larger_than_the_budget_leaves_room_for_others_and_is_another_module() -> None:
    whole = denoiser()
    alone = fitted([whole], 80, is_last_resort=False)["denoiser"]
    beside = fitted([whole, part("vae", {"decoder.weight": 19 * KIB})], 80, is_last_resort=False)
    assert alone.streamed is not None
    assert total_kib(beside) <= 80
    assert beside["denoiser"].component.module_key == alone.component.module_key  # one module for both requests
    assert alone.component.module_key != whole.component.module_key
    assert alone.component.structure_key == whole.component.structure_key
    crowded = fitted([whole, part("vae", {"decoder.weight": 45 * KIB})], 80)
    assert total_kib(crowded) <= 80
    assert crowded["denoiser"].component.module_key != alone.component.module_key


def test_tensors_that_others_share_with_it_are_theirs_as_a_whole() -> None:
    first = denoiser()
    names = [name for name in first.component.tensors if not name.startswith("norm")][:12]
    net = part("net", dict.fromkeys(names, 4 * KIB), salt="denoiser")
    found = fitted([first, net], 100)
    assert found["net"] is net
    assert total_kib(found) <= 100


def test_what_has_room_in_no_way_is_left_as_it_is() -> None:
    parts = [denoiser(), part("vae", {"decoder.weight": 95 * KIB})]
    assert list(fitted(parts, 100).values()) == parts
    solid = [part("denoiser", {"weight": 200 * KIB})]
    assert list(fitted(solid, 100).values()) == solid
