"""The pipelines that were made over exact sets of modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from deployments.modules.slots import ModuleSlot


class BoundPipelines:
    """Pipelines over modules: each is made once, and kept while all of its modules stay."""

    def __init__(self) -> None:
        self._bound: dict[tuple[str, tuple[int, ...]], Any] = {}  # by settings, and serials of modules

    def bound(self, settings: str, modules: Sequence[ModuleSlot], make: Callable[[], Any]) -> Any:
        """Return the pipeline that was made with these settings over these modules."""
        key = (settings, tuple(slot.serial for slot in modules))
        if key not in self._bound:
            self._bound[key] = make()
        return self._bound[key]

    def forget(self, gone: ModuleSlot, in_use: Collection[int]) -> None:
        """Forget the pipelines over a module that goes; `in_use` are the serials of the modules that requests need.

        A pipeline may also know an adapter: when one goes, so do the pipelines that nobody uses now. None knows a part
        that is room alone.
        """
        in_use = set(in_use)
        self._bound = {
            (settings, serials): thing
            for (settings, serials), thing in self._bound.items()
            if gone.serial not in serials
            and (not gone.is_adapter or not gone.component.tensors or in_use.issuperset(serials))
        }
