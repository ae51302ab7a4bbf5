"""Sums of replicas, on one host or each on its own: members of one process, a thread each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.members import F32, HeapGroup
from support.spread import Copies

from odc.errors import PeerLostError
from odc.hosts.heaps import RemoteHeaps
from odc.protocol import UnitSpec, Word
from odc.protocol.reduction import Replicas
from odc.settings import Settings

LAYOUT = [[("w", 7, F32)], [("b", 2, F32)], [("unused", 64, F32)]]
USED = [True, True, False]


def gradient(member: int, unit: UnitSpec) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * member + 10 * unit.index)
    return torch.randn(unit.numel, generator=draw) * 10.0 ** (4 * (member // 2))


def gathered(replicas: int, spread: bool) -> tuple[HeapGroup, list[Copies], list[int]]:
    """Two shards, gradients that fp32 adds up otherwise in another order; the engines that have read; and the most
    reads that each replica had in progress before its REDUCED.
    """
    hosts = tuple(member // 2 for member in range(2 * replicas)) if spread else ()
    group = HeapGroup(LAYOUT, 2, replicas=replicas, settings=Settings(timeout_s=60.0), hosts=hosts)
    engines = [Copies(group, me) for me in range(len(group.members))]
    first = list[int]()
    for member, layout in enumerate(group.layouts):
        layout.mine.board.store(Word.PUBLISHED, 1)
        group.members[member].protocol.epoch = 1
        for unit in group.units:
            layout.mine.accumulator(unit).copy_(gradient(member, unit))
        for other in layout.grid.remote:  # as if it had stored the word before: here no thread reads it earlier
            layout.peer(other).board.store(Word.REDUCED, 0)

    def gather(member: int) -> None:
        protocol = group.members[member].protocol
        heaps = RemoteHeaps("group", engines[member], protocol)  # type: ignore[arg-type]
        end_reducing = protocol.end_reducing

        def mirrored() -> None:
            first.append(engines[member].most)
            engines[member].most = 0
            end_reducing()
            for layout in group.layouts:
                if member in layout.grid.remote:
                    layout.peer(member).board.store(Word.REDUCED, 1)

        protocol.end_reducing = mirrored  # type: ignore[method-assign]
        Replicas(protocol, heaps).gather(USED)

    with ThreadPoolExecutor(len(group.members)) as threads:
        list(threads.map(gather, range(len(group.members))))
    return group, engines, first


def in_rank_order(group: HeapGroup, shard: int, unit: int) -> torch.Tensor:
    first, *others = (gradient(member, group.units[unit]) for member in range(shard, len(group.members), 2))
    for values in others:
        first = first + values
    return first


@pytest.mark.parametrize(("replicas", "spread"), [(3, False), (3, True), (2, True), (8, True)])
def test_every_replica_gets_the_sum_in_rank_order(replicas: int, spread: bool) -> None:
    """Also where units have fewer elements than there are replicas."""
    group, *_ = gathered(replicas, spread)
    for member in range(len(group.members)):
        for unit in (0, 1):
            first, *others = group.members[member].reduction.parts(group.units[unit])
            total = first.clone()
            for part in others:
                total.add_(part)
            assert torch.equal(total, in_rank_order(group, member % 2, unit))
    group.close()


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_replica_reads_parts_where_that_is_less(replicas: int) -> None:
    """The other replicas' accumulators of 9 elements by two replicas; by more its own part of them, and their sums."""
    group, engines, _ = gathered(replicas, True)
    for member, engine in enumerate(engines):
        place, expected = member // 2, 0
        for unit in group.units[:2]:
            own = (place + 1) * unit.numel // replicas - place * unit.numel // replicas
            expected += (replicas - 1) * own + unit.numel - own if replicas > 2 else unit.numel
        assert engine.nbytes == 4 * expected
    assert sum(one.nbytes for one in engines) <= 2 * 4 * 9 * 2 * (replicas - 1)
    group.close()


@pytest.mark.parametrize("replicas", [2, 3])
def test_two_reads_of_other_hosts_are_in_progress(replicas: int) -> None:
    """Of their accumulators, and of the sums of their parts where there are any."""
    group, engines, first = gathered(replicas, True)
    last = [engine.most for engine in engines]
    assert last == [2] * len(engines)
    assert first == ([2] * len(engines) if replicas > 2 else [])
    group.close()


def test_a_replica_waits_for_the_sums_of_all_others() -> None:
    group = HeapGroup(LAYOUT, 1, replicas=3)
    group.publish_all()
    for last in (1, 2):
        group.layouts[last].mine.board.store(Word.LEFT, 1)  # before it has added its part up
        with pytest.raises(PeerLostError, match=rf"waiting for rank {group.ranks[last]} to add up its part"):
            group.members[0].reduction.gather(USED)
        group.layouts[last].mine.board.store(Word.REDUCED, 1)
    group.members[0].reduction.gather(USED)
    assert group.layouts[0].mine.board.load(Word.REDUCED) == 1
    group.close()
