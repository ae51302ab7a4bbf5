"""Epochs of evaluation, weights that change, and optimizer steps, at the state machine of odc/fsdp/minibatch.py."""

from __future__ import annotations

import pytest
from support.machines import Rank, finish, states

from odc.errors import OdcError, UnfinishedMinibatchError
from odc.protocol import Outcome, RootState, Word

pytestmark = pytest.mark.usefixtures("heard")


def test_an_epoch_without_pushes_is_closed_without_waiting_for_anybody(two: list[Rank]) -> None:
    two[0].machine.begin()
    two[0].machine.close_evaluation("optimizer.step()")
    assert states(two)[0] is RootState.CLOSED
    assert all(group.told == ["drop", "reshard"] for group in two[0].groups)
    board = two[0].heaps.layouts[1].peer(0).board
    assert board.load(Word.DONE) == 1
    two[1].machine.begin()
    assert two[1].heaps.members[1].protocol.closed_as(Outcome.EVALUATED) == [0]
    two[0].machine.close_evaluation("optimizer.step()")
    assert board.load(Word.DONE) == 1


@pytest.mark.parametrize("what", ["publish", "before_step"])
def test_what_was_pushed_is_not_thrown_away(two: list[Rank], what: str) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 1.0)
    doing = {"publish": "publish", "before_step": "optimizer.step"}[what]
    with pytest.raises(
        UnfinishedMinibatchError, match=rf"rank 10 \(epoch 1\): {doing}\(\) inside an unfinished minibatch"
    ):
        getattr(two[0].machine, what)()
    assert states(two)[0] is RootState.OPEN
    finish(two)
    assert two[1].grads()[0] == [0.5] * 4


def test_what_belongs_after_the_block_is_said_to(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 1.0)
    two[0].machine.explicit = True
    with pytest.raises(UnfinishedMinibatchError, match=r"load_state_dict\(\) inside `with model\.minibatch\(\)`"):
        two[0].machine.close_evaluation("load_state_dict()")


def test_publish_shows_new_values_to_everybody(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    for rank in two:
        rank.groups[1].odc_params[0].values.fill_(1.0 + rank.me)
        rank.machine.close_evaluation("publish()")
    for rank in two:
        rank.machine.publish()
    layout = two[0].heaps.layouts[0]
    assert [layout.peer(member).published(layout.units[1], 0)[0].item() for member in (0, 1)] == [1.0, 2.0]
    assert [rank.machine.epoch for rank in two] == [2, 2]
    assert states(two) == [RootState.OPEN] * 2


def test_ranks_of_which_some_have_stepped_are_told_before_gradients_are_written(two: list[Rank]) -> None:
    """As where `with model.minibatch():` was forgotten, and one rank has two microbatches in a step."""
    for stepped in ((), (0, 1)):
        for member in stepped:
            two[member].machine._protocol.note_step()
        for rank in two:
            rank.machine.begin()
        two[0].push(0, 1.0)
        finish(two)
        assert all(rank.grads()[0] == [0.5] * 4 for rank in two)
    two[0].machine._protocol.note_step()
    for rank in two:
        rank.machine.begin()
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
        rank.machine.begin()
    for rank in two:
        rank.machine.close_evaluation("optimizer.step()")
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 1.0)
    finish(two)
    assert two[1].grads()[0] == [0.5] * 4


def test_a_step_inside_the_block_is_refused_even_before_a_push(two: list[Rank]) -> None:
    two[0].machine.begin()
    two[0].machine.explicit = True
    with pytest.raises(UnfinishedMinibatchError, match=r"optimizer\.step\(\) inside `with model\.minibatch\(\)`"):
        two[0].machine.before_step()


def test_training_in_an_epoch_that_another_rank_only_evaluated_is_an_error_that_names_it(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 1.0)
    two[1].machine.close_evaluation("step")
    two[0].machine.done()
    with pytest.raises(OdcError, match="rank 10 trained in epoch 1, but rank 13 closed that epoch after evaluation"):
        two[0].machine.collect()
    assert two[1].heaps.layouts[1].peer(1).board.load(Word.ABORT) == 1 + 13, (
        "rank 13 would wait for the next epoch in vain"
    )


def test_an_evaluation_of_the_next_epoch_does_not_hide_that_of_this_one(two: list[Rank]) -> None:
    for rank in two:
        rank.machine.begin()
    two[0].push(0, 1.0)
    two[1].machine.close_evaluation("step")
    two[0].machine.done()
    two[1].machine.begin()
    two[1].machine.close_evaluation("step")
    with pytest.raises(OdcError, match="but rank 13 closed that epoch after evaluation"):
        two[0].machine.collect()
