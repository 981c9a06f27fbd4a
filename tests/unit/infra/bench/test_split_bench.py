"""The bench of a language model at half of its device: the same tokens as its peer, and no weights over the link."""

from __future__ import annotations

import pytest

from infra.bench.split import LINKS_GBPS, measure_split, print_split


@pytest.mark.long
def test_a_token_moves_activations_here_and_half_of_the_weights_there(capsys: pytest.CaptureFixture[str]) -> None:
    hidden, inner = 192, 512
    ours, peer = rows = measure_split(hidden)
    layer_bytes = 4 * (hidden * hidden * 2 * (1 + 1 / 3) + 3 * hidden * inner)
    assert peer["link_bytes"] >= 6 * layer_bytes
    assert 4 * hidden <= ours["link_bytes"] <= 2 * 4 * hidden + 1024
    assert min(row["cpu_ms"] for row in rows) > 0
    for gbps in LINKS_GBPS:
        speed = f"{gbps:g} GB/s, no kernels"
        assert peer["tokens_per_s"][speed] <= gbps * 1e9 / peer["link_bytes"]
        assert ours["tokens_per_s"][speed] >= ours["tokens_per_s"][f"tokens/s at {gbps:g} GB/s"]
    print_split(rows)
    assert f"{ours['link_bytes']:,.0f}" in capsys.readouterr().out
