"""Load YAML into a ClusterConfig. A mistake is reported with file, line, key and, for a typo, the nearest name."""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from configs.cluster import ClusterConfig
from configs.errors import ConfigFileError, Problem, shown

_Location = tuple[str | int, ...]

# Keys of earlier versions and of other programs, too far from our names for a typo.
_RENAMED: Final = {
    "merging": "batching",
    "steps": "num_inference_steps",
    "cfg_scale": "guidance_scale",
    "max_new_tokens": "max_tokens",
    "lora": "adapters",
    "loras": "adapters",
    "controlnets": "adapters",
    "checkpoints": "models",
    "name": "id",
    "model": "path",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "gpus": "num_gpus",
    "cpus": "num_cpus",
    "replicas": "num_replicas",
}
_SHORT_VALUES: Final = {  # of other programs
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "f32": "float32",
    "full": "float32",
}
# What templates leave for people to fill in, where a value is a place: `<folder>`, `${STORE}`, `{{ .Values.store }}`.
_PLACEHOLDER: Final = re.compile(
    r"<[A-Za-z][\w .-]*>|\$\{[^}]*\}|\{\{.*\}\}|\b(?:change|replace|fill)[-_ ]?(?:me|in)\b", re.I
)
_MAX_KEYS: Final = 200_000  # of a mapping: some name 100,000 models
_MERGE: Final = "tag:yaml.org,2002:merge"
_MAX_DEPTH: Final = 4  # of a place in a config
_PLACES: Final = frozenset(
    {"path", "like", "vae", "preview_vae", "draft", "folder", "keys_file", "address", "endpoint", "host"}
)
STAND_IN_PATH: Final = "/"  # no model lies there
_STAND_INS: Final[dict[str, dict[str, Any]]] = {  # by list of entries, without their ids
    "models": {"path": STAND_IN_PATH},
    "adapters": {"path": STAND_IN_PATH},
    "pipelines": {
        "inputs": {"text": "text"},
        "stages": [{"name": "question", "function": "sum_question", "inputs": {"text": "$text"}}],
        "outputs": {"question": "$question"},
    },
}


def load_cluster_config(path: str | Path) -> ClusterConfig:
    """Read a cluster YAML. Relative paths inside it are relative to the file's own folder.

    Raises ConfigFileError with every problem that was found, not only the first.
    """
    config, problems = read_cluster_config(path)
    if config is None or problems:
        raise ConfigFileError(Path(path), problems)
    return config


def read_cluster_config(path: str | Path) -> tuple[ClusterConfig | None, tuple[Problem, ...]]:
    """Read a cluster YAML as `load_cluster_config` does; return the config without its mistakes, and the mistakes.

    The config is None with too many mistakes. Raises ConfigFileError for a file that is no mapping in YAML.
    """
    path = Path(path)
    node, data = _read_mapping(path)
    found: dict[_Location, Problem] = dict(_unfilled(node, data, (), set()))
    for location in found:
        _remove_key(data, location)
    while True:
        try:
            config = ClusterConfig.model_validate(data)
            break
        except ValidationError as error:
            known = {entry_of(location) for location in found}
            fresh = {tuple(detail["loc"]): _problem(node, detail) for detail in _causes(error)}
            # Without a key, its entry may be wrong in ways in which it was not.
            fresh = {location: problem for location, problem in fresh.items() if entry_of(location) not in known}
            found |= fresh
            num_changed = sum(_remove_key(data, location) for location in fresh)
            num_changed += (
                sum(_stand_in(data, tuple(detail["loc"])) for detail in error.errors()) if not num_changed else 0
            )
            if not num_changed:
                return None, tuple(found.values())
    try:
        return _resolve_paths(config, path.resolve().parent), tuple(found.values())
    except RuntimeError as error:  # "~somebody" without a home directory
        return None, (*found.values(), Problem(None, "", str(error)))


def _read_mapping(path: Path) -> tuple[yaml.Node | None, dict[Any, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigFileError(path, [Problem(None, "", "no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(path, [Problem(None, "", f"cannot be read: {error}")]) from None
    node, data = _parse(path, text)
    if not isinstance(data, dict):
        raise ConfigFileError(path, [Problem(1, "", f"expected a mapping, got {type(data).__name__}")])
    duplicates = list(_duplicate_keys(node, (), set()))
    if duplicates:
        raise ConfigFileError(path, duplicates)
    return node, data


def _unfilled(
    node: yaml.Node | None, data: Any, location: _Location, seen: set[int]
) -> Iterator[tuple[_Location, Problem]]:
    """Yield placeholders that were left in the file, with their problems. Aliased parts are visited once."""
    if isinstance(data, str):
        if location and location[-1] in _PLACES and _PLACEHOLDER.search(data):
            text = f"{data!r} is a placeholder: replace it by its value"
            yield location, Problem(_line_of(node, location), ".".join(map(str, location)), text)
    elif isinstance(data, dict | list) and id(data) not in seen and len(location) < _MAX_DEPTH:
        seen.add(id(data))
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _unfilled(node, value, (*location, key), seen)


def entry_of(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the part of a location that names an entry of a list (models.3), or a section (worker)."""
    return tuple(location[:2] if len(location) > 1 and isinstance(location[1], int) else location[:1])


def _remove_key(data: Any, location: _Location) -> bool:
    """Remove the key at a location, if there is one. Items of lists stay: other problems refer to their index."""
    for part in location[:-1]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return False
    if not location or not isinstance(data, dict) or location[-1] not in data:
        return False
    del data[location[-1]]
    return True


def _stand_in(data: dict[Any, Any], location: _Location) -> bool:
    """Replace an unreadable entry by a sound one of that name, so that references to it are no mistakes."""
    kind, index = (*location, None, None)[:2]
    entries = data.get(kind)
    if kind not in _STAND_INS or not isinstance(index, int) or not isinstance(entries, list) or index >= len(entries):
        return False
    given = entries[index].get("id") if isinstance(entries[index], dict) else None
    is_name = isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", given)
    stand_in = {"id": given if is_name else f"{kind}-{index}", **_STAND_INS[kind]}
    if kind == "adapters":
        models = data.get("models")
        stand_in["base"] = [m["id"] for m in models if isinstance(m, dict) and "id" in m][:1] if models else []
    if entries[index] == stand_in:
        return False
    entries[index] = stand_in
    return True


def located_problems(path: Path, problems: Iterable[tuple[Sequence[str | int], str]]) -> ConfigFileError:
    """Return mistakes found after loading (keys, text) as an error with their lines."""
    return ConfigFileError(path, locate_problems(path, problems))


def locate_problems(path: Path, problems: Iterable[tuple[Sequence[str | int], str]]) -> list[Problem]:
    """Return mistakes (keys, text) with their lines."""
    node, _ = _parse(path, path.read_text("utf-8"))
    return [Problem(_line_of(node, tuple(keys)), ".".join(map(str, keys)), text) for keys, text in problems]


def _resolve_paths(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """Return the config with absolute paths, so that any process of any node reads the same files."""

    def absolute(path: Path) -> Path:
        return (folder / path.expanduser()).resolve()

    def located(source: Path | str) -> Path | str:
        return absolute(source) if isinstance(source, Path) else source

    return config.model_copy(
        update={
            "access": config.access.model_copy(
                update={"keys_file": config.access.keys_file and absolute(config.access.keys_file)}
            ),
            "store": config.store.model_copy(update={"path": absolute(config.store.path)}),
            "model_roots": config.model_roots and tuple(map(located, config.model_roots)),
            "models": tuple(
                m.model_copy(
                    update={
                        "path": located(m.path),
                        "like": m.like and located(m.like),
                        **{name: absolute(path) for name, path in m.own_parts.items()},
                    }
                )
                for m in config.models
            ),
            "adapters": tuple(a.model_copy(update={"path": located(a.path)}) for a in config.adapters),
        }
    )


def _parse(path: Path, text: str) -> tuple[yaml.Node | None, Any]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _most_keys(node) > _MAX_KEYS:
            raise ConfigFileError(
                path, [Problem(None, "", f"a mapping of more than {_MAX_KEYS} keys, merged ones (<<) included")]
            )
        return node, yaml.safe_load(text)
    except RecursionError:
        raise ConfigFileError(path, [Problem(None, "", "not valid YAML: nested too deep")]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigFileError(path, [Problem(line, "", f"not valid YAML: {reason}")]) from None


def _most_keys(node: yaml.Node) -> int:
    """Return the number of keys of the largest mapping with its merges expanded: merges can multiply."""
    left, seen, sizes = [node], set[int](), dict[int, int]()
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, yaml.MappingNode):
            _num_keys(found, sizes)
            left += [one for pair in found.value for one in pair]
        elif isinstance(found, yaml.SequenceNode):
            left += found.value
    return max(sizes.values(), default=0)


def _num_keys(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of keys of a mapping, or of a list's mappings, merges included. Circles add none."""
    if id(node) not in known:
        known[id(node)] = 0
        if isinstance(node, yaml.MappingNode):
            counts = [_num_keys(value, known) if key.tag == _MERGE else 1 for key, value in node.value]
        else:
            counts = [_num_keys(child, known) for child in node.value] if isinstance(node, yaml.SequenceNode) else []
        known[id(node)] = sum(counts)
    return known[id(node)]


def _causes(error: ValidationError) -> list[Any]:
    """Drop errors that merely follow: a list counts as too short when one of its items is wrong."""
    details = error.errors()

    def follows(detail: Any) -> bool:
        depth = len(detail["loc"])
        inside = (other for other in details if len(other["loc"]) > depth and other["loc"][:depth] == detail["loc"])
        return detail["type"] == "too_short" and any(inside)

    return [detail for detail in details if not follows(detail)]


def _problem(node: yaml.Node | None, detail: Any) -> Problem:
    location: _Location = tuple(detail["loc"])
    key = ".".join(str(part) for part in location)
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        name = str(location[-1])
        nearest = [_RENAMED[name]] if _RENAMED.get(name) in known else difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        text = f"unknown key{hint} (known: {', '.join(known)})"
    elif detail["type"] == "missing":
        text = "required, but missing"
    elif detail["type"] in ("tuple_type", "list_type"):
        text = _list_wanted(detail["input"])
    elif detail["type"] == "literal_error":
        given = detail["input"]
        hint = "" if isinstance(given, dict | list) else _near_value(str(given), detail["ctx"]["expected"])
        text = f"{text}, got {_masked(given)}{hint}"
    elif not isinstance(detail.get("input"), dict | list | tuple | BaseModel):
        text = f"{text}, got {_masked(detail.get('input'))}"
    return Problem(_line_of(node, location), key, text)


def _masked(value: Any) -> str:
    """Return a value for a message. A mistaken URL may have a password in it: https://user:password@host."""
    return re.sub(r"//.*@", "//***@", shown(value))


def _list_wanted(value: Any) -> str:
    """Return the problem of a value where a list is expected, with the list's spelling."""
    if isinstance(value, str | int | float):
        shown = _masked(value)
        return f"expected a list, got {shown}; write [{shown.strip(chr(39))}]"
    return f"expected a list, got {'a mapping' if isinstance(value, dict) else 'nothing'}"


def _near_value(given: str, expected: str) -> str:
    """Return a hint at the nearest of pydantic's expected values, `"'a', 'b' or 'c'"`; "" without one."""
    known = re.findall(r"'([^']*)'", expected)
    short = _SHORT_VALUES.get(given.lower())
    nearest = [short] if short in known else difflib.get_close_matches(given, known, 1, 0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _line_of(node: yaml.Node | None, location: _Location) -> int | None:
    """Return the line of the deepest part of `location` in the file (a missing key has its parent's line)."""
    line = node.start_mark.line + 1 if node else None
    for part in location:
        step = _child(node, part)
        if step is None:
            break
        line, node = step
    return line


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        child = node.value[part]
        return child.start_mark.line + 1, child
    return None


def _duplicate_keys(node: yaml.Node | None, location: _Location, visited: set[int]) -> Iterable[Problem]:
    """Yield duplicate keys: YAML lets the later one win silently, which hides a mistake.

    `visited`: aliases make a graph of the tree, with many ways to a node and even circles.
    """
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                dotted = ".".join(str(part) for part in (*location, name))
                yield Problem(key.start_mark.line + 1, dotted, "given twice")
            seen.add(name)
            yield from _duplicate_keys(value, (*location, name), visited)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _duplicate_keys(child, (*location, index), visited)


def _known_keys(location: _Location) -> list[str]:
    """Return the field names of the config model at `location`."""
    model: type[BaseModel] | None = ClusterConfig
    for part in location:
        if isinstance(part, int) or model is None:
            continue
        field = model.model_fields.get(part)
        model = _model_in(field.annotation) if field else None
    return sorted(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = _model_in(argument)
        if found:
            return found
    return None
