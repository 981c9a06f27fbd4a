"""The manifest: what a model consists of and where its bytes are. Small JSON, no tensor data.

A *tensor* lives in an *extent*, an extent in a *pack*. The extent is the unit of everything after the disk:
it is read, verified, put into shared memory, leased and evicted as a whole.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from weights.errors import StoreVersionError, WeightsError

MANIFEST_VERSION = 1
ModelKind = Literal["diffusion", "llm", "embedding", "adapter"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorRef(_Record):
    """One tensor: C order, little-endian, `offset` bytes into its extent; `sha256` is its identity."""

    extent: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class ExtentRef(_Record):
    """A run of a pack file: `offset` and `nbytes` in `pack` (a file name in the store), xxh3-128 of its bytes."""

    id: str
    pack: str
    offset: int
    nbytes: int
    checksum: str


class Component(_Record):
    """One named module of a model: its class, its folder in the skeleton, its tensors.

    `class_name` None means that the folder's own config.json names the architecture. `config_hash` is the sha256
    of that config.json.
    """

    name: str
    library: str
    class_name: str | None
    folder: str
    tensors: dict[str, TensorRef]
    config_hash: str = ""
    metadata: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @functools.cached_property
    def module_key(self) -> str:
        """Identity of the built module: equal weights under an equal config make the same module."""
        return hashlib.sha256(f"{self.class_name}\0{self.config_hash}\0{self.weights_hash}".encode()).hexdigest()

    @functools.cached_property
    def weights_hash(self) -> str:
        """Identity of the weights: equal for equal names, dtypes, shapes and bytes, wherever they are stored."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            ref = self.tensors[name]
            digest.update(f"{name}\0{ref.dtype}\0{ref.shape}\0{ref.sha256}\n".encode())
        return digest.hexdigest()


class Manifest(_Record):
    """A model in the store. `skeleton` is the folder with everything of it but the weights (configs, tokenizers)."""

    version: Literal[1] = 1
    model: str
    kind: ModelKind
    class_name: str | None
    skeleton: str
    source: str
    fingerprint: str
    components: dict[str, Component]
    extents: dict[str, ExtentRef]

    @property
    def nbytes(self) -> int:
        return sum(component.nbytes for component in self.components.values())

    def extents_of(self, components: Iterable[str]) -> tuple[ExtentRef, ...]:
        """The extents that hold these components, each once, in a stable order."""
        ids = {ref.extent for name in components for ref in self.components[name].tensors.values()}
        return tuple(self.extents[id_] for id_ in sorted(ids))


def read_manifest(path: Path) -> Manifest:
    """Raises WeightsError naming the file when it is damaged, StoreVersionError when it is too new."""
    text = path.read_bytes()
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("version",):
            raise StoreVersionError(
                f"{path}: manifest version {first['input']!r}, this library reads version {MANIFEST_VERSION}"
            ) from None
        where = ".".join(str(part) for part in first["loc"])
        raise WeightsError(f"{path}: damaged manifest at {where or 'top level'}: {first['msg']}") from None


def extent_id(tensor_hashes: Iterable[str]) -> str:
    """Identity of an extent: the identities of its tensors, in order."""
    return hashlib.sha256("\n".join(tensor_hashes).encode()).hexdigest()[:32]
