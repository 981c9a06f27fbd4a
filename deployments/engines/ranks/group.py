"""The group of one model's ranks: rank 0 says what the next step is, all compute it, and exchange tensors.

Plans are JSON, and tensors go by collectives. Each rank gets the same bits of a sum, whose order is that of the ranks:
it depends neither on the other elements of a tensor nor on the way that a library takes for its size.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from deployments.engines.ranks.layout import AXES, Axis, RankLayout
from deployments.engines.ranks.links import STORES, Link, Store, TorchLink
from deployments.engines.ranks.mailboxes import SharedLink

Plan = Mapping[str, Any]
Form = tuple[str, list[int]]  # the name of a dtype, and a shape
_FRAME: Final = 4096  # bytes of the first message of a plan: most plans have no second one
_LENGTH: Final = 8  # bytes of a frame that say how long the plan is
_MAX_PLAN: Final = 64 * 2**20
_IDLE_S: Final = 10.0 * 365 * 24 * 3600  # followers wait as long as rank 0 has no work
_SMALL: Final = 64 * 2**10  # bytes of a sum that takes one round: a second one would cost more than it saves
_NOTICE_S: Final = 2.0  # for the others to say that they are there
HOST: Final = torch.device("cpu")


class RankLost(RuntimeError):
    """A rank is gone or stands still, and its group with it. `ranks` are those that it can be."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankGroup:
    """One rank's view of its group. Not thread-safe: all ranks make the same calls in the same order.

    A call that meets `bound_s` raises RankLost, and so does each one after it: the group has ended.
    """

    def __init__(
        self, layout: RankLayout, rank: int, store: Store, links: Mapping[Axis | None, Link], bound_s: float
    ) -> None:
        """`links` are those of all ranks (None), and of this rank's peers along each axis with more than one."""
        self.layout, self.rank, self.place = layout, rank, layout.place(rank)
        self.bound_s = bound_s
        self._store, self._links = store, dict(links)
        self._lost: RankLost | None = None
        self.sent_bytes: Counter[Axis | None] = Counter()  # that this rank sent, by axis; None: of plans

    @classmethod
    def join(
        cls,
        layout: RankLayout,
        rank: int,
        store: Store,
        *,
        bound_s: float,
        device: torch.device = HOST,
        address: str = "127.0.0.1",
    ) -> RankGroup:
        """Meet the other ranks in `store`, which serves this group alone, at this rank's `address`.

        Tensors of a card's `device` go from card to card, all others by the host: through its memory between ranks of
        one node.

        Raises:
            RankLost: not all of them come within `bound_s`.
        """
        links: dict[Axis | None, Link] = {}
        wanted: list[tuple[Axis | None, tuple[int, ...]]] = [(None, tuple(range(layout.size)))]
        wanted += [(axis, layout.peers(rank, axis)) for axis in AXES]
        own = HOST if device.type != "cuda" else device
        try:
            for axis, members in wanted:
                if len(members) > 1:
                    within = STORES.PrefixStore(f"{axis}/{members[0]}/", store)
                    place = HOST if axis is None else own
                    number, count = members.index(rank), len(members)
                    shared = SharedLink.join(within, number, count) if place.type == "cpu" else None
                    links[axis] = shared or TorchLink(within, number, count, place, address, bound_s)
        except RuntimeError as error:
            found = f"rank {rank} did not meet all of {layout.size} ranks within {bound_s:g} s: {_first_line(error)}"
            raise RankLost(found, [other for other in range(layout.size) if other != rank]) from None
        return cls(layout, rank, store, links, bound_s)

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return int(getattr(self.layout, axis))

    def say(self, plan: Plan | None) -> None:
        """Tell the followers of a step, which they `hear`; None ends them. Of rank 0."""
        link = self._links.get(None)
        if link is None:
            return
        body = json.dumps(plan, separators=(",", ":")).encode()
        if len(body) > _MAX_PLAN:
            raise ValueError(f"a plan of {len(body)} bytes: {_MAX_PLAN} are the most")
        whole = len(body).to_bytes(_LENGTH, "big") + body
        first = torch.frombuffer(bytearray(whole[:_FRAME].ljust(_FRAME, b"\0")), dtype=torch.uint8)
        with self._watched(None):
            link.broadcast(first, self.bound_s)
            if len(whole) > _FRAME:
                link.broadcast(torch.frombuffer(bytearray(whole[_FRAME:]), dtype=torch.uint8), self.bound_s)
        self.sent_bytes[None] += max(len(whole), _FRAME) * (link.size - 1)

    def hear(self) -> Plan | None:
        """Wait until rank 0 says the next step, for as long as it has none; return None at the end."""
        link = self._links[None]
        first = torch.empty(_FRAME, dtype=torch.uint8)
        with self._watched(None):
            link.broadcast(first, _IDLE_S)
            frame = first.numpy().tobytes()
            length = int.from_bytes(frame[:_LENGTH], "big")
            if length > _MAX_PLAN:
                raise RuntimeError(f"a plan of {length} bytes came: {_MAX_PLAN} are the most")
            body = frame[_LENGTH : _LENGTH + length]
            if len(body) < length:
                rest = torch.empty(length - len(body), dtype=torch.uint8)
                link.broadcast(rest, self.bound_s)
                body += rest.numpy().tobytes()
        heard: Plan | None = json.loads(body)
        return heard

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors to the followers, which `receive` them by the `forms_of` that a plan names. Of rank 0."""
        link = self._links.get(None)
        if link is None or not tensors:
            return
        with self._watched(None):  # the followers wait already
            whole = torch.cat([_bytes_of(one) for one in tensors])
            link.broadcast(whole, self.bound_s)
        self.sent_bytes[None] += whole.nbytes * (link.size - 1)

    def receive(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        """Return the tensors that rank 0 spreads, on the host."""
        kinds = [(_dtype(name), shape) for name, shape in forms]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        if len(kinds):
            with self._watched(None):
                self._links[None].broadcast(whole, self.bound_s)
        # A part may begin where an element of its type cannot.
        parts = [part.clone() for part in torch.split(whole, sizes)]
        return [part.view(dtype).view(shape) for part, (dtype, shape) in zip(parts, kinds, strict=True)]

    def gather(self, tensor: torch.Tensor, axis: Axis) -> Sequence[torch.Tensor]:
        """Return the tensors of this rank's peers along an axis, all of one shape, in the order of their places."""
        link = self._links.get(axis)
        if link is None:
            return (tensor,)
        with self._watched(axis):
            found = link.gather_all(_sendable(tensor), self.bound_s)
        self.sent_bytes[axis] += tensor.nbytes * (link.size - 1)
        return [one.to(tensor.device) for one in found]

    def exchange(self, parts: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Send part i of `parts` (peers, ...) to peer i along an axis; return those for this rank, by their places."""
        link = self._links.get(axis)
        if link is None:
            return parts
        with self._watched(axis):
            found = link.exchange(_sendable(parts), self.bound_s)
        self.sent_bytes[axis] += parts.nbytes // link.size * (link.size - 1)
        return found.to(parts.device)

    def all_reduce(self, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Return the sum of the peers' tensors along an axis, in the dtype of `tensor`, added up in float32 or wider.

        `(n - 1) / n` of two tensors are sent, or, of a small one and between two ranks, n - 1 of them in one round.
        """
        link = self._links.get(axis)
        if link is None:
            return tensor
        if link.size == 2 or tensor.nbytes <= _SMALL:
            return _summed(self.gather(tensor, axis))
        flat = tensor.flatten()
        missing = -len(flat) % link.size
        parts = torch.nn.functional.pad(flat, (0, missing)).view(link.size, -1)
        own = _summed(self.exchange(parts, axis).unbind())
        return torch.cat(list(self.gather(own, axis)))[: len(flat)].view(tensor.shape)

    def close(self) -> None:
        """End the group; rank 0 tells the followers."""
        if self.rank == 0 and self._lost is None:
            with contextlib.suppress(RankLost):
                self.say(None)
        self.leave()

    def leave(self) -> None:
        """End this rank's part without a word: the others' calls fail, and so do its own that follow."""
        self._lost = self._lost or RankLost(f"rank {self.rank} has left its group", [self.rank])
        for link in self._links.values():
            link.close()

    @contextlib.contextmanager
    def _watched(self, axis: Axis | None) -> Iterator[None]:
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except RuntimeError as error:
            self.leave()
            self._lost = self._missed(axis, error)
            raise self._lost from None

    def _missed(self, axis: Axis | None, error: RuntimeError) -> RankLost:
        """Return the loss, by the ranks that do not say that a call of theirs failed, too."""
        others = [one for one in range(self.layout.size) if one != self.rank]
        doing = "a plan" if axis is None else f"an exchange of {self.size(axis)} ranks ({axis})"
        reason = f"rank {self.rank} of {self.layout.size}: {doing} failed: {_first_line(error)}"
        if len(others) == 1:
            return RankLost(f"rank {others[0]} does not answer ({reason})", others)
        try:
            self._store.set(f"ended/{self.rank}", "")
            missing = [one for one in others if not self._has_ended(one)]
        except RuntimeError:
            return RankLost(f"rank 0 does not answer ({reason})", [0])  # it has the store
        named = ", ".join(map(str, missing))
        found = f"ranks that do not answer: {named}" if missing else "all ranks answer"
        return RankLost(f"{found} ({reason})", missing)

    def _has_ended(self, rank: int) -> bool:
        key = f"ended/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=min(_NOTICE_S, self.bound_s)))
        except STORES.DistStoreError:
            return False
        return True


def forms_of(tensors: Sequence[torch.Tensor]) -> list[Form]:
    """Return the names of the dtypes and the shapes of tensors, for a plan."""
    return [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in tensors]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} came, expected the name of a dtype")
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes on the host."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element that was expanded has a stride of 0


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory that a library sends from: that of a card or of the host, not of a simulated device."""
    return tensor if tensor.is_cuda else tensor.cpu()


def _summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of the parts, in float32 or wider, rounded once to their dtype."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
