"""Whole minibatches of rank processes that run ahead of each other."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from support.members import BF16, F32, gradients, member_of_pool, room
from support.ranks import RankPool

from odc.protocol import Outcome
from odc.runtime import Endpoint
from odc.settings import ACCUMULATE_MODES, Accumulate, Settings

WIDE = [[("w", 3000, F32), ("b", 7, BF16)], [("v", 5, F32)]]


def minibatches(endpoint: Endpoint, epochs: int, seed: int) -> int:
    """`epochs` minibatches as `odc.fsdp` runs them, with unequal work; checks all it sees. Returns microbatches.

    In epoch e every shard holds e, and each microbatch of member m pushes m + 1 everywhere.
    """
    draw = random.Random(seed + endpoint.grid.me)
    me, shards, layout = endpoint.grid.me, endpoint.grid.shards, endpoint.layout
    dirty, total, last = False, 0, [0] * shards

    def sometimes_sleep() -> None:
        if (chance := draw.random()) < 0.2:
            time.sleep(chance / 100)

    for epoch in range(1, epochs + 1):
        endpoint.protocol.touch("beginning")
        endpoint.protocol.await_done(epoch - 1)
        shard = [[torch.full((p.numel,), float(epoch)) for p in u.params] for u in layout.units]
        endpoint.shards.publish(shard, [dirty] * 2)
        for _ in range(count := draw.choice([0, 0, 1, 2, 3])):
            for unit in layout.units:
                sometimes_sleep()
                into = room(unit, shards)
                endpoint.shards.fetch(unit, into)
                seen = {value for tensor in into for value in tensor.tolist()}
                assert seen == {float(epoch)}, f"member {me} fetched {seen} in epoch {epoch}"
            for unit in layout.units:
                endpoint.pusher.push(unit, gradients(unit, shards, me + 1.0))
        sometimes_sleep()
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


def live_in_a_process(rank: int, world: int, accumulate: Accumulate) -> int:
    settings = Settings(accumulate=accumulate, timeout_s=60.0, staging_block_bytes=4096)
    with member_of_pool(rank, world, f"skewed-{accumulate}", WIDE, settings) as member:
        return minibatches(member, 15, seed=3)


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_skewed_minibatches_of_processes(ranks: Callable[[int], RankPool], accumulate: Accumulate) -> None:
    counts = ranks(3).run(live_in_a_process, accumulate)
    assert len(set(counts)) > 1, "the ranks did not run unequal numbers of microbatches"
