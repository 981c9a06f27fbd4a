"""A pipeline class of diffusers, and its parts without weights: schedulers, tokenizers, image processors.

Modules get attributes that pipelines of the installed diffusers expect of them and that they lack.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn
from transformers import AutoTokenizer, ProcessorMixin

from configs.options import Sampler
from deployments.engines.building.build import IMPORT_LOCK
from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.library_classes import LIBRARIES, is_pipeline_folder
from deployments.engines.libraries.library_seam import pipeline_arguments
from deployments.engines.libraries.processors import load_image_processor
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import check_class, check_part, check_parts
from weights.platform.panics import panics_as_errors

_ONLY_IN_TILES: Final = ("AutoencoderKLAllegro",)  # diffusers has no other way for it, and leaves this one off


def pipeline_class(class_name: str) -> type[Any]:
    """Return a pipeline class that makes images. Raises EngineError."""
    check_class(class_name)
    with IMPORT_LOCK:
        cls: type[Any] = getattr(importlib.import_module("diffusers"), class_name)
    return cls


class StockModel:
    """A pipeline class over given modules, and the other parts of its folder. Makes a pipeline per request.

    HAZARD: a pipeline keeps its steps and its guidance in itself, and its schedulers have a history: two requests
    may not share one. They share modules, tokenizers and processors.
    """

    def __init__(self, class_name: str, folder: Path, modules: Mapping[str, nn.Module]) -> None:
        """Load the parts. Raises EngineError for one that is missing or cannot be loaded."""
        self.cls = pipeline_class(class_name)
        self.modules = dict(modules)
        tiled: list[Any] = [module for module in modules.values() if type(module).__name__ in _ONLY_IN_TILES]
        for module in tiled:
            module.enable_tiling()
        self._folder = folder
        self._index = read_config(folder / "model_index.json")
        check_parts(class_name, folder, self._index)
        names, options = pipeline_arguments(self.cls)
        self._options = {name: self._index[name] for name in options if name in self._index}
        self._parts = {name: self._part(name) for name in names}

    def create_pipeline(
        self,
        scheduler: str | None = None,
        scheduler_options: Mapping[str, Any] | None = None,
        sampler: Sampler | None = None,
    ) -> Any:
        """Return a pipeline of one request, with schedulers of its own.

        `scheduler` and `scheduler_options` are those of a DiffusionRequest. A `sampler` is in place of the scheduler.
        diffusers is loaded here, since replicas of texts load this module. Raises EngineError.
        """
        parts = {name: copy.deepcopy(one) if _is_scheduler(one) else one for name, one in self._parts.items()}
        if (scheduler or scheduler_options or sampler) and "scheduler" not in parts:
            raise EngineError(f"scheduler: a {self.cls.__name__} has its own, which a request cannot change")
        if sampler is not None:
            from deployments.engines.stock.sampled import SampledScheduler  # loads diffusers

            parts["scheduler"] = SampledScheduler(parts["scheduler"], sampler)
        elif scheduler or scheduler_options:
            from deployments.engines.diffusion.solvers import SolverFactory  # loads diffusers

            solvers = SolverFactory(self._folder, self._index)
            parts["scheduler"] = solvers.configured(scheduler, scheduler_options or {})
        _mend_parts(self.cls.__name__, parts)
        return self.cls(**parts, **self._options)

    def over(self, modules: Mapping[str, nn.Module], blank: Mapping[str, nn.Module]) -> StockModel:
        """Return the same model over these modules, and `blank` ones, which never run. Its other parts are shared."""
        other = copy.copy(self)
        other.modules = dict(modules)
        other._parts = {**self._parts, **blank, **modules}
        return other

    def _part(self, name: str) -> Any:
        """Return a component. None for one that the class does not need."""
        if name in self.modules:
            return self.modules[name]
        entry = self._index.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] is None:
            return None  # `check_parts` has checked the required ones
        cls = component_class(str(entry[0]), str(entry[1]), self._folder / name)
        if issubclass(cls, nn.Module):
            if name in self.cls._optional_components:
                return None  # a safety checker, say, which is never built
            raise EngineError(f"{self._folder}: its {name}, a {cls.__name__}, has no weights")
        check_part(str(entry[0]), str(entry[1]), self._folder / name)
        # The others take no such option, and run no code of models.
        untrusting = {"trust_remote_code": False} if cls.__name__.startswith("Auto") else {}
        try:
            with IMPORT_LOCK, panics_as_errors():
                if _reads_videos(cls) and importlib.util.find_spec("torchvision") is None:
                    tokenizer = AutoTokenizer.from_pretrained(
                        self._folder / name, local_files_only=True, trust_remote_code=False
                    )
                    return load_image_processor(cls, self._folder / name, tokenizer)
                return cls.from_pretrained(self._folder / name, local_files_only=True, **untrusting)
        except Exception as error:  # of many libraries
            raise EngineError(f"{self._folder / name}: no {cls.__name__} can be loaded: {error}") from error


def component_class(library: str, class_name: str, folder: Path) -> type[Any]:
    """Return the class of a component by its names in model_index.json.

    Raises EngineError, also for code that comes with a model.
    """
    if library not in LIBRARIES and not is_pipeline_folder(library):
        raise EngineError(f"{folder}: of {library!r}, code that comes with a model, which is never run")
    with IMPORT_LOCK:
        loading = importlib.import_module("diffusers.pipelines.pipeline_loading_utils")
        try:
            found = loading.simple_get_class_obj(library, class_name)
        except AttributeError:
            found = None
    if not (isinstance(found, type) and hasattr(found, "from_pretrained")):
        raise EngineError(f"{folder}: {library} has no component {class_name!r}")
    return found


def _reads_videos(cls: type[Any]) -> bool:
    """Return whether it is a processor of several parts, with one for videos among them."""
    return issubclass(cls, ProcessorMixin) and "video_processor" in cls.get_attributes()


def _is_scheduler(part: Any) -> bool:
    return hasattr(part, "set_timesteps") or type(part).__name__.endswith("Scheduler")


# Options that a class reads in a part's config and that no such part has. The value changes nothing: what
# ChromaInpaintPipeline makes of it, an embedding of the guidance, goes nowhere.
_OPTIONS: Final = {"ChromaInpaintPipeline": ("transformer", {"guidance_embeds": False})}


def _mend_parts(class_name: str, parts: dict[str, Any]) -> None:
    """Give the modules of a pipeline the attributes that its class expects. A second call changes nothing."""
    name, options = _OPTIONS.get(class_name, ("", {}))
    if missing := {key: value for key, value in options.items() if key not in parts[name].config}:
        parts[name].register_to_config(**missing)
    for part in parts.values():
        # Once it was a part of CLIPTextModel, and `clip_skip` of many classes asks it for the norm behind the layers.
        if type(part).__name__ == "CLIPTextModel" and not hasattr(part, "text_model"):
            vars(part)["text_model"] = part  # as a submodule of itself it would recurse for ever
