"""A minibatch that a rank gives up, one call at a time: which rank learns what, and what remains for the next one."""

from __future__ import annotations

import pytest
import torch
from support.machines import Rank, finish, states

from odc.errors import AbandonedMinibatchError, OdcError, UnfinishedMinibatchError
from odc.protocol import HostRoute, RootState, Word

pytestmark = pytest.mark.usefixtures("queued")


def begin(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.machine.begin()
        rank.machine.explicit = True


def end_together(ranks: list[Rank]) -> list[AbandonedMinibatchError | None]:
    for rank in ranks:
        rank.machine.done()
    errors = [rank.machine.collect() for rank in ranks]
    for rank in ranks:
        rank.machine.explicit = False
    return errors


def assert_abandoned(ranks: list[Rank], culprit: int, reason: str) -> None:
    for rank, error in zip((10, 13), end_together(ranks), strict=True):
        assert error is not None and error.culprit == culprit and error.reason.startswith(reason)
        assert f"rank {rank} (epoch 1): the minibatch was abandoned by rank {culprit}: {reason}" in str(error)
    assert [rank.grads() for rank in ranks] == [[None] * 3] * 2
    assert states(ranks) == [RootState.CLOSED] * 2


def test_each_rank_learns_which_one_gave_up_and_why(two: list[Rank]) -> None:
    begin(two)
    two[0].push(0, 1.0)
    two[1].push(0, 2.0)
    two[1].machine.abandon("out of memory at sample 7")
    two[1].machine.abandon("only the first reason counts")
    with pytest.raises(UnfinishedMinibatchError):
        two[1].machine.close_evaluation("load_state_dict()")
    assert_abandoned(two, 13, "out of memory at sample 7")


def test_the_next_minibatch_holds_nothing_of_it(two: list[Rank]) -> None:
    for number in range(3):  # both parities of an epoch
        begin(two)
        for rank in two:
            rank.push(0, 8.0)
            rank.push(1, 8.0)
        two[number % 2].machine.abandon("bad")
        assert all(end_together(two))
        begin(two)
        two[0].push(1, 3.0)
        two[1].push(1, 1.0)
        assert end_together(two) == [None, None]
        assert [rank.grads() for rank in two] == [[None, None, [2.0] * 3]] * 2


def test_an_evaluation_on_another_rank_keeps_nothing_of_an_abandoned_minibatch(two: list[Rank]) -> None:
    """Rank 10 has closed the epoch as an evaluation, so it collects nothing when rank 13 abandons what it pushed."""
    for number in range(2):  # both parities of an epoch
        begin(two)
        two[0].machine.close_evaluation("a test")
        two[0].heaps.by_hand = True
        two[1].push(0, 8.0)
        two[1].push(1, 8.0)
        two[1].machine.abandon("bad")
        two[1].machine.done()
        error = two[1].machine.collect()
        assert error is not None and error.culprit == 13
        if number == 0:
            with two[0].heaps.late("this rank's server to add what rank 13 pushed"):
                two[0].machine.begin()
        two[0].heaps.by_hand = False
        two[0].heaps.drain(0)
        begin(two)
        two[0].push(1, 3.0)
        two[1].push(1, 1.0)
        assert end_together(two) == [None, None]
        assert [rank.grads() for rank in two] == [[None, None, [2.0] * 3]] * 2


def test_a_push_that_was_cut_short_leaves_nothing_behind(two: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts were never sent, so only the abandoned minibatch itself shows that accumulators must be zeroed."""
    begin(two)
    route = two[0].heaps.members[0].pusher.route
    assert isinstance(route, HostRoute)
    push_to = route.push_to

    def fail_at_last(owner: int, *args: object) -> int:
        sent = push_to(owner, *args)  # type: ignore[arg-type]
        if owner == 0:
            raise MemoryError("no room")
        return sent

    with monkeypatch.context() as failing:
        failing.setattr(route, "push_to", fail_at_last)
        with pytest.raises(MemoryError):
            two[0].push(0, 5.0)
    two[0].iteration.cut_short = "backward"
    assert_abandoned(two, 10, "a backward ended with an exception")
    assert two[0].iteration.resets
    begin(two)
    two[1].push(0, 2.0)
    end_together(two)
    assert two[0].grads() == [[1.0] * 4, [1.0] * 2, None]


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(("see_to", "reason"), [("recover", "a backward ended with"), ("reset", "reset_iter_state()")])
def test_a_signal_while_a_failed_backward_is_seen_to_does_not_save_its_minibatch(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch, see_to: str, reason: str, forgotten: bool
) -> None:
    """Whether torch's state, which shows that a backward failed, is cleared by then or not."""
    begin(two)
    two[0].push(0, 1.0)
    iteration = two[0].iteration
    iteration.cut_short = "backward"

    def interrupted(groups: object) -> None:
        iteration.cut_short = None if forgotten else "backward"
        raise KeyboardInterrupt

    with monkeypatch.context() as signalled:
        signalled.setattr(iteration, "reset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(two[0].machine, see_to)()
    two[1].push(0, 1.0)
    assert_abandoned(two, 10, reason)


def test_a_push_that_fails_behind_backward_gives_the_minibatch_up(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(two)
    failures: list[Exception] = [MemoryError("still no room"), MemoryError("no room")]

    def flush() -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(two[0].sender, "flush", flush)
    assert_abandoned(two, 10, "a push failed (MemoryError: no room)")
    assert not failures, "flushed until nothing is under way"


def test_a_forward_that_ended_with_an_exception_costs_its_microbatch_only(two: list[Rank]) -> None:
    begin(two)
    two[0].push(0, 6.0)
    two[0].iteration.cut_short = "forward"
    two[0].machine.recover()
    assert two[0].iteration.resets == 1
    assert end_together(two) == [None, None]
    assert two[1].grads()[0] == [3.0] * 4


def test_in_a_plain_loop_the_next_forward_ends_the_minibatch_of_a_failed_backward(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[1].push(0, 1.0)
    two[1].machine.done()
    two[0].iteration.cut_short = "backward"
    for change in (two[0].machine.before_step, two[0].machine.publish):
        with pytest.raises(UnfinishedMinibatchError, match="a backward that ended with an exception"):
            change()
    two[0].machine.recover()  # returns: this rank has had its exception
    assert states(two)[0] is RootState.CLOSED
    error = two[1].machine.collect()
    assert error is not None and error.culprit == 10
    two[0].machine.abandon("none is open")
    assert two[0].machine.current.given_up is None
    finish(two)
    assert [rank.machine.epoch for rank in two] == [2, 2]


def test_in_a_plain_loop_a_failed_backward_that_was_not_the_last_leaves_the_minibatch_open(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].iteration.cut_short, two[0].iteration.marked_last = "backward", False
    two[0].machine.recover()
    two[0].machine.recover()
    assert two[0].iteration.resets == 1 and states(two) == [RootState.OPEN] * 2
    two[0].push(0, 1.0)
    two[1].push(0, 1.0)
    assert_abandoned(two, 10, "a backward ended with an exception")


def test_reset_gives_up_what_was_pushed_and_nothing_else(two: list[Rank]) -> None:
    begin(two)
    two[0].machine.reset()
    assert two[0].iteration.resets == 1 and two[0].machine.current.given_up is None
    two[0].push(0, 1.0)
    two[0].machine.reset()
    assert_abandoned(two, 10, "reset_iter_state()")


def test_reset_raises_where_another_backward_of_the_minibatch_was_to_come(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`no_sync` has marked the next backward as the last again as the error left it."""
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 1.0)
    two[0].iteration.cut_short, two[0].iteration.marked_last = "backward", False
    monkeypatch.setattr(two[0].iteration, "is_last_backward", lambda: True)
    two[1].machine.done()
    with pytest.raises(AbandonedMinibatchError, match="reset_iter_state"):
        two[0].machine.reset()


def test_an_error_at_the_end_ends_the_job_and_is_not_stepped_over(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(two)
    for rank in two:
        rank.push(0, 1.0)
        rank.machine.done()
        rank.machine.explicit = False

    def hook(flat: torch.Tensor, first: int) -> None:
        raise ValueError("a hook of the parameter")

    monkeypatch.setattr(two[0].groups[0].odc_params[0], "add_gradient", hook)
    with pytest.raises(ValueError, match="a hook"):
        two[0].machine.collect()
    assert states(two)[0] is RootState.FAILED
    assert two[1].heaps.layouts[1].peer(1).board.load(Word.ABORT) == 1 + 10
    with pytest.raises(UnfinishedMinibatchError):
        two[0].machine.before_step()
    with pytest.raises(OdcError, match="ValueError in epoch 1: a hook of the parameter"):
        two[0].machine.begin()


def test_hooks_that_run_when_gradients_are_written_may_step_and_clip(
    two: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(two)
    two[0].push(0, 1.0)
    machine, stepped = two[0].machine, list[bool]()

    def hook(flat: torch.Tensor, first: int) -> None:
        machine.refuse_unfinished("clip_grad_norm_()")
        stepped.append(machine.may_step)

    monkeypatch.setattr(two[0].groups[0].odc_params[0], "add_gradient", hook)
    assert end_together(two) == [None, None]
    assert stepped == [True]
