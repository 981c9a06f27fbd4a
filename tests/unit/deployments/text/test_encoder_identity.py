"""Models with equal weights share a built encoder when nothing tells them apart, and only then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deployments.engines.building.skeletons import SkeletonStats
from deployments.modules.encoders import KeyedEncoder, TextEncoderBuilder, is_text_encoder
from deployments.text.encode import EncodeJob, encode_batch_or_raise

BERT = Path(__file__).parents[4] / "infra" / "demo" / "models" / "texts-bert"


def copied(tmp_path: Path, name: str, file: str = "", **changes: Any) -> Path:
    folder = Path(shutil.copytree(BERT, tmp_path / name))
    if file:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    return folder


def encode(keyed: KeyedEncoder, text: str) -> torch.Tensor:
    [tokens] = keyed.encoder.tokenize([text], as_embedding=True)
    return encode_batch_or_raise([EncodeJob(keyed, tokens)])[0]["embedding"]


async def test_equal_weights_with_another_pooling_are_another_encoder(
    tmp_path: Path, open_host: Callable[..., Any]
) -> None:
    folders = {
        "mean": BERT,
        "again": copied(tmp_path, "again"),
        "cls": copied(tmp_path, "cls", "1_Pooling/config.json", pooling_mode="cls"),
        "short": copied(tmp_path, "short", "sentence_bert_config.json", max_seq_length=4),
    }
    builder = TextEncoderBuilder()
    host = open_host(builder, folders)
    text = "the quick brown fox jumps over the lazy dog"
    found: dict[str, KeyedEncoder] = {}
    for name in folders:
        async with host.lease(name, is_text_encoder) as lease:
            (found[name],) = lease.modules.values()
    assert found["again"] is found["mean"]
    assert len({keyed.module_key for keyed in found.values()}) == len({id(keyed) for keyed in found.values()}) == 3
    vectors = {name: encode(keyed, text) for name, keyed in found.items()}
    for name in ("cls", "short"):
        assert not torch.allclose(vectors[name], vectors["mean"], atol=1e-3)
    [tokens] = found["mean"].encoder.tokenize([text], as_embedding=True)
    hidden = found["mean"].encoder.module(input_ids=torch.tensor([tokens.token_ids])).last_hidden_state[0]
    torch.testing.assert_close(vectors["cls"], hidden[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vectors["mean"], hidden.mean(dim=0), rtol=1e-4, atol=1e-5)
    stats: SkeletonStats = builder.skeletons.skeleton_stats()
    assert stats.num_built + stats.num_copied == 3  # of one structure: the others may be copies
