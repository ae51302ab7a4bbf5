from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support.members import F32, HeapGroup

from odc.memory import Attachment
from odc.protocol import Word
from odc.protocol.protocol import abort
from odc.settings import Settings

LAYOUT = [[("w", 4, F32)]]
SHORT = Settings(timeout_s=0.1)


@pytest.fixture
def group() -> Iterator[HeapGroup]:
    with HeapGroup(LAYOUT, 3, settings=SHORT) as group:
        group.attach()
        yield group


def test_the_own_board_and_those_attached_learn_the_culprit_and_the_reason(group: HeapGroup) -> None:
    abort(group.layouts[0], "out of luck", 13)
    found = [(layout.peer(m).board.load(Word.ABORT), layout.peer(m).reason) for m, layout in enumerate(group.layouts)]
    assert found == [(14, "out of luck")] * 3


def test_the_first_reason_stays(group: HeapGroup) -> None:
    group.members[1].protocol.abort("the first", 13)
    group.members[2].protocol.abort("the second", 16)
    for member, layout in enumerate(group.layouts):
        assert layout.peer(member).reason == "the first"
        assert layout.peer(member).board.load(Word.ABORT) == 1 + 13


def test_an_abort_attaches_to_nobody() -> None:
    """A member that has not come up would hold it up, and the store that names the member may be gone."""
    with HeapGroup(LAYOUT, 3, settings=SHORT) as group:
        asked: list[int] = []

        def lost(member: int) -> Attachment:
            asked.append(member)
            raise dist.DistNetworkError("Broken pipe")

        group.layouts[0].heap._connect = lost  # type: ignore[attr-defined]
        group.members[0].protocol.abort("over", 10)
        assert group.layouts[0].peer(0).board.load(Word.ABORT) == 1 + 10
        assert asked == []


def test_an_abort_of_a_closed_heap_raises_nothing(group: HeapGroup) -> None:
    group.layouts[1].close()
    group.members[1].protocol.abort("too late", 13)


def test_a_reason_may_hold_any_text(group: HeapGroup) -> None:
    group.members[0].protocol.abort("é" * 2000, 10)
    reason = group.layouts[1].peer(0).reason
    assert reason.startswith("é" * 500)
    assert len(reason.encode()) <= 1026
