"""Whole minibatches of ranks that run ahead of each other, on threads and on processes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from support.members import BF16, F32, HeapGroup
from support.ranks import RankPool

from odc.memory import ShmHeap
from odc.protocol import Gradient, HeapLayout, Outcome, RankGrid, UnitSpec, Word
from odc.runtime import Daemon, Endpoint, Rendezvous, Service
from odc.runtime.connect import RootEvents
from odc.settings import ACCUMULATE_MODES, Accumulate, Settings

WIDE = [[("w", 3000, F32), ("b", 7, BF16)], [("v", 5, F32)]]


def room(unit: UnitSpec, shards: int) -> list[torch.Tensor]:
    return [torch.full((shards * spec.numel,), -1.0, dtype=spec.dtype) for spec in unit.params]


def minibatches(endpoint: Endpoint, epochs: int, seed: int, nap: Callable[[float], None]) -> int:
    """`epochs` minibatches as `odc.fsdp` runs them, with unequal work; checks all it sees. Returns microbatches.

    In epoch e every shard holds e, and each microbatch of member m pushes m + 1 everywhere.
    """
    draw = random.Random(seed + endpoint.grid.me)
    me, shards, layout = endpoint.grid.me, endpoint.grid.shards, endpoint.layout
    dirty, total, last = False, 0, [0] * shards
    for epoch in range(1, epochs + 1):
        endpoint.protocol.touch("beginning")
        endpoint.protocol.await_done(epoch - 1)
        endpoint.shards.publish(
            [[torch.full((p.numel,), float(epoch)) for p in u.params] for u in layout.units], [dirty] * 2
        )
        for _ in range(count := draw.choice([0, 0, 1, 2, 3])):
            for unit in layout.units:
                nap(draw.random())
                into = room(unit, shards)
                endpoint.shards.fetch(unit, into)
                seen = {value for tensor in into for value in tensor.tolist()}
                assert seen == {float(epoch)}, f"member {me} fetched {seen} in epoch {epoch}"
            for unit in layout.units:
                endpoint.pusher.push(
                    unit,
                    [
                        Gradient(i, torch.full((shards * p.numel,), me + 1.0, dtype=p.dtype))
                        for i, p in enumerate(unit.params)
                    ],
                )
        nap(draw.random())
        endpoint.done(Outcome.TRAINED)
        endpoint.protocol.await_done(epoch)
        endpoint.protocol.await_accumulated()
        counts = [int(layout.peer(me).pushes(source)[0]) for source in range(shards)]
        expected = sum((source + 1.0) * (counts[source] - last[source]) for source in range(shards))
        for unit in layout.units:
            found = layout.peer(me).accumulator(unit).clone()
            sums = set(found.tolist())
            assert sums == {expected}, f"member {me}, epoch {epoch}: {sums} instead of {expected}"
        endpoint.protocol.complete()
        endpoint.protocol.read_all()
        dirty, last, total = counts != last, counts, total + count
    assert last[me] == total, "every push was counted"
    return total


def sometimes(chance: float) -> None:
    if chance < 0.2:
        time.sleep(chance / 100)


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_skewed_minibatches_on_threads(accumulate: Accumulate) -> None:
    with HeapGroup(
        WIDE, 3, settings=Settings(accumulate=accumulate, timeout_s=60.0, staging_block_bytes=4096)
    ) as group:
        group.by_hand = True  # each member has a server of its own
        group.attach()
        daemons = [Daemon(rank) for rank in group.ranks]
        for server, service in zip(daemons, group.services, strict=True):
            server.serve(service)
        errors: list[BaseException] = []

        def live(member: int) -> None:
            try:
                minibatches(group.members[member], 25, seed=7, nap=sometimes)
            except BaseException as error:
                errors.append(error)
                group.members[member].protocol.abort(f"{error}", group.ranks[member])

        for endpoint in group.members:
            endpoint.pusher.route._notify = lambda member: daemons[member].notify()  # type: ignore[attr-defined]
        threads = [threading.Thread(target=live, args=(member,)) for member in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        for server in daemons:
            server.close()
        assert not errors, errors


def live_in_a_process(rank: int, world: int, accumulate: Accumulate) -> int:
    """A root's communication as `odc.fsdp` builds it, without a model."""
    import torch.distributed as dist

    from odc.fsdp import default_store

    settings = Settings(accumulate=accumulate, timeout_s=60.0, staging_block_bytes=4096)
    units = [UnitSpec.build(i, f"u{i}", params, F32) for i, params in enumerate(WIDE)]
    grid = RankGrid(tuple(range(world)), world, rank)
    events = RootEvents(
        lambda doing: endpoint.protocol.waiter.check(doing), lambda member, pid: server.watch(service, member, pid)
    )
    meet = Rendezvous(default_store(), f"skewed-{accumulate}", grid, 60.0, events)
    layout = HeapLayout(ShmHeap("skewed", grid.ranks, rank, meet.connect, 60.0), grid, units, settings, "test")
    endpoint = Endpoint(layout, meet.notify)
    service, server = Service(f"skewed-{accumulate}", layout), Daemon(rank)
    server.serve(service)
    meet.announce(server.address, service.token, layout.heap.digest, units)
    try:
        return minibatches(endpoint, 15, seed=3, nap=sometimes)
    finally:
        endpoint.protocol.board.store(Word.LEFT, 1)
        dist.barrier()  # nobody goes before everybody is through
        server.close()
        meet.close()
        layout.close()


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_skewed_minibatches_on_processes(ranks: Callable[[int], RankPool], accumulate: Accumulate) -> None:
    counts = ranks(3).run(live_in_a_process, accumulate)
    assert len(set(counts)) > 1, "the ranks did not run unequal numbers of microbatches"
