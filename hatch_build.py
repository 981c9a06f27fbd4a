"""Compile the kernels of language models when Atelier is installed; without a compiler torch computes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILDING = Path("deployments/engines/native/building.py")


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source, for an editable install, and into a wheel with the platform's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        file = Path(self.root) / BUILDING
        folder = file.parent
        spec = importlib.util.spec_from_file_location("building", file)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(file)
        building = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(building)
        try:
            library = folder / building.library_name()
            if not library.is_file():
                building.build_library(folder)
        except building.BuildFailed as error:
            self.app.display_warning(f"language models will be computed by torch, which is slower: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(str(BUILDING.with_name(library.name)))
