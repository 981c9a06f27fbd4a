"""The parts of requests that are larger than their device: the largest of them comes there block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from deployments.modules.built_modules import Part, PartName, distinct_bytes, streamed_footprint
from weights.manifest import Component
from weights.memory.block_plan import BlockPlan, plan_blocks

BESIDE_SHARE: Final = 0.25  # of the budget, left for the VAE and adapters if they do not want more
_STEPS: Final = 16  # to which room is rounded, so that requests with other adapters have the same plan


class Streaming:
    """The plans of one device."""

    def __init__(self, can_stream: Callable[[Component], bool], size_of: Callable[[int], int]) -> None:
        self._can_stream = can_stream
        self._size_of = size_of
        self._plans: dict[tuple[str, int], BlockPlan | None] = {}  # by module key and bytes

    def fit_parts(
        self, parts: dict[PartName, Part], budget_bytes: int, *, is_last_resort: bool
    ) -> dict[PartName, Part]:
        """Return the parts of a request, the largest one streamed if all together are larger than the budget.

        Without `is_last_resort` only if it is larger alone. What has room in no way stays as it is.
        """
        total_bytes = distinct_bytes(*(part.footprint for part in parts.values()))
        if total_bytes <= budget_bytes:
            return parts
        sizes = {
            name: distinct_bytes(part.footprint) for name, part in parts.items() if self._can_stream(part.component)
        }
        name = max(sizes, key=lambda one: sizes[one], default=None)
        if name is None or (sizes[name] <= budget_bytes and not is_last_resort):
            return parts
        # Whole: what they share with it may be of blocks that come and go.
        others_bytes = distinct_bytes(*(part.footprint for other, part in parts.items() if other != name))
        room_bytes = budget_bytes - max(others_bytes, int(budget_bytes * BESIDE_SHARE))
        room_bytes -= room_bytes % max(1, budget_bytes // _STEPS)
        return {**parts, name: self._streamed(parts[name], room_bytes)}

    def _streamed(self, part: Part, room_bytes: int) -> Part:
        component = part.component
        key = component.module_key, room_bytes
        if key not in self._plans:
            sizes = {name: ref.nbytes for name, ref in component.tensors.items()}
            self._plans[key] = plan_blocks(sizes, room_bytes)
        plan = self._plans[key]
        if plan is None:
            return part
        # Another module than the one that is there as a whole, over the same weights.
        variant = component.model_copy(update={"parts_hash": f"{component.parts_hash} in {room_bytes} bytes"})
        return replace(
            part,
            component=variant,
            footprint=streamed_footprint(variant, self._size_of, plan),
            streamed=plan,
            is_variant=True,
        )
