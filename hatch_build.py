"""Compile the kernels of language models when Atelier is installed, and put the rooms of a wheel below one name.

Without a compiler torch computes the kernels' part.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILDING = Path("deployments/engines/native/building.py")
ONE_NAME = Path("infra/package/one_name.py")


class Packaging(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside its source, and what a wheel carries below `atelier`, with the platform's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = self._compiled()
        if version == "editable":
            return
        one_name = self._loaded(ONE_NAME)
        self._tree = Path(tempfile.mkdtemp())
        package = one_name.write_tree(Path(self.root), self._tree)
        build_data["force_include"][str(package)] = one_name.NAME
        for points in (self.metadata.core.scripts, *self.metadata.core.entry_points.values()):
            points.update({name: f"{one_name.NAME}.{target}" for name, target in points.items()})
        if library:  # of C functions, for any Python
            shutil.copy(library, package / BUILDING.parent)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._tree, ignore_errors=True)

    def _compiled(self) -> Path | None:
        building = self._loaded(BUILDING)
        folder = Path(self.root) / BUILDING.parent
        try:
            library = folder / building.library_name()
            if not building.is_whole(library):
                building.build_library(folder)
        except building.BuildFailed as error:
            self.app.display_warning(f"language models will be computed by torch, which is slower: {error}")
            return None
        return library

    def _loaded(self, file: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(file.stem, Path(self.root) / file)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
