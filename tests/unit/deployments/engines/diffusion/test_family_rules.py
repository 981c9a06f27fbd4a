"""A family is made of few parts, each about one subject; what it does not say is as in most pipelines."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.families.base import (
    Adapters,
    Defaults,
    Family,
    Guidance,
    Latents,
    Network,
    References,
    Steps,
    Texts,
)

RULES = {
    "defaults": Defaults,
    "network": Network,
    "texts": Texts,
    "latents": Latents,
    "guidance": Guidance,
    "steps": Steps,
    "adapters": Adapters,
    "references": References,
}
MOST_HOOKS = 12
DERIVED = {"multiple_of", "taken_in", "handed_out", "pixels_per_cell"}


def public(class_: type) -> set[str]:
    return {name for name in vars(class_) if not name.startswith("_")}


def test_a_new_family_sees_few_hooks() -> None:
    parts = {field.name for field in fields(Family)}
    assert RULES.keys() < parts
    assert len(parts | {"variant"}) <= MOST_HOOKS
    for name, class_ in RULES.items():
        assert len(public(class_) - DERIVED) <= MOST_HOOKS, class_
        own = {one for family in FAMILIES.values() for one in type(getattr(family, name)).__mro__} - {*class_.__mro__}
        assert not any(DERIVED & public(one) for one in own), "they follow from others in every family"


@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES.values()), ids=lambda family: family.class_name)
def test_each_subject_has_a_whole_rule(family: Family) -> None:
    for name, class_ in RULES.items():
        rule = getattr(family, name)
        assert isinstance(rule, class_)
        assert not inspect.isabstract(type(rule))


def test_a_variant_is_another_family_and_leaves_the_known_one_as_it_is() -> None:
    family = FAMILIES["StableDiffusionXLPipeline"]
    refiner = family.variant({"requires_aesthetics_score": True})
    assert family.variant({}) is family
    assert (refiner.steps.refines_only, family.steps.refines_only) == (True, False)
    assert refiner.defaults is family.defaults
    assert refiner.class_name == family.class_name
