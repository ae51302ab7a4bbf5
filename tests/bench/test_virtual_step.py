"""A step in virtual time: beside the closed form of one rank's pushes, and with the old fault planted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from bench.virtual_ranks import SENDS, Costs, Figures, Used, VirtualRanks
from bench.virtual_time import VirtualLanes, VirtualTime
from odc.protocol import UnitSpec
from odc.simulate import Cluster, Model, Step, Unit, simulate

STAGE_S, ADD_S = 1.2e-3, 0.25e-3
NUMEL = 1 << 20
ENGINE = 3 * 2 * NUMEL / 1e-3  # of three peers' shards in a millisecond
#: Of a unit of which each of two ranks has NUMEL bf16 elements: the copy takes STAGE_S, the owner's addition ADD_S.
COSTS = Costs(engine=2 * NUMEL / STAGE_S, memory=10 * NUMEL / ADD_S, fetch=0, push=0, drain=0, publish=0, torch=0)


class SharedServer(VirtualLanes):
    """The planted fault: a push does not wait for its gradients on the host, and lane "server" follows them.

    So it was until the sender waited: what peers push is added between two units of this rank's backward.
    """

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time)
        self._computed, self._begun = 0.0, False

    def follow(self, mark: object) -> None:
        super().follow(mark)
        if sys._getframe(1).f_code.co_qualname == "Sender.send.<locals>.push":
            assert isinstance(mark, float)
            self._computed, self._begun = mark, True

    def settle(self) -> None:
        if sys._getframe(1).f_code.co_qualname == "DeviceRoute.push" and self._begun:
            self._begun = False
            return
        super().settle()

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        with super().lane(name):
            simulated = threading.current_thread() is not threading.main_thread()  # which builds the ranks
            if name == "server" and simulated and self._time.me.role == SENDS:
                super().follow(self._computed)
            yield


def backward(seconds: float, count: int) -> list[list[Used]]:
    return [[Used(0, seconds, False, True)] for _ in range(count)]


def beside(owner_s: float, fast_s: float, lanes: type[VirtualLanes], pushes: int = 84) -> Figures:
    """What a fast rank's step is like while its owner computes for long."""
    unit = UnitSpec.build(0, "unit", [("w", NUMEL, torch.bfloat16)], torch.float32)
    owner = backward(owner_s, int(pushes * 8 * fast_s / owner_s) + 2) if owner_s else []
    return VirtualRanks([unit], [owner, backward(fast_s, pushes)], COSTS, lanes).run()[1]


def closed_form(owner_s: float, fast_s: float, n: int, shared: bool) -> float:
    """The review's model of a fast rank's pushes: 2 slots, 3 units with the sender, and polls."""
    slots, stage, add, poll, host, depth = 2, STAGE_S, ADD_S, 0.5e-3, 0.1e-3, 3

    def free(t: float) -> float:
        """When the owner's lane takes work that is asked for at t."""
        k = int(t // owner_s)
        return t if not shared or t - k * owner_s <= (stage + host if k else 0) else (k + 1) * owner_s

    added: list[float] = []
    settled: list[float] = []
    server = computed = 0.0
    for i in range(n):
        computed = max(computed, settled[i - depth] if i >= depth else 0) + fast_s
        t = max(computed, settled[-1] if settled else 0)
        if i >= slots and added[i - slots] > t:
            t = added[i - slots] + poll
        settled.append(t + stage)
        server = free(max(settled[-1], server) + host) + add
        added.append(server)
    return added[-1]


@pytest.mark.parametrize(("owner_s", "fast_s"), [(0.1, 0.01), (0.2, 0.025), (0.05, 0.025)])
def test_pushes_beside_a_busy_owner_take_what_the_closed_form_says(owner_s: float, fast_s: float) -> None:
    for lanes, shared in ((VirtualLanes, False), (SharedServer, True)):
        expected = closed_form(owner_s, fast_s, 84, shared)
        assert beside(owner_s, fast_s, lanes).posted == pytest.approx(expected, rel=0.1), f"shared: {shared}"


def test_a_step_takes_as_long_as_odc_simulate_says() -> None:
    """Four ranks with unequal microbatches and units; fetches are 1 ms, pushes too, and the first is not hidden."""
    ranks, engine = 4, ENGINE
    units = [UnitSpec.build(i, f"u{i}", [("w", NUMEL, torch.bfloat16)], torch.float32) for i in range(3)]
    nbytes = float(ranks * units[0].published_bytes)
    seconds = [[0.06], [0.03, 0.02, 0.01], [0.004], []]

    def uses(total: float) -> list[Used]:
        forward = [Used(i, total / 9, True, False) for i in range(3)]
        return forward + [Used(i, 2 * total / 9, True, True) for i in (2, 1, 0)]

    costs = replace(COSTS, engine=engine, memory=1e18)
    figures = VirtualRanks(units, [[uses(one) for one in listed] for listed in seconds], costs).run()
    model = Model((Unit(nbytes, nbytes, 1 / 3),) * 3)
    result = simulate(Step(Cluster(ranks, intra_bandwidth=engine), model, seconds, "on demand"))
    assert [one.compute for one in figures] == pytest.approx([sum(listed) for listed in seconds])
    assert max(one.step for one in figures) == pytest.approx(result.seconds, rel=0.05)
    assert [one.fetch + one.host for one in figures] == pytest.approx(result.transfer, rel=0.2, abs=3e-4)
    assert [one.waiting for one in figures][3] > 0.9 * result.seconds, (
        "a rank without microbatches waits for the others"
    )


def test_threads_run_in_the_order_of_their_clocks() -> None:
    time, seen = VirtualTime(), list[tuple[str, float]]()

    def work(name: str, seconds: float) -> None:
        for _ in range(3):
            time.sleep(seconds)
            seen.append((name, round(time.now(), 6)))

    time.start(0, "slow", lambda: work("slow", 0.4))
    time.start(1, "fast", lambda: work("fast", 0.3))
    time.run(lambda: len(seen) == 6, 60)
    assert seen == sorted(seen, key=lambda each: each[1]) and seen[-1] == ("slow", 1.2)


def test_an_error_of_a_thread_and_a_wait_for_ever_end_the_simulation() -> None:
    time = VirtualTime()
    time.start(0, "broken", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        time.run(lambda: False, 60)
    time = VirtualTime()
    queue = time.primitives()[1].SimpleQueue()
    time.start(3, "waits", queue.get)
    with pytest.raises(RuntimeError, match="all threads wait for each other: waits 3"):
        time.run(lambda: False, 60)
    assert "waits 3" not in [thread.name for thread in threading.enumerate()], "it ends with its simulation"


def test_the_old_fault_would_show() -> None:
    """Where lane "server" waits for compute, a fast rank is held up by an owner whose units are ten times as long."""
    idle, busy, shared = (
        beside(s, 0.01, lanes) for s, lanes in ((0, VirtualLanes), (0.1, VirtualLanes), (0.1, SharedServer))
    )
    assert busy.posted == pytest.approx(idle.posted, rel=0.02) and busy.slots < 0.01
    assert beside(0.3, 0.01, VirtualLanes).posted <= 1.15 * idle.posted, "units of 300 ms"
    assert 4 < shared.posted / idle.posted < 8
    assert shared.slots > 0.5 * shared.posted, "it waits for slots"
    assert shared.waits["rank 1's sender for rank 0's slot"] > 0.08, "for a unit of its owner's"
