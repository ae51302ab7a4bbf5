"""fp16 with torch's `GradScaler` on the CPU: under FSDP2 and under odc, equal to the bit, steps that overflow included.

Both reduce in fp32, so sums of two ranks are rounded alike.
"""

from __future__ import annotations

from typing import Any

import torch
from support.models import adamw, clip, make, next_token_loss, own_gradients, own_parameters, tokens
from support.programs import PLAIN, Compared, Make, Programs, Result
from support.ranks import Pools
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

PROGRAMS = Programs()
HALF = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
STEPS, GROWTH = 6, 2
OVERFLOWS = {1: 0, 4: 1}  # by step the rank whose loss is far too large


def scaled(shard_with: Make, rank: int, world: int, optimizer_of: Any, unscale: bool) -> Result:
    """What training leaves, and after each step the scale and the gradients."""
    mesh, model = init_device_mesh("cpu", (world,)), make(PLAIN)
    for layer in model.layers:
        shard_with(layer, mesh=mesh, mp_policy=HALF)
    shard_with(model, mesh=mesh, mp_policy=HALF)
    optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=GROWTH)
    found: Result = {}
    for step in range(STEPS):
        x = tokens(rank, step, 0)
        loss = next_token_loss(model(x).float(), x) * (1e6 if OVERFLOWS.get(step) == rank else 1.0)
        scaler.scale(loss).backward()
        finite = step not in OVERFLOWS
        if unscale:
            scaler.unscale_(optimizer)
        if finite and unscale:
            found[f"norm {step}"] = torch.tensor(float(clip(model, 0.5)))
        if finite:
            found |= {f"{step}.{name}": grad for name, grad in own_gradients(model).items()}
        before = [parameter.detach().to_local().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = any(
            not torch.equal(one, parameter.detach().to_local())
            for one, parameter in zip(before, model.parameters(), strict=True)
        )
        assert moved == finite, f"step {step} {'changed' if moved else 'did not change'} the weights"
        optimizer.zero_grad()
        found[f"scale {step}"] = torch.tensor(scaler.get_scale())
    return {**found, **own_parameters(model)}


@PROGRAMS.add
def clipped_steps(shard_with: Make, rank: int, world: int) -> Result:
    return scaled(shard_with, rank, world, adamw, unscale=True)


@PROGRAMS.add
def fused_steps_that_unscale(shard_with: Make, rank: int, world: int) -> Result:
    def fused(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    return scaled(shard_with, rank, world, fused, unscale=False)


@PROGRAMS.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)
