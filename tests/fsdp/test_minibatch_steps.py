"""Epochs of evaluation, weights that change, and optimizer steps, at the state machine of odc/fsdp/minibatch.py."""

from __future__ import annotations

import pytest
from support.machines import Rank, finish, states

from odc.errors import OdcError, UnfinishedMinibatchError
from odc.protocol import Outcome, RootState, Word

pytestmark = pytest.mark.usefixtures("queued")


@pytest.fixture
def two(two: list[Rank]) -> list[Rank]:
    """With an open minibatch."""
    begin(two)
    return two


def begin(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.machine.begin()


def train(ranks: list[Rank]) -> None:
    ranks[0].push(0, 1.0)
    finish(ranks)
    assert all(rank.grads()[0] == [0.5] * 4 for rank in ranks)


def test_an_epoch_without_pushes_is_closed_without_waiting_for_any_rank(two: list[Rank]) -> None:
    two[0].machine.close_evaluation("optimizer.step()")
    assert states(two)[0] is RootState.CLOSED
    assert all(group.calls == ["drop", "reshard"] for group in two[0].groups)
    board = two[0].heaps.layouts[1].peer(0).board
    assert board.load(Word.DONE) == 1
    assert two[1].heaps.members[1].protocol.closed_as(Outcome.EVALUATED) == [0]
    two[0].machine.close_evaluation("optimizer.step()")
    assert board.load(Word.DONE) == 1


@pytest.mark.parametrize(("what", "doing"), [("publish", "publish"), ("before_step", "optimizer.step")])
def test_what_was_pushed_is_not_thrown_away(two: list[Rank], what: str, doing: str) -> None:
    two[0].push(0, 1.0)
    with pytest.raises(
        UnfinishedMinibatchError, match=rf"rank 10 \(epoch 1\): {doing}\(\) inside an unfinished minibatch"
    ):
        getattr(two[0].machine, what)()
    assert states(two)[0] is RootState.OPEN
    finish(two)
    assert two[1].grads()[0] == [0.5] * 4


def test_what_belongs_after_the_block_is_refused_inside(two: list[Rank]) -> None:
    two[0].machine.explicit = True
    with pytest.raises(UnfinishedMinibatchError, match=r"optimizer\.step\(\) inside `with model\.minibatch\(\)`"):
        two[0].machine.before_step()  # even before a push
    two[0].push(0, 1.0)
    with pytest.raises(UnfinishedMinibatchError, match=r"load_state_dict\(\) inside `with model\.minibatch\(\)`"):
        two[0].machine.close_evaluation("load_state_dict()")


def test_publish_shows_new_values_to_every_rank(two: list[Rank]) -> None:
    for rank in two:
        rank.groups[1].odc_params[0].values.fill_(1.0 + rank.me)
        rank.machine.close_evaluation("publish()")
    for rank in two:
        rank.machine.publish()
    layout = two[0].heaps.layouts[0]
    assert [layout.peer(member).published(layout.units[1], 0)[0].item() for member in (0, 1)] == [1.0, 2.0]
    assert [rank.machine.epoch for rank in two] == [2, 2]
    assert states(two) == [RootState.OPEN] * 2


def test_a_step_on_some_ranks_alone_is_refused_before_gradients_are_written(two: list[Rank]) -> None:
    """As where `with model.minibatch():` was forgotten, and one rank has two microbatches in a step."""
    train(two)
    for rank in two:
        rank.machine._protocol.note_step()
    begin(two)
    train(two)
    two[0].machine._protocol.note_step()
    begin(two)
    two[0].push(0, 1.0)
    for rank in two:
        rank.machine.done()
    for rank in two:
        with pytest.raises(OdcError, match=r"rank 10 has called optimizer\.step\(\) .* rank 13 has not, .*minibatch"):
            rank.machine.collect()
        assert rank.grads()[0] is None


def test_a_step_before_an_evaluation_is_not_held_against_the_next_minibatch(two: list[Rank]) -> None:
    two[0].machine._protocol.note_step()
    for rank in two:
        rank.machine.close_evaluation("optimizer.step()")
    two[0].machine._protocol.note_step()
    begin(two)
    for rank in two:
        rank.machine.close_evaluation("optimizer.step()")
    begin(two)
    train(two)


@pytest.mark.parametrize("evaluates_again", [False, True])
def test_training_in_an_epoch_that_another_rank_only_evaluated_names_that_rank(
    two: list[Rank], evaluates_again: bool
) -> None:
    two[0].push(0, 1.0)
    two[1].machine.close_evaluation("step")
    two[0].machine.done()
    if evaluates_again:  # which does not hide this one
        two[1].machine.begin()
        two[1].machine.close_evaluation("step")
    with pytest.raises(OdcError, match="rank 10 trained in epoch 1, but rank 13 closed that epoch after evaluation"):
        two[0].machine.collect()
    # Or rank 13 would wait for the next epoch in vain.
    assert two[1].heaps.layouts[1].peer(1).board.load(Word.ABORT) == 1 + 13
