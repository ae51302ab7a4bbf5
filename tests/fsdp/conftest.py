"""Fixtures of the tests of sharding."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from support.failing import end
from support.machines import LAYOUT, Rank
from support.members import HeapGroup
from support.ranks import RankOutcome, spawn_ranks

from odc.fsdp import _torch_compat as compat
from odc.settings import Settings


@pytest.fixture
def ended(nothing_left: list[int]) -> Callable[..., list[RankOutcome]]:
    """`ended(program, *args)` runs a program on two ranks, or `world`, that are started for it, to their end.

    Nothing of theirs may be left when the test ends.
    """

    def run(program: Callable[..., object], *args: object, world: int = 2) -> list[RankOutcome]:
        with spawn_ranks(world, program, *args) as job:
            return end(job, nothing_left)

    return run


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What would run at the end of the backward; torch's own part is left out."""
    callbacks: list[Callable[[], None]] = []
    monkeypatch.setattr(compat, "torch_finalize", lambda group: group.calls.append("finalize"))
    monkeypatch.setattr(compat, "to_sharded", lambda group: group.calls.append("reshard"))
    monkeypatch.setattr(compat, "queue_after_backward", callbacks.append)
    return callbacks


@pytest.fixture
def name() -> str:
    """Of keys in a job's store: unlike any other of the same ranks."""
    return uuid.uuid4().hex


@pytest.fixture
def two() -> Iterator[list[Rank]]:
    with HeapGroup(LAYOUT, 2, settings=Settings(timeout_s=0.1)) as group:
        yield [Rank(group, 0), Rank(group, 1)]
