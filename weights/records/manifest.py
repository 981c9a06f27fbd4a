"""The manifest: what a model consists of and where its bytes are. Small JSON, no tensor data.

A *tensor* lives in an *extent*, an extent in a *pack*. The extent is the unit of everything after the disk:
it is read, verified, put into shared memory, leased and evicted as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from weights.records.dtypes import BLOCK_SIZES, ITEM_BYTES, tensor_nbytes
from weights.records.errors import StoreVersionError, WeightsError

MAX_RANK: Final = 64  # numpy's and torch's own


MANIFEST_VERSION: Final = 2  # with deltas; a manifest without one says 1, as before there were any
MAX_MANIFEST_BYTES: Final = 256 * 2**20  # a pipeline of 10,000 tensors has 3 MiB; a damaged length must not fill memory
TENSOR_ALIGNMENT: Final = 512  # of the combined layout, as in Ascend GE's external weights
EXTENT_ALIGNMENT: Final = 4096  # direct I/O wants blocks
MAX_BASES: Final = 4096  # extents that one delta is against
DELTA_KEY: Final = "delta-"  # before a delta's checksum, where nodes ask each other for it: no extent's id begins so

# "head": a linear layer above an encoder's pooled vector (a classifier's, say). "upscaler": enlarges images. "tensors":
# weights without an architecture of their own (a bare file); "program": a torch.export or ONNX graph.
ModelKind = Literal[
    "diffusion",
    "llm",
    "embedding",
    "reranker",
    "classifier",
    "head",
    "upscaler",
    "adapter",
    "controlnet",
    "ip_adapter",
    "tensors",
    "program",
]
# inline: in the model's own files. separate: `weight_<sha256>` per tensor. combined: `<model>_weight_combined`.
Layout = Literal["inline", "separate", "combined"]
# What the weight files were, so that they can be written again.
WeightFormat = Literal["safetensors", "gguf", "kuiper", "torch", "onnx", "exported"]
_BUILT_FROM_CONFIG: Final = frozenset({"diffusers", "transformers", "sentence_transformers"})


def _inside(path: str) -> str:
    """Refuse a path that could leave the folder it is joined to: absolute, with `..` or NUL."""
    parts = PurePosixPath(path).parts
    if not path or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
        raise ValueError(f"{path!r} is not a relative path inside its folder")
    return path


InsidePath = Annotated[str, AfterValidator(_inside)]
Hex128 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Hex256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, lt=2**63)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorRef(_Record):
    """A tensor in an extent: C order, little-endian, `offset` bytes into it; `sha256` is its identity."""

    extent: str
    offset: Size
    nbytes: Size
    dtype: str
    shape: Annotated[tuple[Size, ...], Field(max_length=MAX_RANK)]
    sha256: Hex256

    @model_validator(mode="after")
    def _size_fits(self) -> Self:
        expected = tensor_nbytes(self.dtype, self.shape)
        if expected != self.nbytes:
            raise ValueError(f"{self.dtype} {list(self.shape)} takes {expected} bytes, not {self.nbytes}")
        return self

    @property
    def strides(self) -> tuple[int, ...]:
        """The elements from one index to the next, by dimension; of blocks, the bytes (`memory_form`)."""
        if self.dtype in BLOCK_SIZES:
            elements, nbytes = BLOCK_SIZES[self.dtype]
            return _contiguous_strides((*self.shape[:-1], self.shape[-1] // elements * nbytes))
        return _contiguous_strides(self.shape)

    def part(self, dimension: int, start: int, stop: int) -> SlicedRef:
        """Return the part from `start` to `stop` along a dimension: a tensor of its own, in the bytes of this one.

        Raises WeightsError for a range that is not in the tensor, and for one that does not begin and end at blocks.
        """
        if dimension not in range(len(self.shape)) or not 0 <= start <= stop <= self.shape[dimension]:
            raise WeightsError(f"{start} to {stop} of dimension {dimension} is no part of {list(self.shape)}")
        elements, nbytes = BLOCK_SIZES.get(self.dtype) or (1, ITEM_BYTES[self.dtype])
        is_last = dimension == len(self.shape) - 1
        if is_last and (start % elements or stop % elements):
            raise WeightsError(f"{start} to {stop} of {self.dtype} is no part: its blocks have {elements} elements")
        shape, steps = (*self.shape[:dimension], stop - start, *self.shape[dimension + 1 :]), self.strides
        place = start // elements * nbytes if is_last else start * steps[dimension] * ITEM_BYTES.get(self.dtype, 1)
        return SlicedRef(
            extent=self.extent,
            offset=self.offset + place,
            nbytes=tensor_nbytes(self.dtype, shape),
            dtype=self.dtype,
            shape=shape,
            sha256=_identity([self.sha256, dimension, start, stop]),
            steps=steps,
        )


class SlicedRef(TensorRef):
    """A part of a stored tensor, as one process of several has it. Never stored itself; `offset` is its first byte."""

    steps: tuple[int, ...]

    @property
    def strides(self) -> tuple[int, ...]:
        """The elements from one index to the next: those of the whole tensor."""
        return self.steps


class StoredRun(NamedTuple):
    """Bytes of a pack file, in whatever form."""

    pack: str
    offset: int
    nbytes: int


class ExtentRef(_Record):
    """A run of a pack file: `offset` and `nbytes` in `pack` (a path in the store's packs/), xxh3-128 of its bytes.

    With a `delta` its bytes can be had from that as well; `pack` and `offset` are those of the delta where the plain
    bytes are stored no more.
    """

    id: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    pack: InsidePath
    offset: Size
    nbytes: Size
    checksum: Hex128
    delta: DeltaRef | None = Field(default=None, exclude_if=lambda delta: delta is None)

    @property
    def has_plain(self) -> bool:
        """Return whether its plain bytes are stored."""
        return self.delta is None or (self.pack, self.offset) != (self.delta.pack, self.delta.offset)

    @property
    def plain(self) -> ExtentRef:
        """The extent without its delta."""
        return self.model_copy(update={"delta": None}) if self.delta else self

    def forms(self) -> Iterator[ExtentRef]:
        """Yield the extent as it is stored, once for each form: plain, and as a delta alone."""
        if self.has_plain:
            yield self.plain
        if self.delta:
            yield self.model_copy(update={"pack": self.delta.pack, "offset": self.delta.offset})

    def part(self, offset: int, nbytes: int) -> ExtentRef:
        """Return bytes of the plain extent as one; its checksum is that of the whole."""
        return ExtentRef.model_construct(
            id=self.id, pack=self.pack, offset=self.offset + offset, nbytes=nbytes, checksum=self.checksum, delta=None
        )

    def runs(self) -> Iterator[StoredRun]:
        """Yield all bytes on disk that belong to it: plain, its delta, and the delta's bases."""
        if self.has_plain:
            yield StoredRun(self.pack, self.offset, self.nbytes)
        if self.delta:
            yield StoredRun(self.delta.pack, self.delta.offset, self.delta.nbytes)
            for base in self.delta.bases:
                yield from base.runs()


class DeltaRef(_Record):
    """An extent as its lossless difference from tensors of others (`weights/reading/delta_codec.py`).

    It is a run of a pack file, with the xxh3-128 of its bytes, against `bases`, which are plain: one hop.
    """

    pack: InsidePath
    offset: Size
    nbytes: Size
    checksum: Hex128
    codec: Literal["xor-planes-zstd-1"]
    bases: Annotated[tuple[ExtentRef, ...], Field(min_length=1, max_length=MAX_BASES)]

    @model_validator(mode="after")
    def _is_one_hop(self) -> Self:
        if any(base.delta for base in self.bases):
            raise ValueError("the base of a delta is a delta itself")
        return self

    @property
    def key(self) -> str:
        """The name under which nodes ask each other for it, in place of an extent's id."""
        return DELTA_KEY + self.checksum

    def stored(self, id_: str) -> ExtentRef:
        """Return the delta's own bytes, of extent `id_`, as they are read."""
        return ExtentRef(id=id_, pack=self.pack, offset=self.offset, nbytes=self.nbytes, checksum=self.checksum)


ExtentRef.model_rebuild()


class ViewRow(NamedTuple):
    """A tensor's place in its extent, seen as elements of its dtype; strides and offset in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Component(_Record):
    """A named module of a model: its class, its folder in the skeleton, its tensors.

    `class_name` None means that the folder's own config.json names the architecture. `config_hash` is the sha256
    of that config.json, or of the header of a file that needs none (GGUF, Kuiper); `parts_hash` the identity of the
    other files that a text encoder is built from ("" for other components; None in a manifest that was written before
    there was one). `format` and `files` (names in that folder) say what the weights were in, for `inline`.
    """

    name: str
    library: str
    class_name: str | None
    folder: InsidePath
    tensors: dict[str, TensorRef]
    config_hash: str = ""
    parts_hash: str | None = None
    metadata: dict[str, str] = {}
    format: WeightFormat = "safetensors"
    files: tuple[InsidePath, ...] = ()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy without cached properties. HAZARD: pydantic would copy these along with the fields."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def sliced(self, parts: Mapping[str, tuple[int, int, int]]) -> Component:
        """Return the component with parts of some tensors: by name the dimension, and from where to where.

        Raises WeightsError for what is no part.
        """
        cut = {name: ref.part(*parts[name]) if name in parts else ref for name, ref in self.tensors.items()}
        return self.model_copy(update={"tensors": cut})

    # What a switch asks for again and again is worked out once: a transformer has a thousand tensors.

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @functools.cached_property
    def bytes_by_hash(self) -> Mapping[str, int]:
        """Bytes of the tensors by sha256: tied or equal ones count once."""
        return {tensor.sha256: tensor.nbytes for tensor in self.tensors.values()}

    @functools.cached_property
    def block_types(self) -> Mapping[str, str]:
        """The types of its block-quantized tensors, by name."""
        return {name: ref.dtype for name, ref in self.tensors.items() if ref.dtype in BLOCK_SIZES}

    @functools.cached_property
    def extent_ids(self) -> tuple[str, ...]:
        """The ids of the extents that hold it, each once, in a stable order."""
        return tuple(sorted({tensor.extent for tensor in self.tensors.values()}))

    @functools.cached_property
    def views(self) -> Mapping[tuple[str, str], tuple[ViewRow, ...]]:
        """Tensors that are plain views of an extent seen as elements of one dtype, by extent and dtype.

        Not in here: block-quantized, empty and unaligned ones.
        """
        groups: dict[tuple[str, str], list[ViewRow]] = {}
        for name, ref in self.tensors.items():
            item_bytes = ITEM_BYTES.get(ref.dtype)
            if item_bytes and ref.nbytes and not ref.offset % item_bytes:
                row = ViewRow(name, ref.shape, ref.strides, ref.offset // item_bytes)
                groups.setdefault((ref.extent, ref.dtype), []).append(row)
        return {key: tuple(rows) for key, rows in groups.items()}

    @functools.cached_property
    def structure_key(self) -> str:
        """Identity of the module's structure: class, config, and names, types and shapes of its tensors.

        "" for a component without a config of its own, whose structure nobody knows.
        """
        if not self.config_hash:
            return ""
        shapes = [(name, ref.dtype, ref.shape) for name, ref in sorted(self.tensors.items())]
        return _identity((self.library, self.class_name, self.config_hash, shapes))

    @functools.cached_property
    def module_key(self) -> str:
        """Identity of the built module: equal weights, config and parts make the same one.

        A LoRA's metadata counts, since its scales are in it. That of other weight files does not where their
        library builds from config.json and tensors alone.
        """
        metadata = {} if self.library in _BUILT_FROM_CONFIG else dict(self.metadata)
        metadata.pop("format", None)  # which library wrote the file
        facts = (self.library, self.class_name, self.config_hash, self.weights_hash, self.parts_hash or "", metadata)
        return _identity(facts)

    @functools.cached_property
    def weights_hash(self) -> str:
        """Identity of the weights: equal names, dtypes, shapes and bytes, wherever they are stored."""
        return _identity([(name, ref.dtype, ref.shape, ref.sha256) for name, ref in sorted(self.tensors.items())])


class Manifest(_Record):
    """A model in the store. `skeleton` is the folder with everything of it but the weights (configs, tokenizers).

    `fingerprint` is the identity of its contents, wherever they came from: equal ones are one version. `source_mark`
    says how the source looked when it was read ("" where nobody looks). `base` is the pipeline by which a control in
    one file was read: a model of the store, or a folder.
    """

    version: Literal[1, 2] = 1
    model: str
    kind: ModelKind
    class_name: str | None
    skeleton: InsidePath
    source: str
    fingerprint: str
    source_mark: str = ""
    base: str = ""
    layout: Layout = "combined"
    components: dict[str, Component]
    extents: dict[str, ExtentRef]

    @model_validator(mode="after")
    def _tensors_lie_in_their_extents(self) -> Self:
        for id_, extent in self.extents.items():
            if id_ != extent.id:
                raise ValueError(f"extent {id_!r} calls itself {extent.id!r}")
            if extent.delta and self.version == 1:
                raise ValueError(f"extent {id_} has a delta, which version 1 does not know")
            if self.layout != "inline" and extent.offset % EXTENT_ALIGNMENT:
                raise ValueError(f"extent {id_} begins at byte {extent.offset}, not a multiple of {EXTENT_ALIGNMENT}")
        places: dict[str, list[tuple[int, int, str]]] = {}
        for component in self.components.values():
            for name, ref in component.tensors.items():
                where = f"tensor {component.name}.{name}"
                holder = self.extents.get(ref.extent)
                if holder is None:
                    raise ValueError(f"{where} is in extent {ref.extent!r}, which the manifest does not have")
                if ref.offset + ref.nbytes > holder.nbytes:
                    raise ValueError(
                        f"{where} ends at byte {ref.offset + ref.nbytes} of extent {holder.id}, which has "
                        f"{holder.nbytes} bytes"
                    )
                if self.layout != "inline" and ref.offset % TENSOR_ALIGNMENT:
                    raise ValueError(f"{where} at byte {ref.offset} is not aligned to {TENSOR_ALIGNMENT} bytes")
                places.setdefault(ref.extent, []).append((ref.offset, ref.nbytes, where))
        for spans in places.values():
            _refuse_overlap(spans)
        return self

    @property
    def nbytes(self) -> int:
        return sum(component.nbytes for component in self.components.values())

    @property
    def plain_extents(self) -> dict[str, ExtentRef]:
        """Its extents whose plain bytes are stored, by id, without their deltas."""
        return {id_: extent.plain for id_, extent in self.extents.items() if extent.has_plain}

    def extents_of(self, components: Iterable[str]) -> tuple[ExtentRef, ...]:
        """Return the extents that hold these components, each once, in a stable order."""
        ids = {id_ for name in components for id_ in self.components[name].extent_ids}
        return tuple(self.extents[id_] for id_ in sorted(ids))

    def with_extents(self, extents: Mapping[str, ExtentRef]) -> Manifest:
        """Return the manifest with other places of some of its extents, in the version that they take."""
        places = self.extents | dict(extents)
        version = MANIFEST_VERSION if any(extent.delta for extent in places.values()) else 1
        return self.model_copy(update={"version": version, "extents": places})


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises WeightsError naming the file when damaged, StoreVersionError when too new."""
    with path.open("rb") as file:
        # Python allocates what is asked for, whatever the file has.
        text = file.read(min(os.fstat(file.fileno()).st_size, MAX_MANIFEST_BYTES) + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"{path}: damaged manifest: more than {MAX_MANIFEST_BYTES} bytes")
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("version",):
            raise StoreVersionError(
                f"{path}: manifest version {first['input']!r}, this library reads version {MANIFEST_VERSION} and before"
            ) from None
        where = ".".join(str(part) for part in first["loc"])
        raise WeightsError(f"{path}: damaged manifest at {where or 'top level'}: {first['msg']}") from None


def _refuse_overlap(spans: list[tuple[int, int, str]]) -> None:
    """Raise ValueError for partial overlaps: tied tensors have the very same bytes, others none in common."""
    spans.sort()
    for (offset, nbytes, name), (later, later_bytes, other) in itertools.pairwise(spans):
        if later < offset + nbytes and later_bytes and (later, later_bytes) != (offset, nbytes):
            raise ValueError(f"{other} overlaps {name}")


def extent_id(tensor_hashes: Iterable[str]) -> str:
    """Return the identity of an extent: a hash of the identities of its tensors, in order."""
    return hashlib.sha256("\n".join(tensor_hashes).encode()).hexdigest()[:32]


def _identity(facts: object) -> str:
    """Digest JSON, which keeps names of any characters apart; joined by a separator, a name could hold it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (
        (*itertools.accumulate(reversed(shape[1:]), lambda step, size: step * size, initial=1),)[::-1] if shape else ()
    )
