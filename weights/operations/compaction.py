"""Compaction: models of one structure are stored as deltas from one of them, and as plain bytes again on request.

A model is published anew with its extents in another form, like any other publish: packs staged and synced, index,
manifest last. What a run that was killed has finished stays, and the next one goes on after it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import xxhash

from weights.formats.tensors import FileTensor
from weights.memory.host_pool import ByteArray
from weights.operations.layouts import publish_again
from weights.platform.durable import disk_errors
from weights.reading.delta_codec import (
    CODEC,
    ByteSource,
    ChunkDecoder,
    Segment,
    chunk_sizes,
    encode_chunk,
    encode_header,
)
from weights.reading.extents import read_extent
from weights.records.dtypes import BLOCK_SIZES, ITEM_BYTES
from weights.records.errors import DiskFull, StoreError, WeightsError
from weights.records.manifest import EXTENT_ALIGNMENT, MAX_BASES, Component, DeltaRef, ExtentRef, Manifest, TensorRef
from weights.storage.hashing import HASH_THREADS, hash_tensors
from weights.storage.publishing import publish_places
from weights.storage.store import DecodedExtents, WeightStore, stored_tensors

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_Member = tuple[str, str]  # model and component

_NUM_SAMPLED: Final = 16  # tensors of a component, the largest
_SAMPLE_BYTES: Final = 16 * 1024  # of each
# A delta that is not smaller than this part of its extent is not worth decoding: the plain bytes stay.
_MAX_RATIO: Final = 0.9
# Bits of weights that have nothing to do with each other agree here and there: that makes no family.
_MAX_OF_ALONE: Final = 0.97
_Sample = Sequence[tuple[int, ByteArray]]  # bytes of an item, and some items, of the same tensors in all members


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Tensors of one kind ("BF16 matrix") in extents that became deltas: their bytes plain, and in the delta."""

    kind: str
    plain_bytes: int
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A model that was compacted, or would be: the models that its deltas are against, and its bytes in both forms.

    `plain_bytes` are of the extents that became deltas of `delta_bytes`; `left_bytes` of those that did not.
    """

    model: str
    bases: tuple[str, ...]
    plain_bytes: int
    delta_bytes: int
    left_bytes: int
    kinds: tuple[KindFigures, ...]


@dataclass(frozen=True, slots=True)
class CompactReport:
    """The models that became smaller, what stood against others, and the bytes that all manifests named before and
    name now; the difference goes with the next `gc`."""

    models: tuple[ModelFigures, ...]
    problems: tuple[str, ...]
    before_bytes: int
    after_bytes: int


def compact(
    store: WeightStore,
    *,
    keep_plain: bool = False,
    dry_run: bool = False,
    weight_dir: Path | None = None,
    progress: Progress | None = None,
) -> CompactReport:
    """Store siblings as deltas where that is smaller, the base of each family plain. `keep_plain`: plain as well.

    Families are components of one structure whose sampled bits are close. A base stays one as long as others need it.
    What is compacted already is skipped, and models in their own files (`inline`) are left alone. A model that cannot
    be read, or was published anew meanwhile, is reported, and nothing of it is changed. Raises StoreError when the disk
    is full or cannot be written.
    """
    if not store.path.is_dir():
        raise StoreError(f"{store.path}: no such store")
    manifests = {manifest.model: manifest for manifest in store.readable_manifests()}
    before_bytes = _named_bytes(manifests.values())
    run = _Compaction(store, manifests, _bases_of(store, manifests), keep_plain)
    figures, problems = [], []
    total_bytes, done_bytes = sum(manifests[model].nbytes for model in run.models), 0
    for model in run.models:
        try:
            found = run.compact_model(manifests[model], None if dry_run else weight_dir or store.path)
        except DiskFull:
            raise
        except WeightsError as error:
            problems.append(f"{model}: {error}")
        else:
            figures += [found] if found else []
        done_bytes += manifests[model].nbytes
        if progress:
            progress(done_bytes, total_bytes)
    return CompactReport(tuple(figures), tuple(problems), before_bytes, _named_bytes(manifests.values()))


def expand(
    store: WeightStore, models: Collection[str], weight_dir: Path | None = None, progress: Progress | None = None
) -> list[str]:
    """Store models plain again; return those that had deltas. All that is read of them is checked.

    Raises ModelNotStored, ExtentCorrupt when a delta or its base is damaged, StoreError when the disk is full.
    """
    expanded = []
    for manifest in [store.manifest(model) for model in models]:
        if any(extent.delta for extent in manifest.extents.values()):
            tensors = {part.name: stored_tensors(store, manifest, part) for part in manifest.components.values()}
            hashed = hash_tensors(tensors, progress=progress)
            publish_again(store, manifest, hashed, manifest.layout, weight_dir)
            expanded.append(manifest.model)
    return expanded


def _named_bytes(manifests: Collection[Manifest]) -> int:
    runs = {run for manifest in manifests for extent in manifest.extents.values() for run in extent.runs()}
    return sum(run.nbytes for run in runs)


def _bases_of(store: WeightStore, manifests: Mapping[str, Manifest]) -> dict[_Member, _Member]:
    """Return the base of each component that is to be stored as a delta."""
    families: dict[str, list[_Member]] = defaultdict(list)
    for manifest in manifests.values():
        for part in manifest.components.values() if manifest.layout != "inline" else ():
            if part.tensors and all(manifest.extents[id_].has_plain for id_ in part.extent_ids):
                families[_structure(part)].append((manifest.model, part.name))
    needed = _needed_bases(manifests)
    bases: dict[_Member, _Member] = {}
    for members in families.values():
        if len(members) > 1:
            parts = {(model, name): manifests[model].components[name] for model, name in members}
            samples = {member: _sample(store, manifests[member[0]], part) for member, part in parts.items()}
            bases |= _choose_bases(samples, _fixed(parts, needed))
    return bases


def _fixed(parts: Mapping[_Member, Component], needed: Collection[str]) -> list[_Member]:
    """Return the members that are bases already. One that only shares extents with a base has others as well."""
    found: dict[frozenset[str], _Member] = {}
    for member, part in sorted(parts.items(), key=lambda item: (len(item[1].extent_ids), item[0])):
        if ids := frozenset(part.extent_ids).intersection(needed):
            found.setdefault(ids, member)
    return list(found.values())


def _needed_bases(manifests: Mapping[str, Manifest]) -> set[str]:
    """Return the ids of extents that deltas are against."""
    extents = [extent for manifest in manifests.values() for extent in manifest.extents.values()]
    return {base.id for extent in extents if extent.delta for base in extent.delta.bases}


def _structure(part: Component) -> str:
    facts = [(name, ref.dtype, ref.shape) for name, ref in sorted(part.tensors.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _sample(store: WeightStore, manifest: Manifest, part: Component) -> _Sample:
    """Read some bytes from the middle of the largest tensors; unverified: they only say who is near to whom."""
    largest = sorted(part.tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))[:_NUM_SAMPLED]
    sample = []
    for _, ref in largest:
        extent, item_bytes = manifest.extents[ref.extent], _item_bytes(ref.dtype)
        num_items = min(ref.nbytes, _SAMPLE_BYTES) // item_bytes
        start = (ref.nbytes // item_bytes - num_items) // 2 * item_bytes
        place = extent.offset + ref.offset + start
        tensor = FileTensor(store.pack_files.path_of(extent.pack), place, num_items * item_bytes, "U8", ())
        try:
            items = np.frombuffer(tensor.read(), np.uint8)
        except WeightsError:  # the pack is damaged: it is near to nobody, and encoding it would say so
            items = np.zeros(tensor.nbytes, np.uint8)
        sample.append((item_bytes, items))
    return sample


def _item_bytes(dtype: str) -> int:
    return ITEM_BYTES.get(dtype) or BLOCK_SIZES[dtype][1]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment of an extent: where it begins, what it is of, and its counterpart in the base, if it has one."""

    start: int
    nbytes: int
    item_bytes: int
    kind: str
    base: ExtentRef | None = None
    base_model: str = ""
    offset: int = 0


@dataclass
class _Compaction:
    """State of one run. `manifests` follow what is published, or would be."""

    store: WeightStore
    manifests: dict[str, Manifest]
    bases: Mapping[_Member, _Member]
    keep_plain: bool
    _known: dict[str, DeltaRef] = field(default_factory=dict)  # by extent id: what several models share stays shared
    _protected: set[str] = field(default_factory=set)  # ids of extents that are bases: plain, as long as they are

    def __post_init__(self) -> None:
        self._protected |= _needed_bases(self.manifests)
        for model, name in self.bases.values():
            self._protected.update(self.manifests[model].components[name].extent_ids)
        for manifest in self.manifests.values():
            self._known |= {extent.id: extent.delta for extent in manifest.extents.values() if extent.delta}

    @property
    def models(self) -> list[str]:
        """Names of all models that may have something to compact."""
        return [name for name, manifest in sorted(self.manifests.items()) if manifest.layout != "inline"]

    def compact_model(self, manifest: Manifest, staging: Path | None) -> ModelFigures | None:
        """Publish one model with deltas; with no `staging`, only say what would come of it. None: nothing to do."""
        if staging is None:
            after, figures = self._encode(manifest, None, "")
        else:
            pack = f"{manifest.model}_deltas.{uuid.uuid4().hex[:8]}"
            with disk_errors(staging, 0), self.store.staged("deltas", staging) as path:
                with path.open("wb") as file:
                    after, figures = self._encode(manifest, file, pack)
                    file.flush()
                    os.fsync(file.fileno())
                if after != manifest:
                    is_new = any(extent.delta and extent.delta.pack == pack for extent in after.extents.values())
                    publish_places(self.store, manifest, after, {pack: path} if is_new else {})
        if after == manifest:
            return None
        self.manifests[manifest.model] = after
        self._known |= {extent.id: extent.delta for extent in after.extents.values() if extent.delta}
        return figures

    def _encode(self, manifest: Manifest, file: BinaryIO | None, pack: str) -> tuple[Manifest, ModelFigures]:
        writer = _DeltaWriter(self.store, file, pack)
        tensors: dict[str, list[tuple[str, str, TensorRef]]] = defaultdict(list)
        for part in manifest.components.values():
            for name, ref in part.tensors.items():
                tensors[ref.extent].append((part.name, name, ref))
        after, models = {}, set[str]()
        for id_, extent in manifest.extents.items():
            if (extent.delta and (self.keep_plain or not extent.has_plain)) or id_ in self._protected:
                continue
            delta = extent.delta or self._known.get(id_)
            if delta is None:
                pieces = self._pieces(manifest, extent, tensors[id_])
                delta = writer.add(extent, pieces)
                models |= {piece.base_model for piece in pieces if delta and piece.base}
            if delta:
                place = {} if self.keep_plain else {"pack": delta.pack, "offset": delta.offset}
                after[id_] = extent.model_copy(update={"delta": delta, **place})
        plain_bytes = sum(extent.nbytes for extent in after.values())
        figures = ModelFigures(
            model=manifest.model,
            bases=tuple(sorted(models)),
            plain_bytes=plain_bytes,
            delta_bytes=sum(extent.delta.nbytes for extent in after.values() if extent.delta),
            left_bytes=sum(extent.nbytes for extent in manifest.extents.values()) - plain_bytes,
            kinds=writer.kinds(),
        )
        return (manifest.with_extents(after) if after else manifest), figures

    def _pieces(
        self, manifest: Manifest, extent: ExtentRef, tensors: Sequence[tuple[str, str, TensorRef]]
    ) -> list[_Piece]:
        """Cut an extent into its tensors and what is between them; [] when no tensor has a counterpart elsewhere."""
        pieces: list[_Piece] = []
        position = 0
        for component, name, ref in sorted(tensors, key=lambda found: found[2].offset):
            if ref.offset < position or not ref.nbytes:  # tied to the one before it, or empty
                continue
            if ref.offset > position:
                pieces.append(_Piece(position, ref.offset - position, 1, "padding"))
            kind = f"{ref.dtype} {'matrix' if len(ref.shape) > 1 else 'vector'}"
            piece = _Piece(ref.offset, ref.nbytes, _item_bytes(ref.dtype), kind)
            model, part = self.bases.get((manifest.model, component), ("", ""))
            if model:
                other = self.manifests[model].components[part].tensors[name]
                base = self.manifests[model].extents[other.extent]
                if base.has_plain and base.id != extent.id:
                    piece = _Piece(*_start_of(piece), base.plain, model, other.offset)
            pieces.append(piece)
            position = ref.offset + ref.nbytes
        if position < extent.nbytes:
            pieces.append(_Piece(position, extent.nbytes - position, 1, "padding"))
        return pieces if any(piece.base for piece in pieces) else []


def _start_of(piece: _Piece) -> tuple[int, int, int, str]:
    return piece.start, piece.nbytes, piece.item_bytes, piece.kind


class _DeltaWriter:
    """Appends deltas to a pack; without a file it only counts."""

    def __init__(self, store: WeightStore, file: BinaryIO | None, pack: str) -> None:
        self._store = store
        self._file = file
        self._pack = pack
        self._position = 0
        self._bases = DecodedExtents(store.packs)
        self._plain: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()

    def add(self, extent: ExtentRef, pieces: Sequence[_Piece]) -> DeltaRef | None:
        """Write the extent's delta. None when it has no base, or is not small enough. Raises ExtentCorrupt."""
        bases = tuple(dict.fromkeys(piece.base for piece in pieces if piece.base))
        if not 1 <= len(bases) <= MAX_BASES:
            return None
        target = read_extent(self._store.packs, extent.plain)
        segments = [Segment(p.nbytes, p.item_bytes, bases.index(p.base) if p.base else None, p.offset) for p in pieces]
        parts = [encode_header(segments)]
        sizes: Counter[str] = Counter()
        for piece, segment in zip(pieces, segments, strict=True):
            for chunk in self._chunks(target, piece, segment):
                parts.append(chunk)
                sizes[piece.kind] += len(chunk)
        nbytes = sum(map(len, parts))
        if nbytes >= _MAX_RATIO * extent.nbytes:
            return None
        self._stored += sizes
        for piece in pieces:
            self._plain[piece.kind] += piece.nbytes
        return self._write(parts, nbytes, bases)

    def kinds(self) -> tuple[KindFigures, ...]:
        """Return the bytes of what was written, by kind of tensor."""
        return tuple(KindFigures(kind, self._plain[kind], self._stored[kind]) for kind in sorted(self._plain))

    def _chunks(self, target: ByteArray, piece: _Piece, segment: Segment) -> Iterator[bytes]:
        base = self._bases.bytes_of(piece.base) if piece.base else None

        def encode(place: tuple[int, int]) -> bytes:
            start, nbytes = place
            chunk = target[piece.start + start : piece.start + start + nbytes]
            other = None if base is None else base[piece.offset + start : piece.offset + start + nbytes]
            return _encoded(chunk, segment.item_bytes, other)

        sizes = list(chunk_sizes(segment))
        places = [(sum(sizes[:1]) * number, nbytes) for number, nbytes in enumerate(sizes)]
        if len(places) == 1:
            yield encode(places[0])
            return
        with concurrent.futures.ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="encode") as threads:
            yield from threads.map(encode, places)

    def _write(self, parts: Sequence[bytes], nbytes: int, bases: tuple[ExtentRef, ...]) -> DeltaRef:
        padding = -self._position % EXTENT_ALIGNMENT
        digest = xxhash.xxh3_128()
        if self._file:
            self._file.write(bytes(padding))
        for part in parts:
            digest.update(part)
            if self._file:
                self._file.write(part)
        offset = self._position + padding
        self._position = offset + nbytes
        return DeltaRef(
            pack=self._pack or "-",
            offset=offset,
            nbytes=nbytes,
            checksum=digest.hexdigest(),
            codec=CODEC,
            bases=bases,
        )


def _encoded(chunk: ByteArray, item_bytes: int, base: ByteArray | None) -> bytes:
    """Encode a chunk, and decode it again: the plain bytes are given up for it."""
    data = encode_chunk(chunk, item_bytes, base)
    decoder = ChunkDecoder()
    is_difference, frames, frame_bytes = decoder.frames(ByteSource([memoryview(data)]), chunk.nbytes, item_bytes)
    if decoder.decode(chunk.nbytes, item_bytes, frames, frame_bytes, base if is_difference else None) != chunk.data:
        raise StoreError("a chunk of a delta does not decode to what was encoded; nothing was changed")
    return data


def _choose_bases(samples: Mapping[_Member, _Sample], fixed: Collection[_Member] = ()) -> dict[_Member, _Member]:
    """Return the base of each member that is to be a delta. One hop: a base is in no delta itself.

    Members have one structure. `fixed` are bases already, and stay. Of the others each joins the nearest of these that
    it is near to; then medoids become bases, each of those that are near, until nobody is left.
    """

    @functools.cache
    def distance(one: _Member, other: _Member) -> float:
        return _bit_distance(samples[one], samples[other])

    bases: dict[_Member, _Member] = {}
    free = [member for member in samples if member not in fixed]
    for member in free:
        nearest = min(fixed, key=functools.partial(distance, member), default=None)
        if nearest is not None and _is_near(samples[member], samples[nearest]):
            bases[member] = nearest
    left = [member for member in free if member not in bases]
    while len(left) > 1:
        sums = {base: sum(distance(base, member) for member in left) for base in left}
        medoid = min(left, key=sums.__getitem__)
        joined = [m for m in left if m != medoid and _is_near(samples[m], samples[medoid])]
        bases |= dict.fromkeys(joined, medoid)
        left = [member for member in left if member not in (medoid, *joined)]
    return bases


def _bit_distance(sample: _Sample, other: _Sample) -> float:
    """Return the part of the bits that differ, 0 to 1."""
    num_bytes = sum(items.nbytes for _, items in sample)
    num_bits = sum(int(np.bitwise_count(a ^ b).sum()) for (_, a), (_, b) in zip(sample, other, strict=True))
    return num_bits / (8 * num_bytes) if num_bytes else 0.0


def _is_near(sample: _Sample, base: _Sample) -> bool:
    """Return whether the sample is well stored as a difference, and better so than through the same codec alone."""
    num_bytes = sum(items.nbytes for _, items in sample)
    alone = sum(len(encode_chunk(items, size, None)) for size, items in sample)
    encoded = sum(len(encode_chunk(a, size, b)) for (size, a), (_, b) in zip(sample, base, strict=True))
    return encoded < _MAX_RATIO * num_bytes and encoded < _MAX_OF_ALONE * alone
