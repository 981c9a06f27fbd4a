"""Slots of recurrent states over the scheduler, without a model: a state is the tokens that it is behind."""

from __future__ import annotations

import pytest

from deployments.engines.llm.scheduler import Scheduler
from deployments.engines.llm.sequences.block_manager import BlockPool
from deployments.engines.llm.sequences.sequence import Sequence
from deployments.engines.llm.state_slots import SLOTS_PER_SEQUENCE, StateSlots
from tests.kit.seeding import seeded_rng

PIECE, MAX_SEQS, VOCABULARY = 32, 4, 3


class Cluster:
    """Sequences that come and go; `states` are the tokens behind which the state in each slot is."""

    def __init__(self, *, piece=PIECE, num_blocks=40, budget=48):
        self.blocks, self.slots = BlockPool(num_blocks), StateSlots(MAX_SEQS, piece)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=budget,
            states=self.slots,
            shares_completions=False,
        )
        self.states, self.live, self.num_found = {}, [], 0

    def add(self, prompt, **changes):
        sequence = Sequence("r", list(prompt), len(prompt), **changes)
        self.scheduler.add_sequence(sequence)
        self.live.append(sequence)
        return sequence

    def step(self, rng=None, runs=1):
        """Run a step, as often as it would be run after failures."""
        plan = self.scheduler.schedule()
        for _ in range(runs):
            for chunk in plan.chunks:
                self.compute(chunk)
        for chunk in plan.chunks:
            self.num_found += chunk.sequence.num_cached_tokens if chunk.start else 0
            token = int(rng.integers(VOCABULARY)) if rng is not None and chunk.is_last else 0
            self.scheduler.complete(chunk, token if chunk.is_last else None)
        return plan

    def compute(self, chunk):
        tokens = chunk.sequence.token_ids
        before = () if chunk.state is None else self.states[chunk.state]
        assert before == tuple(tokens[: chunk.start])
        assert chunk.kept_states[-1][0] == chunk.end
        if chunk.start >= chunk.sequence.num_prompt_tokens:
            assert chunk.num_tokens == 1
        for place, slot in chunk.kept_states:
            assert slot != chunk.state
            self.states[slot] = tuple(tokens[:place])

    def finish(self, sequence):
        self.scheduler.finish(sequence)
        self.live.remove(sequence)

    @property
    def is_empty(self):
        return (
            self.blocks.num_free == self.blocks.num_blocks
            and self.slots._pool.num_free == SLOTS_PER_SEQUENCE * MAX_SEQS
        )


@pytest.mark.parametrize("piece", [PIECE, 16, 0])
def test_each_chunk_goes_on_from_its_own_state(piece):
    """In random batches, with few tokens so that much is found, forks, failures, and blocks that run out."""
    rng = seeded_rng()
    cluster = Cluster(piece=piece, num_blocks=16)
    begins = [tuple(rng.integers(VOCABULARY, size=100).tolist()) for _ in range(2)]
    for _ in range(400):
        if len(cluster.live) < 6 and rng.random() < 0.4:
            begin = begins[rng.integers(2)][: rng.integers(1, 100)]
            siblings = int(rng.random() < 0.2)
            cluster.add((*begin, *rng.integers(VOCABULARY, size=rng.integers(1, 30)).tolist()), num_siblings=siblings)
        plan = cluster.step(rng, runs=1 + int(rng.random() < 0.2))
        for chunk in plan.chunks:
            parent = chunk.sequence
            if parent.num_siblings and chunk.is_last:
                child = Sequence("r", list(parent.token_ids[: parent.num_prompt_tokens]), parent.num_prompt_tokens)
                cluster.scheduler.fork(parent, child, 1)
                cluster.live.append(child)
        for sequence in list(cluster.live):
            if len(sequence) > 170 or rng.random() < 0.03:
                cluster.finish(sequence)
    assert cluster.scheduler.num_preemptions > 0
    assert (cluster.num_found > 0) == (piece > 0)
    for sequence in list(cluster.live):
        cluster.finish(sequence)
    assert cluster.is_empty


def test_prompts_are_cut_at_whole_pieces():
    cluster = Cluster(budget=48)
    sequence = cluster.add(range(100))
    ends = []
    while sequence.num_computed_tokens < 100:
        ends += [(chunk.start, chunk.end) for chunk in cluster.step().chunks]
    assert ends == [(0, 32), (32, 64), (64, 100)]  # 48 tokens are more than the rest


def test_a_budget_below_a_piece_is_for_one_prompt():
    cluster = Cluster(budget=20)
    first, second = cluster.add(range(40)), cluster.add(range(50))
    assert [(chunk.sequence, chunk.end) for chunk in cluster.step().chunks] == [(first, 32)]
    assert [(chunk.sequence, chunk.end) for chunk in cluster.step().chunks] == [(second, 32)]


def test_whole_prompts_share_no_step_that_is_full():
    cluster = Cluster(piece=0, budget=48)
    first, second = cluster.add(range(100)), cluster.add(range(90))
    assert [(chunk.sequence, chunk.end) for chunk in cluster.step().chunks] == [(first, 100)]
    assert {(chunk.sequence, chunk.end) for chunk in cluster.step().chunks} == {(first, 101), (second, 90)}


def test_a_state_is_kept_behind_the_last_cut_before_the_end():
    cluster = Cluster(budget=200)
    sequence = cluster.add(range(64))
    (chunk,) = cluster.step().chunks
    assert [place for place, _ in chunk.kept_states] == [32, 64]
    cluster.finish(sequence)
    again, longer = cluster.add(range(64)), cluster.add(range(70))
    cluster.step()
    assert [again.num_cached_tokens, longer.num_cached_tokens] == [32, 64]
