"""The exchange of ranks on devices: by the library of a card alone, and between two devices where there are two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import distributed

from deployments.engines.ranks.group import RankGroup, forms_of
from deployments.engines.ranks.layout import RankLayout
from deployments.engines.ranks.links import TorchLink

BOUND_S = 60.0


def test_one_rank_exchanges_with_itself(device: torch.device) -> None:
    """On a card this is its own library, which a group of one rank never begins."""
    place = device if device.type == "cuda" else torch.device("cpu")
    link = TorchLink(distributed.HashStore(), 0, 1, place, "127.0.0.1", BOUND_S)
    own = torch.randn(3, 5, device=place)
    sent = own.clone()
    link.broadcast(sent, BOUND_S)
    assert torch.equal(sent, own)
    assert torch.equal(torch.stack(list(link.gather_all(own, BOUND_S))), own[None])
    assert torch.equal(link.exchange(own[None], BOUND_S), own[None])
    link.close()


def test_two_devices_exchange(device: torch.device, second_device: torch.device) -> None:
    """Results are on a rank's own device: sums in the order of the ranks, heads for tokens, and what rank 0 says."""
    devices, store, layout = (device, second_device), distributed.HashStore(), RankLayout(tensor=2)
    rows, parts = torch.randn(2, 300, 257), torch.randn(2, 2, 7)

    def rank_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group = RankGroup.join(layout, rank, store, bound_s=BOUND_S, device=devices[rank])
        if rank:
            (said,) = group.receive((group.hear() or {})["forms"])
        else:
            said = rows[0]
            group.say({"forms": forms_of([said])})
            group.spread([said.to(devices[rank])])
        found: Any = group.all_reduce(rows[rank].to(devices[rank]), "tensor")
        exchanged = group.exchange(parts[rank].to(devices[rank]), "tensor")
        assert {found.device, exchanged.device} == {devices[rank]}
        results = said, found.cpu(), exchanged.cpu()
        group.leave()
        return results

    with ThreadPoolExecutor(2) as threads:
        ranks = [*threads.map(rank_of, range(2))]
    for rank, (said, found, exchanged) in enumerate(ranks):
        assert torch.equal(said, rows[0])
        assert torch.equal(found, rows[0] + rows[1])
        assert torch.equal(exchanged, parts[:, rank])
