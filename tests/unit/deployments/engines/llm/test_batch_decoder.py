"""Batches of many sequences as llama_decode takes them, against transformers' logits of each sequence alone."""

from __future__ import annotations

import random

import pytest
import torch
from kit.drawing import seeds

from deployments.engines.llm.models.registry import create_model, load_config
from infra.bench.command.batch_decoder import BatchDecoder, BatchToken


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", 0, num_hidden_layers=3)


@pytest.fixture(scope="module")
def loaded(model):
    return create_model(load_config(model.folder), model.tensors, torch.device("cpu"))


def tokens_of(texts: dict[int, list[int]], sequence: int, start: int, end: int, wanted: set[int]) -> list[BatchToken]:
    return [BatchToken(texts[sequence][place], place, sequence, place in wanted) for place in range(start, end)]


def stock(model, tokens: list[int]) -> torch.Tensor:
    """transformers' logits behind the last token."""
    return model.stock(torch.tensor([tokens])).logits[0, -1]


@seeds(50)
@pytest.mark.parametrize("size", [1, 7, 16, 512])
def test_logits_come_in_the_caller_s_order_whatever_the_parts(size, seed, model, loaded):
    draw = random.Random(seed)
    decoder = BatchDecoder(loaded, num_blocks=64, max_micro_batch=size)
    texts = {sequence: [draw.randrange(4, 260) for _ in range(60)] for sequence in range(4)}
    ends = dict.fromkeys(texts, 0)
    for _ in range(6):
        # Tokens of all sequences, interleaved, each sequence's in order; any of their logits are wanted.
        counts = {sequence: draw.choice((0, 1, 1, 2, 9)) for sequence in texts}
        order = [sequence for sequence, count in counts.items() for _ in range(count)]
        draw.shuffle(order)
        batch = []
        for sequence in order:
            batch.append(BatchToken(texts[sequence][ends[sequence]], ends[sequence], sequence, draw.random() < 0.4))
            ends[sequence] += 1
        if not batch:
            continue
        found = decoder.decode(batch)
        wanted = [token for token in batch if token.wants_logits]
        assert len(found) == len(wanted)
        for token, row in zip(wanted, found, strict=True):
            torch.testing.assert_close(
                row, stock(model, texts[token.sequence_id][: token.position + 1]), rtol=1e-3, atol=1e-3
            )


def test_copies_share_blocks_until_they_are_written(model, loaded):
    decoder = BatchDecoder(loaded, num_blocks=8)
    texts = {0: [9 + place for place in range(40)]}
    decoder.decode(tokens_of(texts, 0, 0, 20, set()))
    decoder.copy_sequence(0, 1)
    decoder.copy_sequence(0, 2)
    assert decoder._pool.num_free == 6
    found = decoder.decode([BatchToken(50 + sequence, 20, sequence, True) for sequence in (2, 0, 1)])
    assert decoder._pool.num_free == 4
    for row, sequence in zip(found, (2, 0, 1), strict=True):
        torch.testing.assert_close(row, stock(model, [*texts[0][:20], 50 + sequence]), rtol=1e-3, atol=1e-3)
    decoder.remove_sequence(0)
    decoder.remove_sequence(99)  # there is none
    decoder.decode([BatchToken(99, 0, 0)])
    again = decoder.decode([BatchToken(60, 21, 1, True)])
    torch.testing.assert_close(again[0], stock(model, [*texts[0][:20], 51, 60]), rtol=1e-3, atol=1e-3)
    for sequence in range(3):
        decoder.remove_sequence(sequence)
    assert decoder._pool.num_free == 8


def test_a_batch_without_room_is_refused(loaded):
    decoder = BatchDecoder(loaded, num_blocks=4)
    decoder.decode([BatchToken(7, place, 0) for place in range(64)])
    with pytest.raises(ValueError, match="1 blocks asked for, 0 of 4 are free"):
        decoder.decode([BatchToken(7, 0, 1)])
