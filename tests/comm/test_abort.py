from __future__ import annotations

from collections.abc import Iterator

import pytest
from _members import F32, Crew

from odc.comm import Word, abort
from odc.comm.wait import read_reason
from odc.errors import PeerLostError
from odc.settings import Settings

LAYOUT = [[("w", 4, F32)]]
SHORT = Settings(timeout_s=0.1)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(LAYOUT, 3, settings=SHORT) as crew:
        crew.attach()
        yield crew


def test_the_own_board_and_those_named_learn_the_culprit_and_the_reason(crew: Crew) -> None:
    abort(crew.spaces[0], "out of luck", 13, [2])
    found = [(space.board(m).load(Word.ABORT), read_reason(space, m)) for m, space in enumerate(crew.spaces)]
    assert found == [(14, "out of luck"), (0, ""), (14, "out of luck")]


def test_the_first_reason_stays(crew: Crew) -> None:
    crew.verbs[1].abort("the first", 13)
    crew.verbs[2].abort("the second", 16)
    for member, space in enumerate(crew.spaces):
        assert read_reason(space, member) == "the first"
        assert space.board(member).load(Word.ABORT) == 1 + 13


def test_members_out_of_reach_do_not_stop_an_abort() -> None:
    with Crew(LAYOUT, 3, settings=SHORT) as crew:

        def lost(member: int) -> None:
            raise PeerLostError(f"{member} is gone") if member == 1 else ConnectionError(member)

        crew.spaces[0].heap._connect = lost  # type: ignore[attr-defined]
        abort(crew.spaces[0], "over", 10, [1, 2])
        assert crew.spaces[0].board(0).load(Word.ABORT) == 1 + 10


def test_a_reason_may_hold_any_text(crew: Crew) -> None:
    crew.verbs[0].abort("é" * 2000, 10)
    reason = read_reason(crew.spaces[1], 0)
    assert reason.startswith("é" * 500)
    assert len(reason.encode()) <= 1026
