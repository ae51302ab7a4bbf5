"""What must not be noticed of other hosts: processor time while idle, two jobs side by side, unused roots."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.host_ranks import spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.ranks import Pools
from torch import nn

from odc import Settings, fully_shard
from odc.errors import PeerLostError
from odc.fsdp import root_of
from odc.net.network import HostNetwork
from odc.protocol import Word
from odc.protocol.sink import NoOtherHosts
from odc.runtime import daemon

QUIET_S = 1.0
PATIENCE_S = 120.0
ENDING = {"odc-link", "odc-watch", "odc-releases"}  # threads that end once they have done their work


def sharded(width: int = 8) -> nn.Linear:
    model = nn.Linear(width, width)
    fully_shard(model, settings=Settings(timeout_s=600.0))
    return model


def minibatch(model: Any) -> None:
    with model.minibatch():
        model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()


# no processor time while idle ----------------------------------------------------------------------------------------


def runs(thread: threading.Thread) -> tuple[str, ...]:
    """How often the kernel has let a thread run; a thread that makes a system call has run."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return tuple(line for line in status.splitlines() if "ctxt_switches" in line)


def woken_of(threads: list[threading.Thread]) -> list[str]:
    """The threads that have run within the last `QUIET_S`."""
    before = [runs(thread) for thread in threads]
    time.sleep(QUIET_S)
    return [thread.name for thread, one in zip(threads, before, strict=True) if runs(thread) != one]


def idle(rank: int, world: int) -> tuple[list[str], bool]:
    """Train, then do nothing: which of odc's threads there are, and whether anything shows of other hosts."""
    gc.collect()  # the roots of a pool's other tests
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, settings=Settings(timeout_s=600.0))
    for _ in range(2):
        minibatch(model)
    dist.barrier()
    end, woken = time.monotonic() + PATIENCE_S, ["not counted yet"]
    while woken:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("odc")]
        lasting = [thread for thread in threads if thread.name not in ENDING]
        woken = woken_of(lasting) + [thread.name for thread in threads if thread.name in ENDING]
        assert time.monotonic() < end, f"rank {rank}: {woken} run though no rank asks for anything"
    dist.barrier()
    member = root_of(model).member
    alone = daemon(rank)._network is None and isinstance(member.protocol.sink, NoOtherHosts)
    return [thread.name for thread in threads], alone


def test_threads_are_as_documented_and_none_runs_while_nothing_is_asked() -> None:
    """In a job of its own, as ranks of a pool may still hold the threads of another test's root."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    listed = re.findall(r"`(odc-[a-z]+)`", page.partition("## Threads of a rank")[2].partition("\n## ")[0])
    need_hosts()
    with Hosts(2) as hosts, spawn_on_hosts(hosts, 2, idle) as job:
        outcomes = job.wait()
    assert not any(outcome.failed for outcome in outcomes), [outcome.describe() for outcome in outcomes]
    for names, alone in (outcome.value for outcome in outcomes):
        assert {"odc-fetch", "odc-send", "odc-server", "odc-store", "odc-reads-0", "odc-ahead"} <= set(names), names
        assert {name.rstrip("-0123456789") for name in names} <= set(listed), names
        assert len(names) <= 7, names
        assert not alone


def test_on_one_host_there_is_neither_network_nor_link(ranks: Pools) -> None:
    for names, alone in ranks(2).run(idle):
        assert {"odc-server", "odc-store"} <= set(names), names
        assert alone


# roots that are never run --------------------------------------------------------------------------------------------


def shut_down_before_it_is_linked(rank: int, world: int) -> str:
    """Host 0 shuts a root down that host 1 has not linked to its own yet, and goes on with another."""
    last, dialled = rank == world - 1, threading.Event()
    dial = HostNetwork.dial

    def late(self: HostNetwork, *args: Any, **options: Any) -> Any:
        if last and not dialled.wait(PATIENCE_S):
            raise AssertionError("rank 0 has not shut down")
        return dial(self, *args, **options)

    HostNetwork.dial = late  # type: ignore[method-assign]
    never_run = sharded(16)
    root = root_of(never_run)
    dist.barrier()
    if not last:
        root.shut_down()()
    dist.barrier()
    message = ""
    if last:
        dialled.set()
        board = root.layout.remote(0).board
        end = time.monotonic() + PATIENCE_S
        while not board.load(Word.LEFT):
            assert time.monotonic() < end, "rank 0 has disconnected, and this rank does not know"
            time.sleep(0.01)
        assert not root.member.protocol.board.load(Word.ABORT), root.layout.mine.reason
        with pytest.raises(PeerLostError) as caught, torch.no_grad():
            never_run(torch.ones(2, 16))
        message = str(caught.value)
    dist.barrier()
    minibatch(sharded())
    return message


def test_a_root_that_was_shut_down_before_it_was_linked_ends_no_other() -> None:
    need_hosts()
    with Hosts(2) as hosts, spawn_on_hosts(hosts, 1, shut_down_before_it_is_linked) as job:
        outcomes = job.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], [outcome.describe() for outcome in outcomes]
    assert "rank 0 has left the job" in outcomes[1].value


# two jobs ------------------------------------------------------------------------------------------------------------


def train_apart(rank: int, world: int, seed: int, folder: str) -> float:
    """A job with weights of its own, which runs as long as the other does."""
    torch.manual_seed(seed)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    Path(folder, f"{seed}.{rank}").touch()
    for step in range(40):
        with model.minibatch():
            model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        while step == 3 and len(os.listdir(folder)) < 2 * world:
            time.sleep(0.01)
    return float(sum(values.full_tensor().double().sum() for values in model.state_dict().values()))


@pytest.mark.thorough
def test_two_jobs_on_the_same_hosts_do_not_mix(tmp_path: Path) -> None:
    """They have the same ranks and the same names of roots, at the same time."""
    need_hosts()
    found = list[float]()
    for number, seeds in enumerate(((1, 2), (1,), (2,))):
        folder = tmp_path / str(number)
        folder.mkdir()
        for seed in {1, 2} - set(seeds):
            for rank in range(2):
                (folder / f"{seed}.{rank}").touch()
        with Hosts(2) as hosts:
            jobs = [spawn_on_hosts(hosts, 1, train_apart, seed, str(folder)) for seed in seeds]
            entered = [job.__enter__() for job in jobs]
            try:
                outcomes = [job.wait() for job in entered]
            finally:
                for job in jobs:
                    job.__exit__(None, None, None)
        for ranks in outcomes:
            assert not any(one.error for one in ranks), [one.describe() for one in ranks]
            assert ranks[0].value == ranks[1].value
            found.append(ranks[0].value)
    assert found[0] != found[1]
    assert found[:2] == found[2:], "beside another job something else was computed than alone"
