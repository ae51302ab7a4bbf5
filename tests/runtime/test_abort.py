from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support.members import F32, Crew

from odc.memory import Attachment
from odc.runtime import Word, abort, read_reason
from odc.settings import Settings

LAYOUT = [[("w", 4, F32)]]
SHORT = Settings(timeout_s=0.1)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(LAYOUT, 3, settings=SHORT) as crew:
        crew.attach()
        yield crew


def test_the_own_board_and_those_attached_learn_the_culprit_and_the_reason(crew: Crew) -> None:
    abort(crew.spaces[0], "out of luck", 13)
    found = [(space.board(m).load(Word.ABORT), read_reason(space, m)) for m, space in enumerate(crew.spaces)]
    assert found == [(14, "out of luck")] * 3


def test_the_first_reason_stays(crew: Crew) -> None:
    crew.verbs[1].abort("the first", 13)
    crew.verbs[2].abort("the second", 16)
    for member, space in enumerate(crew.spaces):
        assert read_reason(space, member) == "the first"
        assert space.board(member).load(Word.ABORT) == 1 + 13


def test_an_abort_attaches_to_nobody() -> None:
    """A member that has not come up would hold it up, and the store that names the member may be gone."""
    with Crew(LAYOUT, 3, settings=SHORT) as crew:
        asked: list[int] = []

        def lost(member: int) -> Attachment:
            asked.append(member)
            raise dist.DistNetworkError("Broken pipe")

        crew.spaces[0].heap._connect = lost  # type: ignore[attr-defined]
        crew.verbs[0].abort("over", 10)
        assert crew.spaces[0].board(0).load(Word.ABORT) == 1 + 10
        assert asked == []


def test_an_abort_of_a_closed_heap_raises_nothing(crew: Crew) -> None:
    crew.spaces[1].close()
    crew.verbs[1].abort("too late", 13)


def test_a_reason_may_hold_any_text(crew: Crew) -> None:
    crew.verbs[0].abort("é" * 2000, 10)
    reason = read_reason(crew.spaces[1], 0)
    assert reason.startswith("é" * 500)
    assert len(reason.encode()) <= 1026
