from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.members import BF16, F16, F32, F64, HeapGroup

from odc.errors import PeerLostError, WaitTimeoutError
from odc.protocol import Adder, Gradient, MemberProtocol, Piece, UnitSpec, accumulator_dtype
from odc.protocol import accumulate as accumulator_module
from odc.settings import Settings

NUMEL = 5000


def made(shards: int = 2, **settings: object) -> HeapGroup:
    return HeapGroup([[("w", NUMEL, F32)], [("v", 64, F32)]], shards, settings=Settings(**settings))  # type: ignore[arg-type]


def random(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 10 ** torch.randint(-6, 4, (numel,), generator=generator)).to(
        dtype
    )


def add(group: HeapGroup, member: int, owner: int, unit: UnitSpec, first: int, values: torch.Tensor) -> None:
    layout = group.layouts[member]
    Adder(layout).add(owner, unit, [Piece(first, values)])


@contextmanager
def lock_held_elsewhere(group: HeapGroup, owner: int, unit: int) -> Iterator[None]:
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with group.layouts[owner].peer(owner).mutex(group.units[unit]).held(60.0):
            taken.set()
            over.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60.0)
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_push_that_waits_for_a_lock_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder may be stopped, for longer than any deadline."""
    with made(accumulate="direct", timeout_s=600.0) as group:
        group.publish(0, 0.0)
        group.publish(1, 0.0)
        gradient = Gradient(0, torch.ones(2 * NUMEL))
        with lock_held_elsewhere(group, 1, 0):
            group.members[0].protocol.abort("rank 1 was stopped", 1)
            monkeypatch.setattr(MemberProtocol, "await_published", lambda *unused: None)  # it had, before that
            with pytest.raises(PeerLostError, match="pushing unit 'u0'.*rank 1 was stopped"):
                group.members[0].pusher.push(group.units[0], [gradient])


@pytest.mark.parametrize("wire", [F32, BF16, F16, F64])
@pytest.mark.parametrize("reproducible", [False, True])
def test_adds_what_torch_adds_after_an_exact_upcast(wire: torch.dtype, reproducible: bool) -> None:
    with made(reproducible=reproducible) as group:
        expected = torch.zeros(NUMEL, dtype=accumulator_dtype(reproducible))
        for step in range(5):
            values = random(NUMEL, wire, step)
            add(group, 1, 0, group.units[0], 0, values)
            expected += values.to(expected.dtype)
        assert torch.equal(group.layouts[0].peer(0).accumulator(group.units[0]), expected)


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_element_is_added_once_whatever_the_blocks(
    numel: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulator_module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(accumulator_module, "PARALLEL_GRAIN", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with made() as group:
        values = torch.arange(1.0, numel + 1)
        add(group, 0, 0, group.units[0], 30, values)
        found = group.layouts[0].peer(0).accumulator(group.units[0])
        assert torch.equal(found[30 : 30 + numel], values)
        assert not found[:30].any() and not found[30 + numel :].any()
        assert not group.layouts[0].peer(0).accumulator(group.units[1]).any()


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_writers_at_once_lose_nothing(accumulate: str) -> None:
    with made(3, accumulate=accumulate) as group:
        group.attach()
        start = threading.Barrier(3)

        def push(member: int) -> None:
            start.wait()
            for _ in range(300):
                add(group, member, 0, group.units[0], 0, torch.ones(NUMEL))

        threads = [threading.Thread(target=push, args=(member,)) for member in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(group.layouts[0].peer(0).accumulator(group.units[0]), torch.full((NUMEL,), 900.0))


def test_waits_for_the_lock_of_that_unit_alone_and_names_it() -> None:
    with made(accumulate="direct", timeout_s=0.05) as group:
        group.attach()
        with lock_held_elsewhere(group, owner=0, unit=0):
            with pytest.raises(WaitTimeoutError, match="accumulator of unit 'u0' on rank 10"):
                add(group, 1, 0, group.units[0], 0, torch.ones(4))
            add(group, 1, 0, group.units[1], 0, torch.ones(4))
            add(group, 1, 1, group.units[0], 0, torch.ones(4))
        assert not group.layouts[0].peer(0).accumulator(group.units[0]).any(), "nothing was added without the lock"


def test_the_lock_is_given_back_between_blocks_and_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with made(timeout_s=0.05) as group:
        unit = group.units[0]
        with pytest.raises(RuntimeError, match="size"):
            add(group, 0, 0, unit, NUMEL - 2, torch.ones(4))  # over the end: torch refuses
        add(group, 0, 0, unit, 0, torch.ones(4))


def test_the_lock_of_a_large_add_is_given_back_every_eight_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 5 << 20  # 20 MiB of fp32
    with HeapGroup([[("w", numel, F32)]], 2) as group:
        layout, turns = group.layouts[0], list[int]()
        mutex, add_to = layout.peer(0).mutex(group.units[0]), layout.mover.add

        class Watched:
            @contextmanager
            def held(self, *given: Any) -> Iterator[None]:
                turns.append(0)
                with mutex.held(*given):
                    yield

        def watched(places: list[torch.Tensor], values: list[torch.Tensor]) -> None:
            turns[-1] += sum(place.nbytes for place in places)
            add_to(places, values)

        monkeypatch.setattr(layout.peer(0), "mutex", lambda unit: Watched())
        monkeypatch.setattr(layout.mover, "add", watched)
        add(group, 0, 0, group.units[0], 0, torch.ones(numel))
        assert sum(turns) == 20 << 20 and max(turns) <= 9 << 20
        assert bool((layout.peer(0).accumulator(group.units[0]) == 1.0).all())
