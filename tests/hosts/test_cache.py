"""The cache and the sums of a node: members of two hosts in one process, and an engine that copies."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support.deferred import late_heaps
from support.linked import HOSTS
from support.members import F32, HeapGroup
from support.spread import LAYOUT, Spread

from odc.errors import PeerLostError
from odc.hosts.sums import NodeSums
from odc.memory import MUTEX_BYTES, RobustMutex
from odc.protocol import Word, regions, wait
from odc.protocol.peers import remote
from odc.protocol.peers.remote import NodeShare
from odc.settings import Accumulate, Settings


def test_a_shard_crosses_once_a_host_and_epoch(spread: Spread) -> None:
    spread.publish(5.0)
    for me in (0, 1, 0, 1):
        for unit in (0, 1):
            assert spread.fetch(me, unit) == [5.0, 6.0, 7.0, 8.0]
    reads = sorted(spread.engines[0].reads + spread.engines[1].reads)
    sizes = [spread.group.units[unit].published_bytes for unit in (0, 1)]
    assert reads == sorted((spread.group.ranks[owner], size) for owner in (2, 3) for size in sizes)
    assert not spread.engines[2].reads
    spread.publish(50.0)
    assert spread.fetch(1, 0) == [50.0, 51.0, 52.0, 53.0], "the cache is of the last epoch"


def test_what_is_in_the_cache_is_not_claimed(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hundreds of owners each question counts."""
    spread.publish(5.0)
    spread.fetch(1, 0)
    claims, asked = NodeShare.claims, list[int]()
    monkeypatch.setattr(NodeShare, "claims", lambda share, unit: (asked.append(share.member), claims(share, unit))[1])
    assert spread.fetch(0, 0) == [5.0, 6.0, 7.0, 8.0]
    assert not asked


def test_the_words_of_a_cache_are_found_once(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    spread.publish(5.0)
    for me in (0, 1):
        spread.fetch(me, 0)
        for owner in (2, 3):
            spread.group.layouts[me].share(owner).claims(spread.group.units[0])
    found, words_at = list[str](), remote.words_at
    monkeypatch.setattr(remote, "words_at", lambda *where: (found.append(where[2]), words_at(*where))[1])
    spread.publish(50.0)
    for me in (0, 1):
        assert spread.fetch(me, 0) == [50.0, 51.0, 52.0, 53.0]
    share, unit = spread.group.layouts[0].share(2), spread.group.units[0]
    assert not [name for name in found if name.startswith("node/")]
    share.forget()
    assert share.cached(unit).load(0) == share.claims(unit).load(0) == 2
    assert found[-2:] == ["node/cached", "node/claims"]


def test_the_second_rank_waits_for_the_one_that_reads(spread: Spread) -> None:
    spread.publish()
    peer, unit = spread.group.layouts[0].share(2), spread.group.units[0]
    peer.claims(unit).store(1, 1)
    peer.claims(unit).store(0, 1)  # member 1 has claimed the shard of member 2, and has not read it
    spread.group.layouts[1].mine.board.store(Word.ABORT, 1 + 13)
    with pytest.raises(PeerLostError, match="waiting for rank 13 to read unit 'u0' of epoch 1 from rank 16"):
        spread.fetch(0, 0)
    assert [rank for rank, _ in spread.engines[0].reads] == [19], "it has read what was not claimed"


def test_a_rank_that_waits_for_one_that_has_left_meanwhile_reads_itself(spread: Spread) -> None:
    """A rank whose evaluation needs less than the last epoch leaves while its thread reads the rest."""
    spread.publish(5.0)
    for unit in (0, 1):
        spread.fetch(1, unit)
    spread.caches[1].settle()
    spread.publish(50.0)
    reading, goes_on = threading.Event(), threading.Event()
    read = spread.engines[1].read

    def slow(*arguments: Any, **options: Any) -> None:
        if threading.current_thread().name == "odc-ahead":
            reading.set()
            assert goes_on.wait(60)
        read(*arguments, **options)

    spread.engines[1].read = slow  # type: ignore[method-assign]
    spread.caches[1]._look_ahead(0, 2)
    assert reading.wait(60)  # of what it has claimed
    spread.group.layouts[1].mine.board.store(Word.LEFT, 1)
    try:
        for unit in (0, 1):
            assert spread.fetch(0, unit) == [50.0, 51.0, 52.0, 53.0]
    finally:
        goes_on.set()


def test_a_failed_read_is_explained_by_the_link(spread: Spread) -> None:
    spread.publish()
    spread.engines[0].fails = True
    spread.group.layouts[0].mine.set_reason("rank 16 died in epoch 1")
    board = spread.group.layouts[0].mine.board
    read = spread.engines[0].read

    def aborted_meanwhile(*arguments: Any, **options: Any) -> None:
        board.store(Word.ABORT, 1 + 16)
        read(*arguments, **options)

    spread.engines[0].read = aborted_meanwhile  # type: ignore[method-assign]
    with pytest.raises(PeerLostError, match="aborted by rank 16: rank 16 died in epoch 1"):
        spread.fetch(0, 0)


def test_a_rank_that_died_with_a_lock_is_named(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that finds the lock so, before its daemon knows which rank died."""
    mine = spread.group.layouts[0].mine

    def held(*unused: Any) -> None:
        raise PeerLostError("a process died while it held it")

    def aborted_meanwhile(*unused: Any) -> None:
        mine.set_reason("rank 13 died in epoch 1")
        mine.board.store(Word.ABORT, 1 + 13)

    spread.publish()
    monkeypatch.setattr(RobustMutex, "held", held)
    monkeypatch.setattr(wait.Backoff, "sleep", aborted_meanwhile)
    for does in (lambda: spread.fetch(0, 0), lambda: spread.push(0, 0, 1.0)):
        mine.board.store(Word.ABORT, 0)
        with pytest.raises(PeerLostError, match="aborted by rank 13: rank 13 died in epoch 1") as caught:
            does()
        assert caught.value.culprit == 13


def test_nodes_of_one_host_fill_their_caches_by_copies() -> None:
    spread = Spread(nodes=True)
    kept = spread.group.layouts[1].share(2).published_bytes(spread.group.units[0]).view(F32)
    for value in (5.0, 50.0):
        spread.publish(value)
        for me in range(4):
            assert spread.fetch(me, 0) == [value, value + 1, value + 2, value + 3]
        assert kept[0] == value + 2, "the shard of member 2 lies in the heap of member 0"
    assert not any(engine.reads for engine in spread.engines)
    spread.close()


@pytest.mark.parametrize("nodes", [False, True], ids=["hosts", "nodes of a host"])
@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_gradients_are_summed_on_the_host_and_cross_once(accumulate: Accumulate, nodes: bool) -> None:
    spread = Spread(accumulate, nodes=nodes)
    group = spread.group
    for epoch in (1, 2):  # what was summed in the first must not be there in the second
        spread.publish()
        for me in range(4):
            for unit in group.units[:2]:
                for _ in range(epoch):
                    spread.push(me, unit.index, 10.0**me)
        for me in range(4):
            NodeSums(group.members[me].protocol, spread.heaps[me]).gather([True, True, False])
            for unit in group.units[:2]:
                found = list(group.members[me].reduction.parts(unit))
                assert [part[0].item() for part in found] == [epoch * 11.0, epoch * 1100.0]
                assert all(bool((part == part[0]).all()) for part in found)
    sums = [nbytes for engine in spread.engines for _, nbytes in engine.reads]
    assert len(sums) == (0 if nodes else 2 * 4), "units that follow each other are read together"
    spread.close()


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_a_device_that_is_late_sums_and_fetches_alike(
    accumulate: Accumulate, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines read what has settled, into this rank's own memory alone; what is for a peer's is copied there."""
    monkeypatch.setattr(regions, "_LANDING_BYTES", 64)
    lanes = late_heaps(monkeypatch, atomic=atomic)
    spread = Spread(accumulate, only_into_own=True)
    group = spread.group
    for epoch in (1, 2):
        spread.publish(10.0 * epoch)
        spec = group.units[0]
        outs = [[torch.empty(4 * param.numel) for param in spec.params] for _ in range(4)]
        for me in (3, 2, 1, 0):
            with lanes[me].lane("fetch"):
                group.members[me].shards.fetch(spec, outs[me])
        for me in range(4):  # the rank that read for its host has settled before it stored CACHED
            with lanes[me].lane("fetch"):
                lanes[me].settle()
            assert outs[me][0].view(4, -1).tolist() == [[10.0 * epoch + owner] * 8 for owner in range(4)]
        for me in range(4):
            for unit in group.units[:2]:
                with lanes[me].lane("push"):
                    spread.push(me, unit.index, 10.0**me)
        for me in range(4):
            NodeSums(group.members[me].protocol, spread.heaps[me]).gather([True, True, False])
            for unit in group.units[:2]:
                assert [set(part.tolist()) for part in group.members[me].reduction.parts(unit)] == [{11.0}, {1100.0}]
    spread.close()


@pytest.mark.parametrize("nodes", [False, True], ids=["hosts", "nodes of a host"])
def test_what_a_node_waits_for_does_not_wait_for_a_ranks_compute(nodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fetch asks for comes behind the rank's compute; what it reads for its node is CACHED without that."""
    lanes = late_heaps(monkeypatch, atomic=True)
    spread, computed = Spread(only_into_own=True, nodes=nodes), list[int]()
    spread.publish()
    unit = spread.group.units[0]
    with lanes[0].lane("fetch"):
        lanes[0].ask(lambda: computed.append(1))
        spread.group.members[0].shards.fetch(unit, [torch.empty(4 * param.numel) for param in unit.params])
        cached = [spread.group.layouts[0].share(owner).cached(unit).load(0) for owner in (2, 3)]
        assert not computed and 1 in cached
        lanes[0].settle()
    assert computed
    spread.close()


def test_units_that_no_rank_used_do_not_cross(spread: Spread) -> None:
    spread.publish()
    NodeSums(spread.group.members[0].protocol, spread.heaps[0]).gather([False, False, False])
    assert not spread.engines[0].reads
    NodeSums(spread.group.members[0].protocol, spread.heaps[0]).gather([True, False, True])
    assert [nbytes for _, nbytes in spread.engines[0].reads] == [64, 64]


def test_the_ledger_shows_the_cost_of_hosts() -> None:
    with (
        HeapGroup(LAYOUT, 4) as one,
        HeapGroup(LAYOUT, 4, hosts=HOSTS) as two,
        HeapGroup(LAYOUT, 4, hosts=(0, 1, 2, 3)) as four,
        HeapGroup(LAYOUT, 4, hosts=HOSTS, settings=Settings(sums_dtype="bfloat16")) as rounded,
    ):
        single, double, quadruple, half = (group.layouts[0].ledger() for group in (one, two, four, rounded))
        assert "cache" not in single
        published = sum(max(64, unit.published_bytes) for unit in one.units)
        sums = sum(-(-unit.accumulator_bytes // 64) * 64 for unit in one.units)
        assert double["changes"] == 3 * 64 and "changes" not in single, "no less than a line each"
        assert (double["cache"], double["sums"]) == (published, 2 * sums), "sums for the other host, and those of it"
        assert (quadruple["cache"], quadruple["sums"]) == (3 * published, 6 * sums)
        shorter = sum(-(-unit.numel * 2 // 64) * 64 for unit in one.units)
        assert (half["cache"], half["sums"]) == (published, sums + 2 * shorter), "whole, rounded, and those that arrive"
        assert double["staging"] == 0 < single["staging"], "over hosts every rank adds to accumulators too"
        assert sum(double.values()) == sum(
            nbytes for name, nbytes in two.layouts[0].heap.bytes_by_name().items() if name != "heap/layout"
        )
        assert two.layouts[0].heap.layout.size("node/mutexes") == len(two.units) * 2 * MUTEX_BYTES
        assert one.layouts[0].heap.bytes_by_name().keys().isdisjoint({"mirror/board", "cache/0/0", "sums/0"})


def test_units_are_read_ahead_in_the_order_of_the_last_epoch(spread: Spread) -> None:
    spread.publish(5.0)
    for unit in (2, 0):
        spread.fetch(0, unit)
    assert len(spread.engines[0].reads) == 4, "of an unknown order nothing is read ahead"
    cache = spread.caches[0]
    for epoch in (2, 3):
        cache.settle()
        spread.publish(50.0 * epoch)
        del spread.engines[0].reads[:]
        spread.fetch(0, 2)
        spread.await_reads(0, 4)
        assert spread.fetch(1, 0) == [50.0 * epoch + member for member in range(4)]
        assert not spread.engines[1].reads, "it was there"
        spread.fetch(0, 0)


def test_nothing_is_read_ahead_of_a_member_that_has_not_published(spread: Spread) -> None:
    spread.publish(5.0)
    for unit in (0, 1):
        spread.fetch(0, unit)
    spread.caches[0].settle()
    for member in (0, 1, 2):
        spread.group.publish(member)
    spread.mirror(Word.PUBLISHED)
    del spread.engines[0].reads[:]
    spread.caches[0]._look_ahead(0, 2)
    spread.await_reads(0, 2)
    spread.caches[0].settle()
    assert {rank for rank, _ in spread.engines[0].reads} == {16}


def test_what_a_signal_keeps_from_being_read_ahead_is_not_waited_for(
    spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(job: Any) -> None:
        raise KeyboardInterrupt

    spread.publish(5.0)
    spread.fetch(0, 0)
    cache = spread.caches[0]
    cache.settle()
    spread.publish(50.0)
    with monkeypatch.context() as signalled:
        signalled.setattr(cache._worker, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spread.fetch(0, 0)
    assert cache._newest is not None and cache._newest.over()
    assert spread.fetch(0, 0) == [50.0, 51.0, 52.0, 53.0]


def test_a_read_ahead_that_fails_ends_the_job_of_the_ranks_that_wait_for_it(
    spread: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank itself too: it may come to the unit when the thread has claimed it already."""
    spread.publish(5.0)
    for unit in (0, 1):
        spread.fetch(0, unit)
    spread.caches[0].settle()
    spread.publish(50.0)
    monkeypatch.setattr(wait, "REASON_S", 0.0)  # no link will explain it
    spread.engines[0].fails = True
    spread.caches[0]._look_ahead(0, 2)
    claims = spread.group.layouts[0].share(2).claims(spread.group.units[0])
    while claims.load(0) < 2:
        time.sleep(0.001)
    for me in (1, 0):
        with pytest.raises(PeerLostError, match="PeerLostError in epoch 2: rank 16: connection reset") as caught:
            spread.fetch(me, 0)
        assert caught.value.culprit == 16


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_any_error_of_a_read_ends_the_job_of_the_ranks_that_wait_for_it(
    spread: Spread, error: type[BaseException]
) -> None:
    """This rank, too, would wait for itself if it tried again."""
    spread.publish(5.0)

    def fails(*unused: Any, **options: Any) -> None:
        raise error

    spread.engines[0].read = fails  # type: ignore[method-assign]
    with pytest.raises(error):
        spread.fetch(0, 0)
    for me in (1, 0):
        with pytest.raises(PeerLostError, match=f"aborted by rank 10: {error.__name__} in epoch 1") as caught:
            spread.fetch(me, 0)
        assert caught.value.culprit == 10
