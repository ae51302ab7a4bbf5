"""What the tests of dying, raising and hanging ranks share.

Times are of one clock (`time.monotonic()` is the system's), taken in the failing rank just before its end and in each
other as soon as the error has left its loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from odc import fully_shard
from odc.runtime import daemon
from support.models import Case, build, next_token_loss, tokens
from support.ranks import RankOutcome, RankProcesses

WORLD = 3
PATIENCE_S = 300.0  # until stacks are shown of ranks that have not ended
NOTICED_S = 60.0  # a tenth of the deadline of `job`: what passes was noticed, not waited for, on any machine
STEPS = 2000  # more than any of these jobs gets to


def job(rank: int, world: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = build(fully_shard, Case(counts=((1, 1, 1),)), init_device_mesh("cpu", (world,)), **options)
    # Not foreach: torch would work out for seconds how DTensors are laid out, and no rank learns of a death meanwhile.
    return model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)


def backward(model: Any, rank: int, step: int, microbatch: int = 0) -> None:
    x = tokens(rank, step, microbatch)
    (next_token_loss(model(x), x) / 18).backward()


def assert_all_noticed(outcomes: list[RankOutcome], culprit: int, died: float, within_s: float = NOTICED_S) -> None:
    """Every other rank has raised `PeerLostError`, in time, naming the culprit and itself."""
    for outcome in outcomes:
        if outcome.rank == culprit:
            continue
        assert outcome.error == "PeerLostError", outcome.describe()
        assert outcome.exit_code == 1, outcome.describe()
        assert f"rank {culprit}" in outcome.message
        assert f"rank {outcome.rank}" in outcome.message
        assert outcome.at - died < within_s, f"rank {outcome.rank} took {outcome.at - died:.2f} s"


def end(job: RankProcesses, pids: list[int]) -> list[RankOutcome]:
    pids += job.pids
    return job.wait()


def until_ended(job: RankProcesses, ranks: Collection[int]) -> None:
    """Wait until these ranks have returned, raised or died."""
    deadline = time.monotonic() + PATIENCE_S
    while any(not job.outcomes[rank].answered and job.outcomes[rank].exit_code is None for rank in ranks):
        if time.monotonic() > deadline:
            job.fail(f"not all of ranks {sorted(ranks)} have ended after {PATIENCE_S:g} s")
        job.receive(0.05)


def until_watched(world: int) -> None:
    """Wait until this rank's neighbours are connected: a death before is noticed only by a rank that connects later."""
    watch = daemon(int(os.environ["RANK"]))._host_watch
    assert watch is not None
    while len(watch.watched()) < min(2, world // int(os.environ["LOCAL_WORLD_SIZE"]) - 1):
        time.sleep(0.01)
