from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.engines.llm.prefill_pace import PrefillPace
from deployments.engines.llm.scheduler import MAX_PREFILLING, MIN_SHARE, Scheduler, _even_shares
from deployments.engines.llm.sequences import sequence as sequences
from deployments.engines.llm.sequences.block_manager import BlockPool, block_key
from deployments.engines.llm.sequences.sequence import Sequence, SequenceStatus


def sequence(name: str, num_tokens: int, token: int | None = None, **options) -> Sequence:
    tokens = [hash((name, place)) % 1000 for place in range(num_tokens)] if token is None else [token] * num_tokens
    return Sequence(name, tokens, num_tokens, **options)


def scheduler(num_blocks=64, max_num_seqs=8, budget=100, beside=None, **options) -> tuple[Scheduler, BlockPool]:
    blocks = BlockPool(num_blocks)
    pace = None if beside is None else PrefillPace(1e9, beside)
    made = Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, pace=pace, **options)
    return made, blocks


def step(subject: Scheduler) -> list[tuple[str, int, int]]:
    chunks = subject.schedule().chunks
    for chunk in chunks:
        subject.complete(chunk, 7 if chunk.is_last else None)
    return [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in chunks]


def test_prompts_join_those_that_decode():
    subject, _ = scheduler(budget=20)
    subject.add_sequence(sequence("a", 10))
    assert step(subject) == [("a", 0, 10)]
    subject.add_sequence(sequence("b", 30))
    assert step(subject) == [("a", 10, 11), ("b", 0, 19)]
    assert step(subject) == [("a", 11, 12), ("b", 19, 30)]
    assert step(subject) == [("a", 12, 13), ("b", 30, 31)]


def test_a_prompt_that_waits_for_blocks_is_hashed_once(monkeypatch):
    subject, blocks = scheduler(num_blocks=40)
    subject.add_sequence(sequence("runs", 20))
    step(subject)
    taken, hashed = blocks.allocate(30), []
    monkeypatch.setattr(
        sequences, "block_key", lambda before, tokens: hashed.append(tuple(tokens)) or block_key(before, tokens)
    )
    subject.add_sequence(waiting := sequence("waits", 320))
    for _ in range(10):
        assert [name for name, *_ in step(subject)] == ["runs"]
    assert len(hashed) == len(set(hashed)) == 19  # all but the last, of which a token is computed
    blocks.release_blocks(taken)
    while waiting.num_completion_tokens < 2:
        step(subject)
    known = [b""]
    for start in range(0, 320, 16):
        known.append(block_key(known[-1], waiting.token_ids[start : start + 16]))
    assert waiting.block_keys == known[1:]
    assert len(hashed) <= 19 + 1 + 2  # its last block, and those that the other one has filled meanwhile
    subject._preempt(waiting)
    before = len(hashed)
    step(subject)
    assert len(hashed) == before


def test_a_running_stream_gets_a_token_in_every_step_while_prompts_keep_coming():
    subject, _ = scheduler(num_blocks=1000, budget=512, beside=64)
    subject.add_sequence(sequence("stream", 5))
    step(subject)
    for number in range(200):
        if number % 8 == 0:
            subject.add_sequence(sequence(f"prompt {number}", 300))
        chunks = subject.schedule().chunks
        assert chunks[0].sequence.request_id == "stream"
        assert sum(chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1) <= 64
        for chunk in chunks:
            subject.complete(chunk, 7 if chunk.is_last else None)
            if chunk.is_last and chunk.sequence.request_id != "stream":
                subject.finish(chunk.sequence)


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it():
    subject, _ = scheduler(num_blocks=1000, budget=64)
    subject.add_sequence(sequence("long", 10_000))
    step(subject)
    assert (subject.num_waiting, subject.num_running) == (1, 0)  # it does not decode yet
    subject.add_sequence(sequence("short", 60))
    assert step(subject) == [("long", 64, 96), ("short", 0, 32)]
    assert step(subject) == [("long", 96, 132), ("short", 32, 60)]
    assert step(subject) == [("short", 60, 61), ("long", 132, 195)]


def test_a_prompt_that_fits_is_computed_in_one_step():
    subject, _ = scheduler(budget=100)
    subject.add_sequence(sequence("a", 99))
    assert step(subject) == [("a", 0, 99)]
    assert step(subject) == [("a", 99, 100)]


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
    # The sampled token is recomputed with the prompt.
    assert step(subject) == [("new", 0, 16), ("later", 0, 1)]
    subject.finish(new)
    assert blocks.num_free == 1


def test_a_prefix_is_found_and_the_last_token_is_computed_all_the_same():
    subject, blocks = scheduler()
    first = sequence("first", 48, 5)
    subject.add_sequence(first)
    step(subject)
    second, third = sequence("second", 48, 5), sequence("third", 40, 5)
    subject.add_sequence(second)
    subject.add_sequence(third)
    assert step(subject)[1:] == [("second", 32, 48), ("third", 32, 40)]
    assert second.block_table[:2] == third.block_table[:2] == first.block_table[:2]
    assert len({second.block_table[2], third.block_table[2], first.block_table[2]}) == 3
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    for one in (first, second, third):
        subject.finish(one)
    assert blocks.num_free == 64
    again = sequence("again", 48, 5)
    subject.add_sequence(again)
    assert step(subject) == [("again", 32, 48)]  # nobody used it, but its room was not needed
    other = sequence("other", 48, 5, scope=b"an adapter")
    subject.add_sequence(other)
    assert ("other", 0, 48) in step(subject)


def test_prompts_that_begin_alike_and_come_together_compute_their_beginning_once():
    subject, blocks = scheduler(num_blocks=200, budget=64)
    beginning = sequence("", 160).token_ids
    alike = [Sequence(str(number), [*beginning, *[number] * 20], 180) for number in range(5)]
    other = sequence("other", 40)
    for one in (*alike[:2], other, *alike[2:]):
        subject.add_sequence(one)
    assert step(subject) == [("0", 0, 32), ("other", 0, 32)]  # which has passed one that waits
    assert step(subject) == [("0", 32, 88), ("other", 32, 40)]
    assert [chunk for chunk in step(subject) if chunk[0] != "other"] == [("0", 88, 151)]
    assert [chunk for chunk in step(subject) if chunk[0] != "other"] == [("0", 151, 180)]
    rest = [chunk for _ in range(3) for chunk in step(subject) if chunk[0] in "1234"]
    assert {start for _, start, _ in rest if start <= 160} == {160}
    assert [one.num_cached_tokens for one in alike] == [0, 160, 160, 160, 160]
    assert all(one.block_table[:10] == alike[0].block_table[:10] for one in alike)
    for one in (*alike, other):
        subject.finish(one)
    assert blocks.num_free == 200


def test_an_error_while_a_prompt_is_seated_loses_none_of_the_line(monkeypatch):
    subject, blocks = scheduler(num_blocks=200, budget=64)
    first, second = sequence("first", 160, 5), sequence("second", 160, 5)
    other = sequence("other", 40)
    subject.add_sequence(first)
    step(subject)
    subject.add_sequence(second)
    subject.add_sequence(other)
    with monkeypatch.context() as broken:
        broken.setattr(blocks, "allocate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            subject.schedule()
    assert subject.num_waiting == 3
    subject.finish(first)
    assert [name for name, _, _ in step(subject)] == ["second", "other"]


def test_a_prompt_waits_no_longer_than_what_it_has_in_common_is_computed():
    subject, _ = scheduler(num_blocks=200, budget=32)
    subject.add_sequence(long := sequence("long", 1000))
    subject.add_sequence(Sequence("short", [*long.token_ids[:40], 1, 2, 3], 43))
    assert step(subject) == [("long", 0, 32)]
    assert sorted(step(subject)) == [("long", 32, 53), ("short", 32, 43)]


@pytest.mark.parametrize("leaves", ["ends", "is preempted"])
def test_a_prompt_goes_on_by_itself_where_the_one_that_computed_for_it_has_gone(leaves):
    subject, _ = scheduler(num_blocks=200, budget=32)
    first, second = sequence("first", 100, 5), sequence("second", 100, 5)
    subject.add_sequence(first)
    subject.add_sequence(second)
    assert step(subject) == [("first", 0, 32)]
    if leaves == "ends":
        subject.finish(first)
        assert step(subject) == [("second", 32, 64)]
    else:
        subject._preempt(first)
        assert step(subject) == [("first", 32, 64)]


@pytest.mark.parametrize("options", [{"prompt_logprobs": object()}, {"scope": b"an adapter"}])
def test_a_prompt_does_not_wait_for_blocks_that_it_would_not_take(options):
    subject, _ = scheduler(num_blocks=200, budget=32)
    subject.add_sequence(sequence("first", 100, 5))
    subject.add_sequence(sequence("second", 100, 5, **options))
    assert step(subject) == [("first", 0, 16), ("second", 0, 16)]


def test_the_prefix_that_was_used_last_stays_longest():
    subject, _ = scheduler(num_blocks=6)
    for name in ("old", "new"):
        made = sequence(name, 32)
        subject.add_sequence(made)
        step(subject)
        subject.finish(made)
    large = sequence("large", 64)  # 4 blocks: the two that are free, and two of "old"
    subject.add_sequence(large)
    step(subject)
    subject.finish(large)
    new = Sequence("new again", [hash(("new", place)) % 1000 for place in range(32)], 32)
    subject.add_sequence(new)
    step(subject)
    assert new.num_cached_tokens == 16


def test_completions_share_the_prompt_and_copy_what_they_write():
    subject, blocks = scheduler()
    parent = sequence("p", 20, num_siblings=2)
    subject.add_sequence(parent)
    (chunk,) = subject.schedule().chunks
    subject.complete(chunk, 7)
    children = [sequence("p", 20) for _ in range(2)]
    for child in children:
        subject.fork(parent, child, 8)
    assert blocks.num_free == 62
    before = parent.block_table[1]
    plan = subject.schedule()
    assert [source for source, _ in plan.copies] == [before, before]
    assert before in {one.block_table[1] for one in (parent, *children)}  # the last one needs no copy
    assert len({one.block_table[1] for one in (parent, *children)}) == 3
    assert {one.block_table[0] for one in (parent, *children)} == {parent.block_table[0]}
    for one in (parent, *children):
        subject.finish(one)
    assert blocks.num_free == 64


def test_the_completion_that_was_forked_is_preempted_before_the_one_it_came_from():
    subject, _ = scheduler(num_blocks=2)
    parent, child = sequence("p", 16, num_siblings=1), sequence("p", 16)
    subject.add_sequence(parent)
    (chunk,) = subject.schedule().chunks
    subject.complete(chunk, 7)
    subject.fork(parent, child, 8)
    assert [chunk.sequence for chunk in subject.schedule().chunks] == [parent]  # each needs a second block
    assert (parent.status, child.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)


def test_a_completion_that_was_forked_is_as_old_as_its_request():
    subject, _ = scheduler(num_blocks=3)
    parent, child, young = sequence("p", 16, num_siblings=1), sequence("p", 16), sequence("young", 5)
    subject.add_sequence(parent)
    subject.add_sequence(young)
    for chunk in subject.schedule().chunks:
        subject.complete(chunk, 7)
    subject.fork(parent, child, 8)
    assert [chunk.sequence for chunk in subject.schedule().chunks] == [parent, child]
    assert young.status is SequenceStatus.WAITING


def test_blocks_follow_those_that_a_sequence_has_already():
    subject, _ = scheduler(num_blocks=12)
    made = {name: sequence(name, tokens) for name, tokens in (("grows", 16), ("ends", 10), ("stays", 10))}
    for one in made.values():
        subject.add_sequence(one)
    step(subject)
    subject.finish(made["ends"])
    step(subject)
    assert made["grows"].block_table == [0, 1]  # though more are free behind those of "stays"

    subject, _ = scheduler(num_blocks=12)
    first = sequence("first", 20, 5)
    subject.add_sequence(first)
    subject.add_sequence(sequence("stays", 10))
    step(subject)
    subject.finish(first)
    again = sequence("again", 20, 5)
    subject.add_sequence(again)
    step(subject)
    assert (again.num_cached_tokens, again.block_table) == (16, [0, 1])


def test_what_waits_or_has_ended_can_be_taken_out():
    subject, blocks = scheduler(max_num_seqs=1)
    first, second = sequence("first", 5), sequence("second", 5)
    subject.add_sequence(first)
    subject.add_sequence(second)
    step(subject)
    for _ in range(2):
        subject.finish(second)
        subject.finish(first)
    assert step(subject) == []
    assert (subject.num_waiting, subject.num_running, blocks.num_free) == (0, 0, 64)


def test_every_seat_is_taken():
    subject, _ = scheduler(max_num_seqs=3)
    for name in ("a", "b", "c", "d"):
        subject.add_sequence(sequence(name, 5))
        step(subject)
    assert (subject.num_running, subject.num_waiting) == (3, 1)


def test_the_seats_of_completions_to_come_are_kept():
    subject, _ = scheduler(max_num_seqs=3, budget=8)
    subject.add_sequence(sequence("three", 20, num_siblings=2))
    step(subject)
    subject.add_sequence(sequence("next", 5))
    assert step(subject) == [("three", 8, 16)]


def test_long_prompts_are_seated_by_a_few():
    subject, _ = scheduler(num_blocks=1000, budget=64, max_num_seqs=20)
    prompts = [sequence(str(number), 200) for number in range(2 * MAX_PREFILLING)]
    for made in prompts:
        subject.add_sequence(made)
    step(subject)
    assert [made.status is SequenceStatus.RUNNING for made in prompts].count(True) == MAX_PREFILLING


def test_a_preempted_sequence_that_finds_its_blocks_again_was_not_cached_when_it_came():
    subject, _ = scheduler(num_blocks=4)
    old, new = sequence("old", 31), sequence("new", 32)
    subject.add_sequence(old)
    subject.add_sequence(new)
    while new.status is not SequenceStatus.WAITING or not subject.num_preemptions:
        step(subject)
    subject.finish(old)
    assert step(subject)[0][:2] == ("new", 32)  # behind the blocks that were still there
    assert new.num_cached_tokens == 0


@pytest.mark.parametrize(("shares", "num_cached"), [(True, 32), (False, 16)])
def test_a_next_turn_finds_the_completion_before_it_where_those_are_shared(shares, num_cached):
    subject, _ = scheduler(shares_completions=shares)
    first = sequence("first", 20)
    subject.add_sequence(first)
    while first.num_computed_tokens < 40:
        step(subject)
    subject.finish(first)
    second = Sequence("second", [*first.token_ids, 1, 2, 3], 44)
    subject.add_sequence(second)
    step(subject)
    assert second.num_cached_tokens == num_cached


def test_a_budget_too_small_to_share_goes_to_the_first():
    assert _even_shares([100, 100], MIN_SHARE - 1) == [MIN_SHARE - 1, 0]
    assert _even_shares([100, 100, 100], 2 * MIN_SHARE + 1) == [MIN_SHARE + 1, MIN_SHARE, 0]


def test_a_request_takes_the_seats_that_there_are_and_the_rest_of_it_comes_first_in_line():
    subject, _blocks = scheduler(max_num_seqs=3)
    first, parent, children = sequence("first", 20), sequence("four", 20, num_siblings=3), []
    subject.add_sequence(first)
    step(subject)
    subject.add_sequence(parent)
    subject.add_sequence(sequence("next", 5))
    chunks = subject.schedule().chunks
    assert [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in chunks] == [
        ("first", 20, 21),
        ("four", 0, 20),
    ]
    for chunk in chunks:
        subject.complete(chunk, 7)
    while parent.num_siblings:
        children.append(sequence("four", 20))
        subject.fork(parent, children[-1], 8 + len(children))
    assert [child.status for child in children] == [SequenceStatus.RUNNING, *[SequenceStatus.WAITING] * 2]
    assert [name for name, *_ in step(subject)] == ["first", "four", "four"]
    subject.finish(first)
    assert step(subject)[-1] == ("four", 16, 21)  # of its prompt one block was kept
    assert (children[2].status, children[1].status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    for one in (parent, *children):
        subject.finish(one)
    assert step(subject) == [("next", 0, 5)]


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(0, 300))
def test_shares_are_even(wanted, budget):
    shares = _even_shares(wanted, budget)
    assert all(share <= most for share, most in zip(shares, wanted, strict=True))
    assert sum(shares) == min(budget, sum(wanted))  # nothing is left over while somebody wants more
    if budget >= MIN_SHARE * len(wanted):
        unsatisfied = [share for share, most in zip(shares, wanted, strict=True) if share < most]
        if unsatisfied:
            assert max(shares) - min(unsatisfied) <= len(wanted)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(4, 12),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(1, 40), st.integers(1, 24), st.booleans(), st.integers(0, 2), st.booleans()
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_every_sequence_is_computed_in_order_and_ends(num_blocks, max_num_seqs, budget, beside, shares, requests):
    """The requests are (joins at step, prompt, completion, ends half way, siblings, has a common prefix); 4 blocks hold
    the longest. What each block holds is followed: a sequence only ever reads its own tokens.
    """
    subject, blocks = scheduler(num_blocks, max_num_seqs, budget, beside, shares_completions=shares)
    limits: dict[int, int] = {}
    joins: dict[int, list[Sequence]] = {}
    for i, (at, prompt, end, cut, siblings, common) in enumerate(requests):
        made = sequence(str(i), prompt, 5 if common else None, num_siblings=siblings)
        limits[i] = end // 2 + 1 if cut else end
        joins.setdefault(at, []).append(made)
    unfinished = {i: 1 + request[4] for i, request in enumerate(requests)}
    held: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> all tokens up to this one
    for now in range(6000):
        for made in joins.get(now, ()):
            subject.add_sequence(made)
        plan = subject.schedule()
        for source, target in plan.copies:
            for offset in range(16):
                held[target, offset] = held.get((source, offset), ())
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= budget
        for chunk in plan.chunks:
            made = chunk.sequence
            assert chunk.start == made.num_computed_tokens < chunk.end
            for position in range(chunk.start, chunk.end):
                assert not blocks.is_shared(made.block_table[position // 16]) or made.num_siblings == 0
                held[made.block_table[position // 16], position % 16] = tuple(made.token_ids[: position + 1])
        for chunk in plan.chunks:
            made = chunk.sequence
            for position in range(chunk.end):
                assert held[made.block_table[position // 16], position % 16] == tuple(made.token_ids[: position + 1])
        for chunk in plan.chunks:
            made = chunk.sequence
            subject.complete(chunk, 100 * now if chunk.is_last else None)
            started = [made]
            while chunk.is_last and made.num_siblings:
                child = Sequence(made.request_id, made.token_ids[:-1], made.num_prompt_tokens)
                subject.fork(made, child, 100 * now + made.num_siblings)
                started.append(child)
            for one in started:
                if one.num_completion_tokens >= limits[int(one.request_id)]:
                    subject.finish(one)
                    unfinished[int(one.request_id)] -= 1
        if not any(unfinished.values()):
            break
    assert not any(unfinished.values())
    assert blocks.num_free == num_blocks
    assert (subject.num_waiting, subject.num_running) == (0, 0)
