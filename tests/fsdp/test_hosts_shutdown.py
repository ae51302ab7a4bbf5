"""Ranks on several hosts shut down in good order, whichever is late and in whatever step: no job ends with an error."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.exact import Exact, batch
from support.host_ranks import spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.on_ranks import on_hosts
from torch._subclasses.fake_tensor import FakeTensorMode

from odc import Settings, fully_shard
from odc.fsdp import root_of
from odc.hosts.links import Links
from odc.net.network import HostNetwork
from odc.protocol import Word
from odc.runtime import daemon
from odc.runtime.connect import Rendezvous
from odc.runtime.daemon import Daemon
from odc.runtime.linking import HostConnections
from odc.runtime.member import Member
from odc.runtime.shutdown import HeapRelease


def evaluated(rank: int, timeout_s: float = 600.0) -> Any:
    """A model that was trained, and evaluated at last: readers of its shards report nothing when they have them."""
    model: Any = Exact()
    fully_shard(model, settings=Settings(timeout_s=timeout_s))
    with model.minibatch():
        model(batch(rank, 0, 0)).sum().backward()
    with torch.no_grad():
        model(batch(rank, 0, 1))
    return model


@on_hosts(2, 2)
def test_a_model_is_dropped_while_torch_traces_another(rank: int, world: int) -> None:
    model = evaluated(rank)
    connections = root_of(model).member._hosts
    assert connections is not None
    with FakeTensorMode():
        root_of(model).shut_down()()
    assert connections.links._closed, "the partners know"
    dist.barrier()


@pytest.mark.parametrize("early", [0, 3])
@on_hosts(2, 2)
def test_a_model_that_one_rank_drops_long_before_the_others_holds_up_no_rank(rank: int, world: int, early: int) -> None:
    """As the garbage collector drops models: on one rank long before the others."""
    model = evaluated(rank)
    root = root_of(model)
    connections = root.member._hosts
    assert connections is not None
    dist.barrier()
    if rank == early:
        root.member.rendezvous.timeout_s = 0.1
        root.shut_down()()  # gives the others up: nothing that they did is lost
    dist.barrier()
    mirrored = (early + world // 2) % world  # in the heap of `early`, for its host
    if rank == early ^ 1:
        assert mirrored not in connections.needed_by(), "nothing can report to this rank whether it shuts down"
        assert (mirrored ^ 1) in connections.needed_by()
    dist.barrier()
    root.shut_down()()


@on_hosts(2, 2)
def test_a_link_stays_until_all_that_was_sent_is_acknowledged(rank: int, world: int) -> None:
    """What is on its way to a host that is busy may be lost when the connection is closed."""
    model = evaluated(rank)
    root = root_of(model)
    connections, partner = root.member._hosts, (rank + 2) % world
    assert connections is not None
    unacknowledged = [partner]
    connections.links.unacknowledged = lambda: list(unacknowledged)  # type: ignore[method-assign]
    wait = root.shut_down()
    for other in range(world):
        board = root.layout.peer(other).board
        while not board.load(Word.LEFT):
            time.sleep(0.001)
    assert connections.needed_by() == [partner]
    unacknowledged.clear()
    wait()


STEPS: dict[str, tuple[type, str]] = {
    "shut down": (Member, "shut_down"),
    "settled": (Rendezvous, "settle"),
    "needed": (HostConnections, "needed_by"),
    "forgotten": (Rendezvous, "forget"),
    "ended": (HeapRelease, "end"),
    "links": (Links, "close"),
    "rendezvous": (Rendezvous, "close"),
    "daemon": (Daemon, "close"),
    "network": (HostNetwork, "close"),
}


def shut_down_late(rank: int, world: int, late: int, step: str) -> None:
    """Train and evaluate two models; then one rank takes its time before each call of one step of shutting down."""
    kept.extend(evaluated(rank) for _ in range(2))
    if rank == late:
        owner, name = STEPS[step]
        does = getattr(owner, name)

        def late_call(self: Any, *args: Any, **options: Any) -> Any:
            time.sleep(0.3)
            return does(self, *args, **options)

        setattr(owner, name, late_call)
    del kept[rank % 2]  # the others still have it
    assert daemon(rank).alive()


kept: list[Any] = []


@pytest.mark.thorough
@pytest.mark.parametrize(("late", "step"), [(number % 4, step) for number, step in enumerate(STEPS)])
def test_a_rank_that_is_late_in_any_step_of_shutting_down(late: int, step: str) -> None:
    need_hosts()
    with Hosts(2) as hosts, spawn_on_hosts(hosts, 2, shut_down_late, late, step) as job:
        outcomes = job.wait()
    assert [one.exit_code for one in outcomes] == [0] * 4, "\n".join(one.describe() for one in outcomes)
