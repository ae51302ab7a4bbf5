"""The exchange on demand over hosts (namespaces of this machine): the same rows arrive, and each crosses once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.doubles import exchange_of, moves
from support.failing import assert_all_noticed, end
from support.host_ranks import spawn_on_hosts
from support.hosts import DEVICE, Hosts, need_hosts
from support.rank_worker import report

from odc.dispatch import BalancePolicy, Nodes, Phase, Rearrangement
from odc.dispatch.exchange import OnDemandExchange
from odc.dispatch.exchange.rows import instances_of_host
from odc.dispatch.orchestrator import Orchestrator, channels
from odc.dispatch.route import Route
from odc.errors import UnsupportedError
from odc.fsdp import default_store
from odc.protocol import RankGrid
from odc.runtime import Arena, await_releases
from odc.runtime.linking import parts_of
from odc.settings import Settings

HostPools = Callable[[int, int], Any]
ROWS, WIDTH = 64, 1024


def gathers_and_moves(rank: int, world: int, seeds: list[int], per_host: int) -> None:
    with exchange_of("on_demand", rank, world, ["lengths"]) as exchange:
        assert exchange.per_host == per_host
        for step in range(1, 5):
            given = [np.arange(step * (r + step) % 4) + 10 * r for r in range(world)]  # also none
            found = exchange.gather(step, "lengths", given[rank])
            assert [one.tolist() for one in found] == [one.tolist() for one in given]
    moves(rank, world, "on_demand", seeds)


@pytest.mark.parametrize(
    ("hosts", "per_host"), [(2, 2), *(pytest.param(*c, marks=pytest.mark.thorough) for c in ((3, 1), (3, 2), (2, 4)))]
)
def test_a_move_over_hosts_brings_every_row_to_its_place(host_ranks: HostPools, hosts: int, per_host: int) -> None:
    host_ranks(hosts, per_host).run(gathers_and_moves, list(range(6)), per_host)


def sent() -> int:
    """Bytes that this host has sent, with all headers."""
    lines = (line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines())
    return next(int(numbers.split()[8]) for name, _, numbers in lines if name.strip() == DEVICE)


def swaps_and_gathers(rank: int, world: int) -> tuple[int, int]:
    """Bytes that this rank's host sends while it swaps all rows with the other, and gathers; each of them once."""
    other = (rank + world // 2) % world
    owners = [(r + world // 2) % world for r in range(world)]
    route = Route.of(Rearrangement.to([1] * world, owners), {"rows": [ROWS] * world}, rank)
    with exchange_of("on_demand", rank, world, ["rows", "numbers"]) as exchange:
        for step, features in ((1, 1), (2, WIDTH)):  # the first connects
            dist.barrier()
            before = sent()
            dist.barrier()
            got = exchange.move(step, "rows", route, {"rows": torch.full((ROWS, features), float(rank))})["rows"]
            found = exchange.gather(step, "numbers", np.full(features * 32, rank))
            dist.barrier()
            crossed = sent() - before
            assert bool((got == other).all()) and [one[-1] for one in found] == list(range(world))
    return crossed, world // 2 * (ROWS * WIDTH * 4 + 8 * 32 * WIDTH)


def test_each_row_crosses_the_network_once(host_ranks: HostPools) -> None:
    for crossed, needed in host_ranks(2, 2).run(swaps_and_gathers):
        assert needed < crossed < 1.1 * needed, (crossed, needed)


def plans_by_host(rank: int, world: int, kind: str, per_host: int) -> None:
    """Without a size, nodes are hosts; with ranks out of order they cannot be."""
    with exchange_of(kind, rank, world, channels(["vision"])) as exchange:
        found = Orchestrator(
            [Phase("vision", BalancePolicy())], Phase("llm", None), exchange, nodes=Nodes(tolerance=0.1)
        )
        assert found._nodes == Nodes(per_host, tolerance=0.1)
    divided = RankGrid(tuple(range(6)), 6, 0, parts_of(["one"] * 4 + ["other"] * 2))
    assert instances_of_host(divided) == 2, "of the parts into which unequal hosts are divided"
    mixed = RankGrid(tuple(range(4)), 4, 0, (0, 1, 0, 1))
    with pytest.raises(UnsupportedError, match=r"hosts \(0, 1, 0, 1\); list them by host, or declare Nodes\(size\)"):
        instances_of_host(mixed)


@pytest.mark.parametrize("kind", ["collective", "on_demand"])
def test_nodes_are_hosts(host_ranks: HostPools, ranks: Callable[[int], Any], kind: str) -> None:
    host_ranks(2, 2).run(plans_by_host, kind, 2)
    ranks(2).run(plans_by_host, kind, 2)


def moves_under_a_long_name(rank: int, world: int) -> None:
    """Of 290 characters and 330 bytes; a handshake has room for 64 bytes, and the name of a memory file for 249."""
    exchange = OnDemandExchange(
        default_store(),
        range(world),
        rank,
        ["n"],
        arena_bytes=1 << 12,
        timeout_s=60.0,
        name="längen " * 40 + "no. 1 of 2",
    )
    found = exchange.gather(1, "n", np.arange(rank + 1))
    assert [one.tolist() for one in found] == [list(range(r + 1)) for r in range(world)]
    exchange.close()


def test_an_exchange_may_have_a_name_of_any_length(host_ranks: HostPools) -> None:
    host_ranks(2, 1).run(moves_under_a_long_name)


def leaves_what_is_unread(rank: int, world: int) -> None:
    """Rank 0 drops its arena, as a program's end does, before the others have read what lies there."""
    arena, store = (
        Arena(default_store(), range(world), rank, 1 << 12, ["rows"], 60.0, "left", Settings()),
        default_store(),
    )
    room = arena.put("rows", 1, 64, [other for other in range(world) if other != rank])
    room.fill_(rank)
    arena.show("rows")
    dist.barrier()
    if rank:
        store.wait(["rank 0 has left"])
        assert arena.get("rows", 1, 0).raw.tolist() == [0] * 64
        arena.done("rows", 1, 0)
        arena.leave()
        return
    arena._words._protocol.attach_all()
    hosts = arena._member._hosts
    assert hosts is not None
    arena.leave()
    while hosts.links.unacknowledged():
        time.sleep(0.001)
    assert arena._unread_readers() == hosts.needed_by(arena._unread_readers)[:2] == [2, 3]
    store.set("rank 0 has left", "")
    await_releases()


def test_what_is_left_for_another_host_can_be_read_there(host_ranks: HostPools) -> None:
    host_ranks(2, 2).run(leaves_what_is_unread)


def moves_on(rank: int, world: int) -> None:
    route = Route.of(
        Rearrangement.to([1] * world, [(r + 1) % world for r in range(world)]), {"rows": [3] * world}, rank
    )
    with exchange_of("on_demand", rank, world, ["rows", "numbers"], timeout_s=600.0) as exchange:
        for step in range(1, 100_000):
            exchange.gather(step, "numbers", np.arange(rank + 1))
            exchange.move(step, "rows", route, {"rows": torch.zeros(3, 5)})
            if step == 3:
                report("moves")


@pytest.mark.thorough
@pytest.mark.parametrize("culprit", [1, 2])
def test_a_killed_rank_is_named_on_every_host(culprit: int) -> None:
    need_hosts()
    with Hosts(2) as hosts, spawn_on_hosts(hosts, 2, moves_on) as job:
        job.until_reported(1)
        died = job.kill(culprit)
        outcomes = end(job, [])
    assert_all_noticed(outcomes, culprit, died)
