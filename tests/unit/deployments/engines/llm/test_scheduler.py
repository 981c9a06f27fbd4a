from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.llm.block_manager import BlockPool
from deployments.engines.llm.scheduler import Scheduler, Sequence, SequenceStatus


def sequence(name: str, num_tokens: int) -> Sequence:
    return Sequence(name, [7] * num_tokens, num_tokens)


def scheduler(num_blocks=64, max_num_seqs=8, budget=100) -> tuple[Scheduler, BlockPool]:
    blocks = BlockPool(num_blocks)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget), blocks


def step(subject: Scheduler) -> list[tuple[str, int, int]]:
    chunks = subject.schedule()
    for chunk in chunks:
        subject.complete(chunk, 7 if chunk.is_last else None)
    return [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in chunks]


def test_prompts_come_first_within_the_budget_in_order():
    subject, _ = scheduler(budget=20)
    for name, length in (("a", 10), ("b", 9), ("c", 5)):
        subject.add_sequence(sequence(name, length))
    assert step(subject) == [("a", 0, 10), ("b", 0, 9)]  # c would fit neither now nor before b
    assert step(subject) == [("c", 0, 5)]
    assert step(subject) == [("a", 10, 11), ("b", 9, 10), ("c", 5, 6)]
    assert step(subject) == [("a", 11, 12), ("b", 10, 11), ("c", 6, 7)]


def test_a_long_prompt_is_split_by_the_budget_and_only_its_rest_is_shared():
    subject, _ = scheduler(budget=16)
    subject.add_sequence(sequence("short", 3))
    subject.add_sequence(sequence("long", 40))
    subject.add_sequence(sequence("next", 8))
    assert step(subject) == [("short", 0, 3)]
    assert step(subject) == [("long", 0, 16)]
    assert step(subject) == [("long", 16, 32)]
    assert step(subject) == [("long", 32, 40), ("next", 0, 8)]


def test_the_first_in_line_waits_for_blocks_and_is_not_overtaken():
    subject, blocks = scheduler(num_blocks=4)
    first = sequence("first", 40)  # 3 blocks
    subject.add_sequence(first)
    subject.add_sequence(sequence("big", 20))
    subject.add_sequence(sequence("small", 1))
    assert step(subject) == [("first", 0, 40)]
    assert step(subject) == [("first", 40, 41)]
    subject.finish(first)
    assert blocks.num_free == 4
    assert step(subject) == [("big", 0, 20), ("small", 0, 1)]


def test_the_newest_is_preempted_and_recomputes_from_the_head_of_the_line():
    subject, blocks = scheduler(num_blocks=2)
    old, new = sequence("old", 16), sequence("new", 15)
    subject.add_sequence(old)
    subject.add_sequence(new)
    assert step(subject) == [("old", 0, 16), ("new", 0, 15)]
    assert step(subject) == [("old", 16, 17)]  # needs a second block
    assert new.status is SequenceStatus.WAITING
    assert new.block_table == []
    assert subject.num_preemptions == 1
    subject.add_sequence(sequence("later", 1))
    subject.finish(old)
    assert step(subject) == [
        ("new", 0, 16),
        ("later", 0, 1),
    ]  # the sampled token is recomputed with the prompt
    subject.finish(new)
    assert blocks.num_free == 1


@given(
    st.integers(4, 12),
    st.integers(1, 5),
    st.integers(1, 40),
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 24), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_every_sequence_is_computed_in_order_and_ends(num_blocks, max_num_seqs, budget, requests):
    """The requests are (joins at step, prompt, completion, ends half way); 4 blocks hold the longest."""
    subject, blocks = scheduler(num_blocks, max_num_seqs, budget)
    waiting = [(at, sequence(str(i), prompt), end, cut) for i, (at, prompt, end, cut) in enumerate(requests)]
    limits = {made.request_id: (end, cut) for _, made, end, cut in waiting}
    unfinished = set(limits)
    for now in range(3000):
        for at, made, _, _ in waiting:
            if at == now:
                subject.add_sequence(made)
        chunks = subject.schedule()
        assert len({chunk.sequence.request_id for chunk in chunks}) == len(chunks)
        assert sum(chunk.num_tokens for chunk in chunks) <= budget
        for chunk in chunks:
            made = chunk.sequence
            assert chunk.start == made.num_computed_tokens
            assert len(made.block_table) * 16 >= chunk.end
            subject.complete(chunk, 7 if chunk.is_last else None)
            end, cut = limits[made.request_id]
            if made.num_completion_tokens >= (end // 2 if cut else end):
                subject.finish(made)
                unfinished.discard(made.request_id)
        if not unfinished:
            break
    assert not unfinished
    assert blocks.num_free == num_blocks
    assert (subject.num_waiting, subject.num_running) == (0, 0)
