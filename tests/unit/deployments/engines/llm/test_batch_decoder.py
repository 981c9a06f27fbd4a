"""Batches of many sequences by llama_decode's rules, against transformers' logits of each sequence alone."""

from __future__ import annotations

import random

import pytest
import torch

from deployments.engines.llm.batch_decoder import BatchDecoder, BatchToken, DecodeStatus
from deployments.engines.llm.models.registry import create_model, load_config


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


def filled(decoder: BatchDecoder, sequence: int, num_tokens: int) -> None:
    batch = [BatchToken(5 + place % 7, place, sequence) for place in range(num_tokens)]
    assert decoder.decode(batch).status is DecodeStatus.OK


@pytest.mark.parametrize("seed", range(4))
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
        assert (found.status, found.num_decoded, found.reason) == (0, len(batch), "")
        wanted = [token for token in batch if token.wants_logits]
        assert found.logits.shape == (len(wanted), 260)
        for token, row in zip(wanted, found.logits, strict=True):
            torch.testing.assert_close(
                row, stock(model, texts[token.sequence_id][: token.position + 1]), rtol=1e-3, atol=1e-3
            )


def test_a_batch_without_room_changes_nothing_and_a_smaller_one_fits(loaded):
    decoder = BatchDecoder(loaded, num_blocks=4)
    filled(decoder, 0, 20)
    filled(decoder, 1, 16)
    large = [BatchToken(7, 16 + place, 1) for place in range(17)] + [BatchToken(7, 20, 0)]
    found = decoder.decode(large)
    assert (found.status, found.num_decoded, len(found.logits)) == (DecodeStatus.NO_SLOT, 0, 0)
    assert found.status == 1
    assert "18 tokens need more blocks than the 1 of 4 left" in found.reason
    assert (decoder.num_tokens(0), decoder.num_tokens(1), decoder._pool.num_free) == (20, 16, 1)
    assert decoder.decode(large[:16]).status is DecodeStatus.OK
    assert decoder.decode([BatchToken(7, 0, 2)]).status is DecodeStatus.NO_SLOT
    assert decoder.num_tokens(2) == 0
    decoder.remove_tokens(1)
    decoder.remove_tokens(99)  # there is none
    assert decoder.decode([BatchToken(0, 0, 2)]).status is DecodeStatus.OK


def test_an_aborted_batch_leaves_the_parts_before(model, loaded):
    decoder = BatchDecoder(loaded, num_blocks=16, max_micro_batch=10)
    texts = {0: [9 + place for place in range(40)], 1: [30 + place for place in range(40)]}
    filled(decoder, 1, 3)
    free = decoder._pool.num_free
    batch = [*tokens_of(texts, 0, 0, 25, {5, 24}), BatchToken(11, 3, 1, True)]
    asked = []

    def is_aborted() -> bool:
        asked.append(decoder._pool.num_free)
        return len(asked) > 6  # a question before the step and before each of 3 layers: the second part's last but one

    found = decoder.decode(batch, is_aborted)
    assert (found.status, found.num_decoded) == (DecodeStatus.ABORTED, 10)
    assert found.status == 2
    assert len(asked) == 7
    assert (decoder.num_tokens(0), decoder.num_tokens(1)) == (10, 3)
    assert decoder._pool.num_free == free - 1
    torch.testing.assert_close(found.logits[0], stock(model, texts[0][:6]), rtol=1e-3, atol=1e-3)
    rest = decoder.decode(tokens_of(texts, 0, 10, 25, {24}))
    torch.testing.assert_close(rest.logits[0], stock(model, texts[0][:25]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([], "empty"),
        ([BatchToken(260, 0, 0)], "token 0 has id 260; expected 0 to 259"),
        ([BatchToken(-1, 0, 0)], "id -1"),
        ([BatchToken(5, 1, 0)], "token 0 is at position 1 of sequence 0; expected 0"),
        ([BatchToken(5, 0, 0), BatchToken(5, 2, 0)], "token 1 is at position 2 of sequence 0; expected 1"),
        ([BatchToken(5, place, 0) for place in range(257)], "position 256; the model has 256"),
    ],
)
def test_a_batch_that_makes_no_sense_is_told_why(batch, reason, loaded):
    decoder = BatchDecoder(loaded, num_blocks=32)
    found = decoder.decode(batch)
    assert (found.status, found.num_decoded) == (DecodeStatus.INVALID, 0)
    assert found.status < 0
    assert reason in found.reason
    assert decoder._pool.num_free == 32


@pytest.mark.parametrize(
    ("error", "status"), [(MemoryError(), DecodeStatus.NO_MEMORY), (RuntimeError("broken"), DecodeStatus.FAILED)]
)
def test_a_model_that_fails_leaves_the_parts_before(error, status, loaded, monkeypatch):
    decoder = BatchDecoder(loaded, num_blocks=8, max_micro_batch=16)
    plain, calls = decoder._runner.run, []

    def run(chunks, check):
        calls.append(chunks)
        if len(calls) > 1:
            raise error
        return plain(chunks, check)

    monkeypatch.setattr(decoder._runner, "run", run)
    found = decoder.decode([BatchToken(5, place, 3) for place in range(40)])
    assert (found.status, found.num_decoded, found.reason) == (status, 16, str(error))
    assert (decoder.num_tokens(3), decoder._pool.num_free) == (16, 7)


def test_copies_share_blocks_until_they_are_written(model, loaded):
    decoder = BatchDecoder(loaded, num_blocks=8)
    texts = {0: [9 + place for place in range(40)]}
    decoder.decode(tokens_of(texts, 0, 0, 20, set()))
    decoder.copy_sequence(0, 1)
    decoder.copy_sequence(0, 2)
    assert decoder._pool.num_free == 6
    with pytest.raises(ValueError, match="sequence 1 has 20 tokens"):
        decoder.copy_sequence(0, 1)
    found = decoder.decode([BatchToken(50 + sequence, 20, sequence, True) for sequence in (2, 0, 1)])
    assert found.status is DecodeStatus.OK
    assert decoder._pool.num_free == 4
    for row, sequence in zip(found.logits, (2, 0, 1), strict=True):
        torch.testing.assert_close(row, stock(model, [*texts[0][:20], 50 + sequence]), rtol=1e-3, atol=1e-3)
    decoder.remove_tokens(0, 5)
    assert decoder.decode([BatchToken(99, 5, 0)]).status is DecodeStatus.OK
    again = decoder.decode([BatchToken(60, 21, 1, True)])
    torch.testing.assert_close(again.logits[0], stock(model, [*texts[0][:20], 51, 60]), rtol=1e-3, atol=1e-3)
    for sequence in range(3):
        decoder.remove_tokens(sequence)
    assert decoder._pool.num_free == 8
