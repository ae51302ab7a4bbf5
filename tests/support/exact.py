"""A model whose training is exact in whatever order sums are taken, so that equality is to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

HIDDEN, LAYERS = 24, 3


class Exact(nn.Module):
    """Layers whose gradients are whole numbers, so that sums are exact in any order, and equality is to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.unused = nn.Linear(3, 5)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=draw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).clamp(-4, 4)
        return x


class SignStep(torch.optim.Optimizer):
    """Keeps whole numbers whole."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = parameter.to_local()
                    local.sub_(parameter.grad.to_local().sign()).clamp_(-2, 2)


def batch(rank: int, step: int, i: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 100 * i + rank)
    return torch.randint(-2, 3, (4, HIDDEN), generator=draw).float()


def train(
    shard: Callable[..., Any],
    rank: int,
    counts: Sequence[Sequence[int]],
    marks: str = "none",
    *,
    device: str = "cpu",
    gathered: bool = True,
    **options: Any,
) -> dict[str, torch.Tensor | None]:
    """Outputs of an evaluation after every step; gradients and parameters, the rank's own shards of them and, if
    `gathered`, whole (which gloo cannot on a device).

    `counts`: microbatches by step and rank, which FSDP2 pads. `marks`: which backwards are marked as the rank's last,
    "none", the "last" (of rank 0 in the second minibatch none), or wrongly "all"; "each" ends the minibatch, as in an
    unchanged loop.
    """
    model, mine = Exact().to(device), shard is not torch_fully_shard
    for layer in model.layers:
        shard(layer, **options)
    sharded = shard(model, **options)
    optimizer = SignStep(model.parameters())
    found: dict[str, torch.Tensor | None] = {}
    for step, row in enumerate(counts):
        if mine and marks != "each":
            with sharded.minibatch():
                for i in range(row[rank]):
                    last = i == row[rank] - 1 and (rank, step) != (0, 1)
                    sharded.set_is_last_backward(marks == "all" or (marks == "last" and last))
                    model(batch(rank, step, i).to(device)).sum().backward()
        else:
            most = max(row)
            for i in range(most):
                if marks != "each":
                    sharded.set_requires_gradient_sync(i == most - 1)
                (model(batch(rank, step, i).to(device)).sum() * float(i < row[rank])).backward()
        for name, p in model.named_parameters():
            found |= _whole_and_own(f"step {step} gradient of {name}", p.grad, gathered)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found[f"step {step} output"] = model(batch(rank, step, 99).to(device)).cpu()
    for name, value in model.state_dict().items():
        found |= _whole_and_own(name, value, gathered)
    return found


def _whole_and_own(name: str, value: Any, gathered: bool) -> dict[str, torch.Tensor | None]:
    if value is None:
        return {name: None}
    own = {f"{name}, own shard": value.to_local().detach().cpu().clone()}
    return {name: value.full_tensor(), **own} if gathered else own


def claimed(
    rank: int, counts: Sequence[Sequence[int]], mesh: DeviceMesh, theirs_on: DeviceMesh, settings: Any
) -> list[list[int]]:
    """Gradients of what all ranks claim from a queue, beside FSDP2's on the CPU of what each has loaded.

    Returns the places that this rank claimed, by step.
    """
    from odc import fully_shard

    ours, theirs, numbers = Exact().to(mesh.device_type), Exact(), list[list[int]]()
    for one, other in zip((*ours.layers, ours), (*theirs.layers, theirs), strict=True):
        fully_shard(one, mesh=mesh, settings=settings)
        torch_fully_shard(other, mesh=theirs_on)
    for step, loads in enumerate(counts):
        mine = [batch(rank, step, i) for i in range(loads[rank])]
        with ours.minibatch():
            claims = ours.claim([{"x": one} for one in mine], [float(10 * i + rank) for i in range(len(mine))])
            numbers.append([])
            for microbatch in claims:
                numbers[-1].append(claims.number)
                ours(microbatch["x"].to(mesh.device_type)).sum().backward()
        (theirs(torch.cat(mine or [torch.zeros(1, HIDDEN)])).sum() * float(bool(mine))).backward()
        for one, other in zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True):
            assert torch.equal(one.grad.to_local().cpu(), other.grad.to_local()), f"rank {rank} in step {step}"
        ours.zero_grad()
        theirs.zero_grad()
    return numbers


def changed_by_rounding(
    model: Exact, rank: int, world: int, batches: Sequence[tuple[int, int]], *, rounded: bool = True
) -> int:
    """Compare gradients over two hosts, of outputs times 57 of these batches, with those of plain torch.

    If `rounded`, the sum of the other host's ranks is rounded to bf16 once. Returns how many numbers that has changed.
    """
    whole = [Exact() for _ in range(world)]
    for other, one in enumerate(whole):
        for step, i in batches:
            (one(batch(other, step, i)) * 57.0).sum().backward()
    changed, half, here = 0, world // 2, rank * 2 // world
    for mine, *theirs in zip(model.layers.parameters(), *(one.layers.parameters() for one in whole), strict=True):
        by_rank = [param.grad.chunk(world)[rank] for param in theirs]
        sums = [sum(by_rank[:half]), sum(by_rank[half:])]
        exact = sum(sums) / world
        if rounded:
            sums[1 - here] = sums[1 - here].bfloat16().float()
        expected = (sums[0] + sums[1]) / world
        assert torch.equal(mine.grad.to_local().cpu(), expected), f"rank {rank}: {mine.grad.to_local()} {expected}"
        changed += int((expected != exact).sum())
    return changed


def await_sums_in_backward(model: Any) -> list[int]:
    """Make the first layer's backward wait until the last layer's sums have come from all other hosts, which they do
    while backward goes on where it is known to be the last. Returns the epochs in which they have.
    """
    from odc.fsdp import root_of
    from odc.hosts.sums import EarlySums

    waited = list[int]()

    def await_sums(grad: torch.Tensor) -> None:
        root = root_of(model)
        sums, epoch = root.member.reduction, root.minibatch.epoch
        assert isinstance(sums, EarlySums)
        (unit,) = (unit.index for unit in root.layout.units if unit.name == "layers.2")
        deadline = time.monotonic() + 100
        while {sums._read.get((partner, unit), (0, 0))[0] for partner in root.grid.partners} != {epoch}:
            assert time.monotonic() < deadline, f"rank {root.rank}: the sums do not come"
            time.sleep(0.002)
        waited.append(epoch)

    model.layers[0].register_forward_hook(lambda *call: call[2].register_hook(await_sums) and None)
    return waited
