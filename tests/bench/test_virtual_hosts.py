"""Two hosts in virtual time: odc's own node cache, links and sums, beside formulas and `odc.simulate`."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.virtual_ranks import Costs, Figures, Used, VirtualRanks
from odc.hosts.cache import NodeCache
from odc.protocol import UnitSpec
from odc.simulate import Cluster, Model, Step, Unit, simulate

NUMEL, UNITS, HOSTS, RANKS = 1 << 18, 3, 2, 4
NIC = 2 * NUMEL / 1e-3  # a rank's shard of a unit in a millisecond
#: Hosts' links are what takes time; words and Python take next to none.
COSTS = Costs(engine=1e15, memory=1e15, nic=NIC, wire=1e-6, read=0, fetch=0, push=0, drain=0, publish=0, torch=0)
SECONDS = [[0.06, 0.05], [0.03, 0.02, 0.03], [0.02], [0.05]]


def uses(total: float) -> list[Used]:
    forward = [Used(i, total / 9, True, False) for i in range(UNITS)]
    return forward + [Used(i, 2 * total / 9, True, True) for i in reversed(range(UNITS))]


def ranks_of(costs: Costs = COSTS) -> VirtualRanks:
    units = [UnitSpec.build(i, f"u{i}", [("w", NUMEL, torch.bfloat16)], torch.float32) for i in range(UNITS)]
    return VirtualRanks(units, [[uses(one) for one in listed] for listed in SECONDS], costs, hosts=HOSTS)


def received(ranks: VirtualRanks) -> list[int]:
    """Bytes that each host receives in two epochs: one that only fetches, and the step."""
    return [sum(ranks.nics.received[:2]), sum(ranks.nics.received[2:])]


WEIGHTS, SUMS = UNITS * 2 * 2 * NUMEL, UNITS * 2 * 4 * NUMEL  # of the two ranks there: in bf16, and in fp32


def test_what_a_host_needs_crosses_once_in_each_epoch() -> None:
    ranks = ranks_of()
    ranks.run()
    assert received(ranks) == [2 * WEIGHTS + SUMS] * 2


def test_a_node_cache_that_claims_nothing_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeCache, "_claim", lambda self, peer, unit, epoch: peer.cached(unit).load(0) < epoch)
    ranks = ranks_of()
    ranks.run()
    assert min(received(ranks)) > 2 * WEIGHTS + SUMS


def test_a_step_takes_as_long_as_odc_simulate_says() -> None:
    figures = ranks_of().run()
    nbytes = float(RANKS * 2 * NUMEL)
    cluster = Cluster(RANKS, RANKS // HOSTS, intra_bandwidth=1e15, inter_bandwidth=NIC, node_cache=True)
    model = Model((Unit(nbytes, nbytes, 1 / UNITS),) * UNITS, accumulator=2.0)
    result = simulate(Step(cluster, model, SECONDS, "on demand"))
    assert max(one.step for one in figures) == pytest.approx(result.seconds, rel=0.1)
    assert [one.compute for one in figures] == pytest.approx([sum(listed) for listed in SECONDS])


def test_sums_leave_while_slower_ranks_still_compute() -> None:
    """Of the sums of rank 0's host, which is last, one unit's are left to be read at the end: 2 ms of 6."""
    figures: list[Figures] = ranks_of().run()
    assert [one.sums < 1e-3 for one in figures] == [True, True, False, False]
    assert 2e-3 < max(one.sums for one in figures) < 4e-3


def test_a_link_ten_times_as_slow_makes_the_step_longer() -> None:
    slow, fast = (max(one.step for one in ranks_of(replace(COSTS, nic=nic)).run()) for nic in (NIC / 10, NIC))
    assert slow > fast + 0.02


def test_a_simulation_leaves_no_memory_behind() -> None:
    """Workers of node caches live as long as their endpoints, which a simulation's threads must not keep."""
    ranks_of().run()
    gc.collect()
    assert "memfd:odc.alone" not in Path("/proc/self/maps").read_text()
