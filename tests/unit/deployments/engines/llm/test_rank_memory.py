"""The host's memory of four ranks of a model: that of one copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.rank_memory import memory_of_ranks

from infra.offline.checkpoints import quantize_checkpoint

NUM_RANKS = 4


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("plain", marks=pytest.mark.long), "gguf-q8_0"])
def test_four_ranks_have_the_memory_of_one_copy(form: Any, tiny: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3, "num_attention_heads": 8}
    model = tiny("llama", 2, **sizes, num_key_value_heads=4)
    model.stock.save_pretrained(model.folder)
    path = model.folder
    if form != "plain":
        path = tmp_path / "tiny.gguf"
        quantize_checkpoint(model.folder, path, form)
    file = path if path.is_file() else path / "model.safetensors"
    found = memory_of_ranks(path, NUM_RANKS)
    whole = file.stat().st_size
    assert 0.9 * whole < sum(share for share, _ in found) <= 1.02 * whole
    assert max(elsewhere for _, elsewhere in found) <= 0.005 * whole  # norms, in float32
