"""An optimizer on a stream of its own: `set_post_optim_event` alone orders its writes before the next publish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.compare import differences
from support.device import own_device
from support.exact import Exact, SignStep, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import Settings, fully_shard
from odc.fsdp import live_roots

STEPS, BUSY = 3, 300
SETTINGS = Settings(copy_engine_bytes=1)


def trained(rank: int, world: int, aside: bool) -> dict[str, torch.Tensor]:
    """This rank's shards, on the CPU, after steps of odc on a device.

    The optimizer runs on the current stream or `aside`, on one that is busy before each step.
    """
    device = own_device(rank)
    ballast, stream = torch.zeros(1 << 18, device=device), torch.cuda.current_stream(device)
    if aside:
        stream = torch.cuda.Stream(device)

    def step(model: Any, optimizer: SignStep) -> None:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(BUSY if aside else 0):
                ballast.add_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            event = stream.record_event()
        if aside:
            model.set_post_optim_event(event)

    shards = steps(rank, device.type, fully_shard, step, mesh=init_device_mesh("cuda", (world,)), settings=SETTINGS)
    for root in live_roots():
        root.shut_down()
    return shards


def trained_by_torch(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The same by FSDP2 on the CPU."""

    def step(model: Any, optimizer: SignStep) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return steps(rank, "cpu", torch_fully_shard, step, mesh=init_device_mesh("cpu", (world,)))


def steps(
    rank: int, device: str, shard: Callable[..., Any], step: Callable[[Any, SignStep], None], **options: Any
) -> dict[str, torch.Tensor]:
    """This rank's shards on the CPU, after a model of whole numbers was trained; `step` runs its optimizer."""
    model: Any = Exact().to(device)
    for module in (*model.layers, model):
        shard(module, **options)
    optimizer = SignStep(model.parameters())
    for number in range(STEPS):
        model(batch(rank, number, 0).to(device)).sum().backward()
        step(model, optimizer)
    if device == "cuda":
        torch.cuda.synchronize()
    return {name: parameter.detach().to_local().cpu() for name, parameter in model.named_parameters()}


def as_torch(rank: int, world: int) -> int:
    """How many numbers are not 0; all are those of FSDP2."""
    expected = trained_by_torch(rank, world)
    for aside in (False, True):
        wrong = differences(trained(rank, world, aside), expected, None)
        assert not wrong, "\n".join([f"aside: {aside}", *wrong])
    return sum(int(one.count_nonzero()) for one in expected.values())


def test_training_equals_fsdp2_wherever_the_optimizer_runs(ranks) -> None:
    assert min(ranks(2).run(as_torch, timeout=240)) > 500
