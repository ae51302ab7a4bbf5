"""An optimizer on a stream of its own: `set_post_optim_event` alone orders its writes before the next publish."""

from __future__ import annotations

from typing import Any

import torch
from support.device import own_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.fsdp import live_roots

STEPS, WIDTH, BUSY = 3, 64, 300
SETTINGS = Settings(copy_engine_bytes=1)


def trained(rank: int, world: int, aside: bool) -> list[torch.Tensor]:
    """This rank's shards after steps of SGD, on the current stream or `aside`, on one that is busy before each."""
    device = own_device(rank)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(device)
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh, settings=SETTINGS)
    fully_shard(model, mesh=mesh, settings=SETTINGS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = torch.cuda.Stream(device) if aside else torch.cuda.current_stream(device)
    ballast = torch.zeros(1 << 18, device=device)
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(8, WIDTH, device=device)).square().sum().backward()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(BUSY if aside else 0):
                ballast.add_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            event = stream.record_event()
        if aside:
            model.set_post_optim_event(event)
    torch.cuda.synchronize()
    shards = [parameter.detach().to_local().clone() for parameter in model.parameters()]
    for root in live_roots():
        root.shut_down()
    return shards


def apart(rank: int, world: int) -> float:
    expected, found = (trained(rank, world, aside) for aside in (False, True))
    return max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))


def test_training_is_the_same_wherever_the_optimizer_runs(ranks) -> None:
    """Sums of two ranks do not depend on their order."""
    assert max(ranks(2).run(apart, timeout=240)) == 0.0
