"""The table of faults: who fails, how, and when; which rank every other one blames, and what it says."""

from __future__ import annotations

import re
import time

import pytest
from support.failing import NOTICED_S, STEPS, end, until_ended
from support.faults import DEADLINE_S, ERROR, STEP, Fault, train
from support.host_ranks import spawn_on_hosts
from support.hosts import Hosts, need_hosts
from support.ranks import RankOutcome, spawn_ranks

DIED = r"rank {} died in epoch \d+ \(done with \d+\)"
RAISED = "aborted by rank {}: ValueError( in epoch \\d+)?: " + ERROR
ATTACHING = "rank {0} died|attaching to rank {0}: its server does not answer|the process of rank {0} ended"
DAEMON = "the server daemon of rank {} failed: RuntimeError: " + ERROR
# Of a host that is cut off. On a busy machine the watch of a neighbour may report it before a link does.
SMALLER = (
    "the host of ranks {0} cannot be reached any more from that of ranks .* the smaller side"
    r"|rank {0} cannot be reached any more from rank \d, its neighbour"
)
WITHOUT_THE_LOWEST = (
    r"the side without the lowest rank|rank [23] cannot be reached any more from rank [01], its neighbour"
)

ON_ONE_HOST = [
    Fault("rank", "kill", "before_fully_shard", "rank {}"),
    Fault("rank", "kill", "after_fully_shard", ATTACHING, quick=True),
    Fault("rank", "kill", "announce", "rank {}"),
    Fault("rank", "kill", "connect", ATTACHING, 0, quick=True),
    Fault("rank", "kill", "forward", DIED),
    Fault("rank", "kill", "backward", DIED, 2, quick=True),
    Fault("rank", "kill", "push", DIED, 0),
    Fault("rank", "kill", "finish", DIED, quick=True),
    Fault("rank", "kill", "step", DIED, 2),
    Fault("rank", "kill", "between_minibatches", DIED, 0),
    Fault("rank", "kill", "evaluation", DIED),
    Fault("rank", "kill", "shutdown", "", 2, quick=True),
    Fault("rank", "kill", "any", DIED, 2),
    Fault("rank", "kill", "any", DIED, 3, world=4, replicas=True, quick=True),
    Fault("rank", "kill", "evaluation", DIED, loader="before"),
    Fault("rank", "kill", "evaluation", DIED, loader="after", quick=True),
    Fault("rank", "raise", "after_fully_shard", RAISED, 2),
    Fault("rank", "raise", "announce", RAISED),
    Fault("rank", "raise", "connect", RAISED, 0, quick=True),
    Fault("rank", "raise", "forward", RAISED, 2, quick=True),
    Fault("rank", "raise", "backward", RAISED, 0),
    Fault("rank", "raise", "finish", RAISED),
    Fault("rank", "raise", "between_minibatches", RAISED, 2, quick=True),
    Fault("rank", "raise", "evaluation", RAISED, 0),
    Fault("rank", "raise", "shutdown", ""),
    Fault("rank", "exit_with_it", "between_minibatches", RAISED),
    Fault("rank", "shut_down_with_it", "between_minibatches", RAISED, quick=True),
    Fault("rank", "end_a_child_with_it", "between_minibatches", RAISED),
    Fault("rank", "show_it_and_go_on", "between_minibatches", "rank {}.*ValueError: " + ERROR),
    Fault("rank", "exit_only", "between_minibatches", "aborted by rank {}: SystemExit: 3", quick=True),
    Fault("rank", "leave", "between_minibatches", "rank {}", 2, quick=True),
    Fault("rank", "stop", "finish", "rank {}", 0),
    Fault("daemon", "raise_in_daemon", "forward", DAEMON, quick=True),
    Fault("daemon", "raise_in_daemon", "finish", DAEMON, 0),
]

OVER_HOSTS = [
    Fault("rank", "kill", "any", DIED, 3, world=4, hosts=2, loader="after", quick=True),
    Fault("rank", "kill", "any", DIED, 0, world=4, hosts=2),
    Fault("rank", "kill", "any", DIED, 2, world=4, hosts=2),
    Fault("rank", "kill", "backward", DIED, 1, world=4, hosts=2),
    Fault("rank", "raise", "finish", RAISED, 1, world=4, hosts=2, quick=True),
    Fault("rank", "raise", "evaluation", RAISED, 2, world=4, hosts=2),
    Fault("rank", "kill", "after_fully_shard", "rank {} died", 2, hosts=3, quick=True),
    Fault("rank", "kill", "announce", "rank {} died", 1, hosts=3),
    Fault("rank", "kill", "connect", ATTACHING, 0, world=4, hosts=2),
    Fault("rank", "raise", "after_fully_shard", RAISED, 2, hosts=3, quick=True),
    Fault("daemon", "raise_in_daemon", "finish", DAEMON, 3, world=4, hosts=2, quick=True),
    Fault("host", "kill", "any", "rank [23] died", 1, world=4, hosts=2),
    Fault("host", "cut", "any", WITHOUT_THE_LOWEST, 1, world=4, hosts=2),
    Fault("host", "cut", "any", WITHOUT_THE_LOWEST, 0, world=4, hosts=2),
    Fault("host", "cut", "any", SMALLER, 0, hosts=3),
    Fault("host", "cut", "any", SMALLER, 2, hosts=3),
    Fault("host", "cut", "after_fully_shard", "rank {} cannot be reached any more", 2, hosts=3),
]


def table(faults: list[Fault]) -> pytest.MarkDecorator:
    rows = [pytest.param(fault, marks=() if fault.quick else pytest.mark.thorough, id=str(fault)) for fault in faults]
    return pytest.mark.parametrize("fault", rows)


@table(ON_ONE_HOST)
def test_on_one_host(fault: Fault, nothing_left: list[int]) -> None:
    with spawn_ranks(fault.world, train, fault, steps(fault), whole_end=fault.ends_itself) as job:
        began = 0.0
        if fault.when == "any":
            job.until_reported(1)
            time.sleep(0.3)
            began = job.kill(fault.culprit)
        until_ended(job, fault.others)
        if fault.how == "stop":
            job.kill(fault.culprit)
        judge(fault, end(job, nothing_left), began)


@table(OVER_HOSTS)
def test_over_hosts(fault: Fault) -> None:
    need_hosts()
    with (
        Hosts(fault.hosts) as hosts,
        spawn_on_hosts(hosts, fault.world // fault.hosts, train, fault, steps(fault)) as job,
    ):
        began = 0.0
        if fault.when == "any" or fault.how == "cut":
            job.until_reported(1, range(fault.world) if fault.when == "any" else fault.ranks)
            began = time.monotonic()
        if fault.how == "cut":
            hosts.drop(fault.culprit)
        elif fault.when == "any":
            time.sleep(0.3)  # it is in the midst of a step
            for rank in fault.ranks:
                job.kill(rank)
        until_ended(job, fault.others)
        judge(fault, job.outcomes if fault.how == "cut" else end(job, []), began)


def steps(fault: Fault) -> int:
    return STEP + 1 if fault.when == "shutdown" else STEPS


def judge(fault: Fault, outcomes: list[RankOutcome], began: float) -> None:
    """Every rank that did not fail blames the right one; a rank that failed ended as it should."""
    for rank in fault.ranks:
        if fault.how in ("kill", "stop"):
            assert outcomes[rank].exit_code == -9, outcomes[rank].describe()
        if fault.how == "raise":
            assert (outcomes[rank].error, outcomes[rank].message) == ("ValueError", ERROR)
        if began == 0.0:
            (began,) = [at[0] if isinstance(at, tuple) else at for at in outcomes[rank].reports if at != "trains"]
    for rank in fault.others:
        outcome = outcomes[rank]
        if not fault.says:
            assert outcome.exit_code == 0, outcome.describe()
            continue
        known = ("PeerLostError", "WaitTimeoutError") if fault.hangs else ("PeerLostError",)
        assert outcome.error in known, outcome.describe()
        assert re.search(fault.says.format(fault.culprit), outcome.message), outcome.message
        assert f"rank {rank}" in outcome.message, outcome.message
        assert fault.how == "cut" or outcome.exit_code == 1, outcome.describe()
        took = outcome.at - began
        assert took < NOTICED_S + DEADLINE_S * fault.hangs, f"rank {rank} took {took:.2f} s"
