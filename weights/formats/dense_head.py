"""A Dense module of sentence-transformers: a linear layer with an activation above it, checked before it is trusted.

Format: config.json with `in_features`, `out_features`, `bias`, `activation_function`, and `linear.weight` (out, in),
`linear.bias` (out,). Source: sentence-transformers 6.2, `base/modules/dense.py`, whose defaults these are. `id2label`
is the addition of transformers' classifiers, which the stock class passes over: a name for each output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weights.formats.folder import read_json
from weights.formats.untrusted import MAX_SIZE, shown
from weights.records.errors import FormatError

CLASS_NAME: Final = "Dense"
LIBRARY: Final = "sentence_transformers"
POOLED: Final = "sentence_embedding"
DTYPES: Final = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A Dense layer's config: `activation_function` is the dotted name of a torch module, `labels` name the outputs."""

    in_features: int
    out_features: int
    bias: bool
    activation_function: str
    use_residual: bool
    module_input_name: str
    labels: tuple[str, ...] | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that such a module has, by name."""
        square = (self.out_features, self.in_features)
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": square}
        if self.bias:
            shapes["linear.bias"] = (self.out_features,)
        if self.use_residual and self.in_features != self.out_features:
            shapes["residual.weight"] = square
        return shapes


def is_dense_config(config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a Dense module: it names no model and has its two sizes."""
    return {"in_features", "out_features"} <= config.keys() and not {"architectures", "model_type"} & config.keys()


def read_dense_config(path: Path) -> DenseConfig:
    """Read a Dense module's config. Raises FormatError naming the file and the key."""
    config = read_json(path)
    out_features = _get(path, config, "out_features", int)
    labels = None if config.get("id2label") is None else _labels(path, config["id2label"], out_features)
    input_name = _get(path, config, "module_input_name", str, default=POOLED)
    if input_name == POOLED and config.get("module_output_name") not in (None, POOLED):
        raise FormatError(f"{path}: module_output_name: expected {POOLED!r}, got {shown(config['module_output_name'])}")
    return DenseConfig(
        in_features=_get(path, config, "in_features", int),
        out_features=out_features,
        bias=_get(path, config, "bias", bool, default=True),
        activation_function=_get(path, config, "activation_function", str, default="torch.nn.modules.activation.Tanh"),
        use_residual=_get(path, config, "use_residual", bool, default=False),
        module_input_name=input_name,
        labels=labels,
    )


def check_dense_tensors(where: Path, config: DenseConfig, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise FormatError, naming file and tensor, unless name -> (dtype, shape) fit the config."""
    expected = config.shapes
    if missing := [name for name in expected if name not in tensors]:
        raise FormatError(f"{where}: no tensor {missing[0]!r}; expected {', '.join(expected)}, got {_listed(tensors)}")
    if unexpected := [name for name in tensors if name not in expected]:
        raise FormatError(
            f"{where}: unexpected tensor {shown(unexpected[0])}, config.json asks for {', '.join(expected)}"
        )
    for name, (dtype, shape) in tensors.items():
        if shape != expected[name]:
            raise FormatError(
                f"{where}: tensor {name!r} has shape {list(shape)}, config.json asks for {list(expected[name])}"
            )
        if dtype not in DTYPES:
            raise FormatError(f"{where}: tensor {name!r} is {dtype}, expected a floating type ({', '.join(DTYPES)})")


def _get(path: Path, config: Mapping[str, Any], key: str, type_: type[Any], default: Any = None) -> Any:
    value = config.get(key, default)
    # A bool is an int to Python, and a size of nothing is none.
    if type(value) is not type_ or (type_ is int and not 0 < value <= MAX_SIZE):
        what = {int: "a positive integer", bool: "true or false", str: "a text"}[type_]
        raise FormatError(f"{path}: {key}: expected {what}, got {shown(value)}")
    return value


def _labels(path: Path, id2label: Any, num: int) -> tuple[str, ...]:
    is_table = isinstance(id2label, dict) and len(id2label) == num  # first: a damaged size must not fill memory
    found = [id2label.get(str(number)) for number in range(num)] if is_table else []
    names = tuple(name for name in found if isinstance(name, str) and name)
    if len(set(names)) != num:
        raise FormatError(
            f"{path}: id2label: expected a different name for each of 0 to {num - 1}, got {shown(id2label)}"
        )
    return names


def _listed(names: Collection[str]) -> str:
    return ", ".join(list(names)[:3]) + ", …" * (len(names) > 3) if names else "none"
