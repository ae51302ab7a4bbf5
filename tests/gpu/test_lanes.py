"""The drop-in on lanes that sleep: code that does not wait for the device where it must gets wrong weights.

`tests/fsdp/test_lanes.py` shows the same over copies that a test makes late, without a device.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from support.device import own_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import fully_shard
from odc.fsdp import live_roots
from odc.memory import cuda_lanes as memory
from odc.protocol.fetch import PublishedShards

CYCLES = 40_000_000  # about twenty milliseconds, at most: a peer on the same device takes turns of some


class SleepyLanes(memory.CudaLanes):
    """Lanes in which a third of all work begins late; functions in `skipped` do not wait for them."""

    skipped = frozenset[str]()

    def lane(self, name: str) -> Any:
        return _Pausing(super().lane(name))

    def settle(self) -> None:
        if sys._getframe(1).f_code.co_qualname not in self.skipped:
            super().settle()

    def reached(self, mark: object) -> bool:
        return sys._getframe(1).f_code.co_qualname in self.skipped or super().reached(mark)


class _Pausing:
    """A stream whose work begins with a pause, now and then."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._stream.__enter__()
        if random.random() < 0.33:
            torch.cuda._sleep(random.randrange(CYCLES))

    def __exit__(self, *raised: Any) -> None:
        self._stream.__exit__(*raised)


def trained(rank: int, world: int, width: int = 256) -> list[torch.Tensor]:
    """This rank's shards after four steps of unequal minibatches."""
    device = own_device(rank)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(3))
    model: Any = nn.Sequential(*layers).to(device)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cuda", (world,)))
    fully_shard(model, mesh=init_device_mesh("cuda", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        with model.minibatch():
            for _ in range(1 + (rank + step) % 2):
                model(torch.randn(8, width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = [parameter.detach().to_local().clone() for parameter in model.parameters()]
    for root in live_roots():
        root.shut_down()
    return shards


def apart(rank: int, world: int, skipped: str) -> bool:
    """Whether training on lanes that sleep goes elsewhere if one function does not wait."""
    random.seed(rank)
    expected = trained(rank, world)
    SleepyLanes.skipped, publish = frozenset({skipped}), PublishedShards.publish

    def publish_late(*args: Any) -> None:
        if rank == 0 and publish.__qualname__ == skipped:  # a peer that is as late would come no sooner than the shards
            torch.cuda._sleep(20 * CYCLES)
        publish(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CudaLanes", SleepyLanes)
        patch.setattr(PublishedShards, "publish", publish_late)
        found = trained(rank, world)
    return not all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(found, expected, strict=True))


def test_lanes_that_sleep_change_nothing(ranks) -> None:
    assert not any(ranks(2).run(apart, "no function", timeout=240))


@pytest.mark.parametrize("skipped", ["PublishedShards.publish", "DeviceRoute.push", "DeviceDrain.__call__"])
def test_every_wait_for_the_device_is_needed(ranks, skipped: str) -> None:
    assert any(ranks(2).run(apart, skipped, timeout=240)), "a wait that was left out was not missed"


def test_no_lane_is_a_stream_that_torch_hands_out_with_fsdp2s_priorities(device: torch.device) -> None:
    pools = {torch.cuda.Stream(device, priority=priority).cuda_stream for priority in (0, -1) for _ in range(64)}
    lanes = memory.CudaLanes(device)
    for name in ("server", "network 0.0"):
        with lanes.lane(name):
            assert torch.cuda.current_stream(device).cuda_stream not in pools
