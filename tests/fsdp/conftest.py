"""Fixtures of the tests of sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.machines import LAYOUT, Rank
from support.members import HeapGroup

from odc.fsdp import _torch_compat as compat
from odc.settings import Settings


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What would run at the end of the backward; torch's own part is left out."""
    queued: list[Callable[[], None]] = []
    monkeypatch.setattr(compat, "torch_finalize", lambda group: group.told.append("finalize"))
    monkeypatch.setattr(compat, "to_sharded", lambda group: group.told.append("reshard"))
    monkeypatch.setattr(compat, "queue_after_backward", queued.append)
    return queued


@pytest.fixture
def two() -> Iterator[list[Rank]]:
    with HeapGroup(LAYOUT, 2, settings=Settings(timeout_s=0.1)) as group:
        yield [Rank(group, 0), Rank(group, 1)]
