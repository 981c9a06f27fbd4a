"""A call that takes turns with another thread: it goes on where it paused, and ends at its next pause if unwanted."""

from __future__ import annotations

import pytest

from deployments.engines.stock.paused_call import Cancelled, PausedCall


class Steps:
    """A call of `num_steps` steps that pauses behind each."""

    def __init__(self, num_steps: int) -> None:
        self.done: list[int] = []
        self.num_steps = num_steps
        self.call = PausedCall(self._run, "steps")

    def _run(self) -> list[int]:
        assert self.call.is_here
        for step in range(self.num_steps):
            self.done.append(step)
            self.call.pause()
        return self.done


def test_a_call_runs_from_pause_to_pause() -> None:
    steps = Steps(3)
    assert not steps.done, "begun before it was asked"
    for num_done in (1, 2, 3):
        assert not steps.call.resume()
        assert (len(steps.done), steps.call.is_here) == (num_done, False)
    assert steps.call.resume()
    assert steps.call.outcome() == [0, 1, 2]


@pytest.mark.parametrize("num_turns", [0, 1, 2])
@pytest.mark.parametrize("way", ["cancel", "close"])
def test_an_unwanted_call_takes_no_further_step(num_turns: int, way: str) -> None:
    steps = Steps(3)
    for _ in range(num_turns):
        steps.call.resume()
    if way == "cancel":
        steps.call.cancel()
        assert steps.call.resume()
    else:
        steps.call.close()
        assert steps.call.has_ended == (num_turns > 0)
    assert steps.call.is_cancelled
    assert steps.done == list(range(num_turns))
    if num_turns:
        with pytest.raises(Cancelled):
            steps.call.outcome()


def test_an_error_of_the_call_is_its_outcome() -> None:
    def fail() -> None:
        raise KeyError("gone")

    call = PausedCall(fail, "failing")
    assert call.resume()
    with pytest.raises(KeyError, match="gone"):
        call.outcome()
    call.close()
