"""Every interleaving of ranks that train, keep their states and die: each time there is a step to go back to.

A rank's steps are those of `Recovery.attempt` and `Slots.write`, one store or wait at a time; what the ranks agree on
is computed by the code itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from odc.recovery.members import Agreed, Held, NothingKeptError, Presence, Share, newest_common

RANKS, STEPS, DEATHS = 3, 3, 2
TORN = -1  # a slot that is being written, or holds nothing


class Rank(NamedTuple):
    """`at` is the next thing that it does in the step after `kept` ones; slots hold steps."""

    at: str
    step: int
    slots: tuple[int, int]


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    deaths: int


START = State((Rank("begin", 0, (0, TORN)),) * RANKS, 0)
Keep = Callable[[Rank], Rank]


def older(rank: Rank) -> int:
    return min(range(2), key=lambda i: rank.slots[i])


def with_slot(rank: Rank, i: int, step: int) -> tuple[int, int]:
    return (step, rank.slots[1]) if i == 0 else (rank.slots[0], step)


def tear(rank: Rank) -> Rank:
    """Begin to write into the slot with the older state."""
    return rank._replace(at="keep", slots=with_slot(rank, older(rank), TORN))


def kept(rank: Rank) -> Rank:
    """The number is stored last."""
    return Rank("begin", rank.step + 1, with_slot(rank, older(rank), rank.step + 1))


def moves(state: State, begin_keeping: Keep) -> Iterator[State]:
    """What may happen next, but for deaths."""
    for i, rank in enumerate(state.ranks):
        following = None
        if rank.at == "begin" and rank.step < STEPS:
            following = rank._replace(at="done")  # forward, backward, DONE
        elif rank.at == "done" and all((other.step, other.at != "begin") >= (rank.step, True) for other in state.ranks):
            following = rank._replace(at="collected")  # all are done with this step
        elif rank.at == "collected":
            following = begin_keeping(rank)
        elif rank.at == "keep":
            following = kept(rank)
        if following is not None:
            yield state._replace(ranks=(*state.ranks[:i], following, *state.ranks[i + 1 :]))


def recovered(state: State) -> State:
    """All ranks after a death in `state`: what each has whole is held by the others, whoever died."""
    held = {Share(0, i): Held([], [step for step in rank.slots if step != TORN]) for i, rank in enumerate(state.ranks)}
    found = newest_common([Presence(1, "", held)], {0: RANKS}, 0)
    assert found is not None, state
    agreed = found.step
    newest = max(max(rank.slots) for rank in state.ranks)
    assert agreed >= newest - 1, f"more than one step is lost: {state}"
    forgotten = (tuple(step if step <= agreed else TORN for step in rank.slots) for rank in state.ranks)
    return State(tuple(Rank("begin", agreed, (one[0], one[1])) for one in forgotten), state.deaths + 1)


def explore(begin_keeping: Keep = tear) -> set[State]:
    """All states that can be reached; each rank's end, or that of several at once, may come in any of them."""
    seen, todo = {START}, [START]
    while todo:
        state = todo.pop()
        following = [*moves(state, begin_keeping), *([recovered(state)] if state.deaths < DEATHS else [])]
        finished = all(rank.step == STEPS and rank.at == "begin" for rank in state.ranks)
        assert finished or following, f"nothing can happen any more: {state}"
        todo += (new := {*following} - seen)
        seen |= new
    return seen


def test_a_death_at_any_moment_leaves_a_step_to_go_back_to() -> None:
    states = explore()
    assert any(max(rank.step for rank in state.ranks) != min(rank.step for rank in state.ranks) for state in states)
    assert any(state.deaths == DEATHS and all(rank.step == STEPS for rank in state.ranks) for state in states)


def newer(rank: Rank) -> Rank:
    """Writes over the newer state."""
    return rank._replace(at="keep", slots=with_slot(rank, 1 - older(rank), TORN))


def both(rank: Rank) -> Rank:
    """Has one slot in effect."""
    return rank._replace(at="keep", slots=(TORN, TORN))


@pytest.mark.parametrize("wrong", [newer, both])
def test_a_wrong_order_is_found(wrong: Keep) -> None:
    with pytest.raises((AssertionError, NothingKeptError)):
        explore(wrong)


def test_keeping_ahead_of_the_others_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that did not wait for the end of the minibatch could be two steps ahead of what another has whole."""

    def hasty(state: State, begin_keeping: Keep) -> Iterator[State]:
        for i, rank in enumerate(state.ranks):
            if rank.at == "done":
                yield state._replace(ranks=(*state.ranks[:i], rank._replace(at="collected"), *state.ranks[i + 1 :]))
        yield from plain(state, begin_keeping)

    plain = moves
    monkeypatch.setitem(globals(), "moves", hasty)
    with pytest.raises((AssertionError, NothingKeptError)):
        explore()


# Fewer ranks: what three have kept in layout 0, two divide anew in layout 1. A rank's steps are those of
# `Recovery._divide_anew`: it writes its share, waits until all have, and lets the former layout go.
WHOLE = ("before", "torn", "whole")
GONE = "gone"


def dividing(waits: bool) -> set[tuple[str, ...]]:
    """Every pair of places where both can be."""
    order = (*WHOLE, GONE)
    seen, todo = {("before",) * 2}, [("before",) * 2]
    while todo:
        pair = todo.pop()
        for i, at in enumerate(pair):
            ready = at != "whole" or not waits or all(one in ("whole", GONE) for one in pair)
            if at != GONE and ready:
                new = (*pair[:i], order[order.index(at) + 1], *pair[i + 1 :])
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
    return seen


def found_by(pair: tuple[str, ...], survivors: tuple[int, ...]) -> Agreed | None:
    """What those that live agree on; each holds the shares of all."""
    new = {Share(1, i): Held([], [4] if at in ("whole", GONE) else []) for i, at in enumerate(pair)}
    former = {Share(0, i): Held([], [4, 5] if i else [3, 4]) for i in range(3)}  # rank 0 was a step behind
    shown = [Presence(1, "", new | (former if pair[i] != GONE else {})) for i in survivors]
    return newest_common(shown, {share.layout: 3 - share.layout for one in shown for share in one.held}, 0)


@pytest.mark.parametrize("survivors", [(0,), (1,), (0, 1)])
def test_a_death_while_the_state_is_divided_anew_loses_nothing(survivors: tuple[int, ...]) -> None:
    pairs = dividing(waits=True)
    found = {pair: found_by(pair, survivors) for pair in pairs}
    assert {*found.values()} == {Agreed(0, 4), Agreed(1, 4)}
    assert all(found[pair] == Agreed(1, 4) for pair in pairs if GONE in pair)


def test_a_former_layout_that_is_let_go_of_early_is_found() -> None:
    pairs = sorted(dividing(waits=False))
    with pytest.raises(NothingKeptError):
        [found_by(pair, (0,)) for pair in pairs]
