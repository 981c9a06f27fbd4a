"""The pipeline classes of the installed diffusers, read from its source: an import would take torch.

A class's components and parameters decide whether it can be served; the registry checks before weights are read.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.library_classes import (
    LIBRARIES,
    has_model_class,
    has_part_class,
    is_pipeline_folder,
    library_folder,
    version,
)
from deployments.engines.libraries.tokenizer_files import check_tokenizer
from deployments.engines.records.protocol import EngineError

_CLASS: Final = re.compile(r"^class (\w+Pipeline)\b", re.MULTILINE)
_OUTPUT: Final = re.compile(r"Output$")
_EXAMPLE: Final = re.compile(r">>> export_to_(?:video|gif)\([^)]*fps=(\d{1,3})\b")
Makes = Literal["images", "video", "audio"]
# The fields of pipelines' output records by medium. `frames` may have sound beside them.
OUTPUTS: Final[Mapping[Makes, tuple[str, ...]]] = {
    "images": ("images", "image"),
    "video": ("frames", "video"),
    "audio": ("audios",),
}
_MODULES: Final = {"opencv": "cv2", "onnx": "onnxruntime"}  # of packages with another name
# Packages that a class needs although its file only checks for them, by the check's name.
_NEEDED_ALL_THE_SAME: Final = {
    "is_cosmos_guardrail_available()": "cosmos_guardrail",
    "from .processor_omnigen import": "torchvision",
}
# By the end of a class's name, the names of the one file that it is read from.
_FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "Scheduler": ("scheduler_config.json",),
    "Processor": ("preprocessor_config.json", "processor_config.json"),
    "FeatureExtractor": ("preprocessor_config.json",),
    "ProcessorFast": ("preprocessor_config.json", "processor_config.json"),
}
PROMPTED: Final = "unet"  # the component that reads images as prompts, of classes whose call has IMAGE_EMBEDS
IMAGE_EMBEDS: Final = "ip_adapter_image_embeds"
# Classes whose calls take IMAGE_EMBEDS and pass none on, or arrange their rows unlike their texts.
_UNPROMPTED: Final = tuple(f"StableDiffusion{name}Pipeline" for name in ("InstructPix2Pix", "Panorama", "SAG"))
_PLAIN_TYPES: Final = re.compile(r"\b(str|int|float|bool|Image|PipelineImageInput)\b")  # types that a request can have


@dataclass(frozen=True, slots=True)
class PipelineSource:
    """A pipeline class: its required components, the required parameters of a call, and the outputs of a call.

    Its constructor takes the `accepted` components, and `options`, which are values. `needs` has annotations by name,
    "" without one; `outputs` the first fields of the returned records, none if it passes on another
    pipeline's record. `parameters` are those of the call, `defaults` the plain ones of their defaults, and `fps` the
    frame rate at which the class's own example writes its videos.
    """

    components: tuple[str, ...]
    needs: Mapping[str, str]
    outputs: frozenset[str]
    accepted: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    fps: int | None = None

    @property
    def makes(self) -> Makes | None:
        """Return the medium of a call's results; None for one that is neither seen nor heard."""
        found = (makes for makes, names in OUTPUTS.items() if self.outputs & set(names))
        return next(found, None if self.outputs else "images")


def is_stock_class(class_name: str) -> bool:
    """Return whether diffusers' own code runs the pipelines of a class, because no family here does."""
    return class_name not in FAMILIES


def class_names() -> list[str]:
    """Return the pipeline classes that diffusers exports."""
    return sorted(_class_files())


def knows_class(class_name: str) -> bool:
    """Return whether diffusers has the class, and cache its source."""
    if class_name not in _class_files():
        return False
    read_class(class_name)
    return True


def check_class(class_name: str) -> PipelineSource:
    """Return the source of a pipeline class that makes images, video or audio from a request's inputs.

    Raises EngineError.
    """
    if class_name not in (files := _class_files()):
        near = difflib.get_close_matches(class_name, files, n=3, cutoff=0.5)
        hint = f" (near names: {', '.join(near)})" if near else ""
        raise EngineError(f"diffusers {version('diffusers')} has no pipeline class {class_name!r}{hint}")
    if "OnnxRuntimeModel" in files[class_name].read_text("utf-8"):
        raise EngineError(f"{class_name} runs ONNX sessions; those of torch modules are served")
    if missing := _missing_packages(class_name):
        raise EngineError(f"{class_name} needs {', '.join(missing)}, which is not installed here")
    source = read_class(class_name)
    if source.makes is None:
        made = ", ".join(sorted(source.outputs))
        raise EngineError(
            f"{class_name} returns {made}; of diffusers' pipelines, those are served that make images, video or audio"
        )
    if source.makes == "video" and importlib.util.find_spec("av") is None:
        raise EngineError(f"{class_name} makes video, which needs the package av (pip install 'atelier-serve[video]')")
    for name, annotation in source.needs.items():
        if annotation and not _PLAIN_TYPES.search(annotation):
            raise EngineError(
                f"{class_name} needs {name} ({annotation}), which no request can bring; a combined pipeline may make it"
            )
    return source


def takes_image_prompts(class_name: str) -> bool:
    """Return whether IP-Adapters are served with a pipeline class that diffusers' own code runs."""
    if class_name in _UNPROMPTED or not knows_class(class_name):
        return False
    source = read_class(class_name)
    return source.makes == "images" and IMAGE_EMBEDS in source.parameters and PROMPTED in source.accepted


def check_parts(class_name: str, folder: Path, index: Mapping[str, object]) -> None:
    """Check the components in the model_index.json of a pipeline's folder.

    Raises EngineError for a required component that the index lacks, and for code that comes with a model.
    """
    for name, (library, _) in parts_of(class_name, index).items():
        if library not in LIBRARIES and not is_pipeline_folder(library):
            raise EngineError(
                f"{folder}: its {name} is of {library!r}, code that comes with a model, which is never run"
            )
    for name in read_class(class_name).components:
        if name == "safety_checker":  # it is never built
            continue
        entry = index.get(name)
        if not isinstance(entry, list) or not any(entry):
            raise EngineError(f"{folder}: {class_name} needs a {name}, and model_index.json names none")


def check_part(library: str, class_name: str, folder: Path) -> None:
    """Raise EngineError for a part without weights that cannot be loaded: of no known class, or without its files."""
    if not has_part_class(library, class_name) and not has_model_class(library, class_name):
        raise EngineError(f"{folder}: {library} has no component {class_name!r}")
    if "Tokenizer" in class_name:
        check_tokenizer(folder)
    for end, files in _FILES.items():
        if class_name.endswith(end):
            found = next((folder / name for name in files if (folder / name).is_file()), None)
            if found is None:
                raise EngineError(f"{folder}: a {class_name} without its {files[0]}")
            read_config(found)


def parts_of(class_name: str, index: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return the library and class of the parts that a class's model_index.json names; an option may be a pair, too."""
    options = read_class(class_name).options
    return {
        name: (entry[0], entry[1])
        for name, entry in index.items()
        if not name.startswith("_")
        and name not in options
        and isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(one, str) for one in entry)
    }


@functools.cache
def read_class(class_name: str) -> PipelineSource:
    """Read the source of a class of diffusers with its bases. Raises KeyError for any other."""
    bodies = list(bodies_of(class_name))
    init = next((method for body in bodies if (method := _method(body, "__init__"))), None)
    call = next((method for body in bodies if (method := _method(body, "__call__"))), None)
    optional = next((names for body in bodies if (names := _optional_components(body)) is not None), frozenset())
    required = _required(init) if init else {}
    components = tuple(name for name in required if name not in optional)
    accepted = _names(init) if init else ()
    options = frozenset(accepted) - required.keys() - optional
    if call is None:
        return PipelineSource(components, {}, frozenset(), accepted, options)
    example = _EXAMPLE.search(_class_files()[class_name].read_text("utf-8"))
    return PipelineSource(
        components,
        _required(call),
        _outputs(call),
        accepted,
        options,
        _names(call),
        _plain_defaults(call),
        int(example[1]) if example else None,
    )


@functools.cache
def _class_files() -> Mapping[str, Path]:
    """Return the files of all pipeline classes that diffusers exports, by name."""
    exported = set(re.findall(r'"(\w+Pipeline)"', (library_folder("diffusers") / "__init__.py").read_text("utf-8")))
    found: dict[str, Path] = {}
    for file in sorted((library_folder("diffusers") / "pipelines").rglob("*/*.py")):
        found |= dict.fromkeys(_CLASS.findall(file.read_text("utf-8")), file)
    return {name: file for name, file in found.items() if name in exported}


def _missing_packages(class_name: str) -> list[str]:
    """Return the missing packages for which diffusers replaces the class by a stand-in."""
    stand_in = re.compile(rf"^class {class_name}\(.*\n    _backends = (.*)$", re.MULTILINE)
    texts = (file.read_text("utf-8") for file in sorted((library_folder("diffusers") / "utils").glob("dummy_*.py")))
    needed = list(next((ast.literal_eval(found[1]) for text in texts if (found := stand_in.search(text))), ()))
    own = _class_files()[class_name].read_text("utf-8")
    needed += [package for words, package in _NEEDED_ALL_THE_SAME.items() if words in own]
    return [name for name in needed if importlib.util.find_spec(_MODULES.get(name, name)) is None]


def bodies_of(class_name: str) -> Iterator[ast.ClassDef]:
    """Yield a class, and the pipelines that it inherits from, the nearest first."""
    tree = ast.parse(_class_files()[class_name].read_text("utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    yield found
    for base in found.bases:
        if isinstance(base, ast.Name) and base.id in _class_files():
            yield from bodies_of(base.id)


def _method(body: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in body.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _required(function: ast.FunctionDef) -> dict[str, str]:
    """Return the annotations of the parameters without a default, by name."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    required = positional[1 : len(positional) - len(given.defaults)]
    required += [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return {one.arg: ast.unparse(one.annotation) if one.annotation else "" for one in required}


def _names(function: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(one.arg for one in (*function.args.args[1:], *function.args.kwonlyargs))


def _plain_defaults(function: ast.FunctionDef) -> dict[str, bool | int | float | str]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    pairs = [*zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True)]
    pairs += [(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default]
    found = {one.arg: default.value for one, default in pairs if isinstance(default, ast.Constant)}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str)}


def _optional_components(body: ast.ClassDef) -> frozenset[str] | None:
    for node in body.body:
        if isinstance(node, ast.Assign) and any(
            getattr(one, "id", "") == "_optional_components" for one in node.targets
        ):
            return frozenset(ast.literal_eval(node.value))
    return None


def _outputs(call: ast.FunctionDef) -> frozenset[str]:
    returned = (node.value for node in ast.walk(call) if isinstance(node, ast.Return))
    return frozenset(
        value.keywords[0].arg or "more than one kind"
        for value in returned
        if isinstance(value, ast.Call) and value.keywords and _OUTPUT.search(ast.unparse(value.func))
    )
