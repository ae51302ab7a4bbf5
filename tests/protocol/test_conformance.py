"""The model against the code: what real jobs store and wait for, in order, is what the model's steps say.

Waits for PUBLISHED are left out, as a rank that has seen it once in an epoch does not look again; what depends on it is
asserted at each store (`Settings(check_protocol=True)`). So are waits for a free slot, which is mostly there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.protocol_model import Job, RankModel
from support.ranks import RankPool, RanksFailed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import odc
from odc import Settings, fully_shard
from odc.protocol import check
from odc.protocol.protocol import MemberProtocol

Pools = Callable[[int], RankPool]
Line = tuple[str, str, int, int]  # store or wait, word, member, value
_STORED = ("PUBLISHING", "PUBLISHED", "OUTCOME", "DONE", "COMPLETE", "READ", "SENT")
_EITHER = (("wait", "COMPLETE"), ("wait", "ACCUMULATED"))
_AWAITED = ("DONE", "READ", "COMPLETE", "ACCUMULATED")


def recorded(rank: int, world: int, job: Job, skipped: str = "") -> list[Line]:
    """Train as the job says, and return what this rank stored and waited for; without one line of `skipped`."""
    lines: list[Line] = []
    main = threading.main_thread()

    def listen(event: check.ProtocolEvent) -> None:
        word = "OUTCOME" if event.word.startswith("OUTCOME") else event.word
        here = threading.current_thread() is main or word == "SENT"
        if here and word in (_STORED if event.kind == "store" else _AWAITED):
            lines.append((event.kind, word, event.member, event.value >> 3 if word == "OUTCOME" else event.value))

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    replicas = (job.replicas, job.shards) if job.replicas > 1 else (world,)
    mesh = init_device_mesh("cpu", replicas, mesh_dim_names=("a", "b")[: len(replicas)])
    settings = Settings(timeout_s=60.0, check_protocol=True)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, settings=settings)
    kept = getattr(MemberProtocol, skipped) if skipped else None
    if skipped:
        setattr(MemberProtocol, skipped, lambda self, *args: None)
    check.listeners.append(listen)
    try:
        for epoch in range(1, job.epochs + 1):
            try:
                with model.minibatch():
                    for _ in range(job.counts(rank)):
                        model(torch.ones(2, 8)).sum().backward()
                    if (rank, epoch) in job.abandons:
                        model.abandon_minibatch("by hand")
            except odc.errors.AbandonedMinibatchError:
                assert job.abandoned(epoch), "no rank has given it up"
    finally:
        check.listeners.remove(listen)
        if skipped:
            setattr(MemberProtocol, skipped, kept)
    return lines


def expected(job: Job, rank: int) -> list[Line]:
    """The same by the model: of the main thread in order, and the posted blocks."""
    one, lines = RankModel(job, rank), list[Line]()
    for step in one.main:
        word, member = str(step.key[0]), int(step.key[1])
        if step.do == "equal":
            lines.append(("wait", word, member, 0))
        elif step.do == "wait" and word in _AWAITED:
            lines.append(("wait", word, member, step.value))
        elif step.do in ("store", "write") and word in _STORED:
            lines.append(("store", word, member, step.value // 2 if word == "OUTCOME" else step.value))
    return lines


def compare(job: Job, found: list[list[Line]]) -> None:
    for rank, lines in enumerate(found):
        kept = [
            (kind, word, member, 0 if kind == "wait" and word == "ACCUMULATED" else value)
            for kind, word, member, value in lines
            if word != "SENT"
        ]
        assert kept == expected(job, rank), f"rank {rank}"
        if not job.abandons:
            sent = {member: value for _, word, member, value in lines if word == "SENT"}
            model = RankModel(job, rank).sent
            assert sent == {owner: count for owner, count in model.items() if owner != rank and count}, f"rank {rank}"


JOBS = {
    "2 ranks": Job(2),
    "3 ranks, uneven": Job(3, microbatches=(1, 2, 1), epochs=3),
    "abandoned": Job(2, abandons=frozenset({(0, 1)})),
    "replicas": Job(4, replicas=2),
}


@pytest.mark.parametrize("name", JOBS)
def test_real_jobs_store_and_wait_as_the_model_does(ranks: Pools, name: str) -> None:
    job = JOBS[name]
    compare(job, ranks(job.ranks).run(recorded, job))


def test_over_hosts_too(host_ranks: Callable[[int, int], Any]) -> None:
    """Whether a sum is awaited by SUMMED or by COMPLETE depends on which is first, and no rank stages."""
    job = Job(2, hosts=2)
    found = host_ranks(2, 1).run(recorded, job)
    for rank, lines in enumerate(found):
        ours, theirs = ([one for one in some if one[:2] not in _EITHER] for some in (lines, expected(job, rank)))
        assert ours == theirs, f"rank {rank}"
        assert ("wait", "DONE", 1 - rank, 2) in ours


@pytest.mark.parametrize("line", ["await_accumulated", "await_end_of_epoch", "await_done", "read_all", "complete"])
def test_a_line_that_is_left_out_of_the_code_is_noticed(ranks: Pools, line: str) -> None:
    """By an assertion of `check_protocol` in some rank, or by the comparison with the model."""
    job = Job(2)
    assert callable(getattr(MemberProtocol, line)), "it has another name now"
    with pytest.raises((RanksFailed, AssertionError)):
        compare(job, ranks(2).run(recorded, job, line))
