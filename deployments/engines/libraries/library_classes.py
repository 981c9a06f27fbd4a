"""The classes of the installed diffusers and transformers, as their sources tell: without importing them.

The import takes torch, and the registry asks before weights are read whether a model's classes are there.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from deployments.engines.records.protocol import EngineError

LIBRARIES: Final = ("diffusers", "transformers")
_NAME: Final = re.compile(r'"(\w+)"')
_CLASS: Final = re.compile(r"^class (\w+)", re.MULTILINE)
_MODEL_TYPE: Final = re.compile(r'"([\w.-]+)"[,:] "\w+Config"')
_OLD_ENDS: Final = ("Fast", "FeatureExtractor")  # of names that transformers still understands
_BASES: Final = frozenset({"PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "SentencePieceBackend"})
_PARTS: Final = ("tokenization", "image_processing", "feature_extraction", "processing", "video_processing")


def version(library: str) -> str:
    """Return the version of an installed library."""
    return importlib.metadata.version(library)


def library_folder(library: str) -> Path:
    """Return the folder of a library's source. Raises EngineError where it is not installed."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise EngineError(f"{library} is not installed")
    return Path(spec.origin).parent


def has_model_class(library: str, class_name: str) -> bool:
    """Return whether a library has a model's class: diffusers, transformers or a folder of diffusers' pipelines."""
    if library == "transformers":
        return (
            class_name in _named_models()
            or any(class_name in _CLASS.findall(file.read_text("utf-8")) for file in _likely_files(class_name))
            or class_name in _classes_of("modeling")
        )
    return not class_name.endswith(("Scheduler", "Pipeline")) and has_part_class(library, class_name)


def has_part_class(library: str, class_name: str) -> bool:
    """Return whether a library has the class of a pipeline's part that is no model: a scheduler, a tokenizer."""
    if library == "diffusers":
        return class_name in _exported_by_diffusers()
    if library == "transformers":
        bases = {class_name.removesuffix(end) for end in _OLD_ENDS}
        names = {class_name, *bases, *(f"{base}ImageProcessor" for base in bases)}
        return bool(names & _BASES) or any(names & _classes_of(part) for part in _PARTS)
    return is_pipeline_folder(library) and any(
        class_name in _CLASS.findall(file.read_text("utf-8")) for file in _pipelines(library).glob("*.py")
    )


def has_model_type(model_type: Any) -> bool:
    """Return whether transformers has a config of its own for a `model_type`."""
    return isinstance(model_type, str) and model_type in _model_types()


def is_pipeline_folder(library: str) -> bool:
    """Return whether it is a folder of diffusers' pipelines: some have models of their own."""
    return library.isidentifier() and _pipelines(library).is_dir()


def named_class(config: Mapping[str, Any], folder: Path) -> str:
    """Return the class that a config.json names. Raises EngineError where it names none."""
    architectures = config.get("architectures")
    class_name = config.get("_class_name") or (
        architectures[0] if isinstance(architectures, list) and architectures else None
    )
    if not isinstance(class_name, str):
        raise EngineError(f"{folder}: config.json names no class ('_class_name' or 'architectures')")
    return class_name


def check_library(library: str, folder: Path) -> None:
    """Raise EngineError for a model of a library whose code is never run."""
    if library not in LIBRARIES and not is_pipeline_folder(library):
        raise EngineError(
            f"{folder}: unknown library {library!r} (known: {', '.join(LIBRARIES)}); "
            "code that comes with a model is never run"
        )


def check_model_class(library: str, class_name: str, folder: Path, config: Any = None) -> None:
    """Raise EngineError for a model's class that its library lacks. `config` is the content of its config.json."""
    check_library(library, folder)
    if not has_model_class(library, class_name):
        raise EngineError(f"{folder}: {no_class(library, class_name, config)}")


def no_class(library: str, class_name: str, config: Any = None) -> str:
    """Return the message on a model's class that a library lacks."""
    has_version = f" {version(library)}" if library in LIBRARIES else ""
    brings_code = isinstance(config, dict) and "auto_map" in config
    return f"{library}{has_version} has no model class {class_name!r}{_near(library, class_name)}" + (
        "; code that comes with a model (auto_map) is never run" if brings_code else ""
    )


def _near(library: str, class_name: str) -> str:
    known: Iterable[str] = ()
    if library in LIBRARIES:
        known = sorted(_exported_by_diffusers() if library == "diffusers" else _classes_of("modeling"))
    near = difflib.get_close_matches(class_name, known, n=3)
    return f" (near names: {', '.join(near)})" if near else ""


def _pipelines(name: str) -> Path:
    return library_folder("diffusers") / "pipelines" / name


@functools.cache
def _exported_by_diffusers() -> frozenset[str]:
    names = _NAME.findall((library_folder("diffusers") / "__init__.py").read_text("utf-8"))
    return frozenset(name for name in names if name[:1].isupper())


@functools.cache
def _named_models() -> frozenset[str]:
    """Return the models that the tables of transformers' auto classes name: nearly all that are asked for."""
    text = (library_folder("transformers") / "models" / "auto" / "modeling_auto.py").read_text("utf-8")
    return frozenset(name for name in _NAME.findall(text) if name[:1].isupper())


@functools.cache
def _model_types() -> frozenset[str]:
    folder = library_folder("transformers") / "models" / "auto"
    texts = [(folder / name).read_text("utf-8") for name in ("auto_mappings.py", "configuration_auto.py")]
    return frozenset(name for text in texts for name in _MODEL_TYPE.findall(text))


def _likely_files(class_name: str) -> Iterator[Path]:
    """Yield the files of models that a class's name begins with."""
    for folder in (library_folder("transformers") / "models").iterdir():
        if class_name.lower().startswith(folder.name.replace("_", "")):
            yield from folder.glob("modeling_*.py")


@functools.cache
def _classes_of(part: str) -> frozenset[str]:
    """Return the classes in the files of one kind of all of transformers' models: for "modeling" in about a second."""
    found: set[str] = set()
    for file in (library_folder("transformers") / "models").glob(f"*/{part}_*.py"):
        found.update(_CLASS.findall(file.read_text("utf-8")))
    return frozenset(found)
