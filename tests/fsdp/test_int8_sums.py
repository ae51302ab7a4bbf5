"""Sums that cross as int8 between ranks on several hosts: the gradients of plain torch, rounded by a plain reference,
and a training that follows the one with fp32 sums.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.exact import HIDDEN, Exact, batch
from support.host_ranks import HostPools
from support.on_ranks import on_hosts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import AbandonedMinibatchError, UnsupportedError
from odc.fsdp import root_of

INT8 = Settings(timeout_s=60.0, sums_dtype="int8")
LETTERS, WIDTH = 48, 32


def crossed(total: torch.Tensor, matrix: bool) -> torch.Tensor:
    """What arrives of a sum, 1-D: of a matrix its codes times the scale of each 128, else its bf16."""
    if not matrix:
        return total.bfloat16().float()
    found = []
    for block in total.split(128):
        scale = block.abs().max() / 127
        found.append(torch.round(block * (1 / scale)) * scale if scale else torch.zeros_like(block))
    return torch.cat(found)


def loss(model: Any, rank: int, step: int, i: int) -> torch.Tensor:
    """With gradients of any size: of whole numbers many lie half-way between two codes."""
    weights = torch.linspace(0.3, 90.0, HIDDEN).sin()
    return (model(batch(rank, step, i)) * weights).sum()  # type: ignore[no-any-return]


def minibatch(model: Any, rank: int, step: int, give_up: bool) -> None:
    with model.minibatch():
        for i in range(2):
            model.set_is_last_backward(i == 1)
            loss(model, rank, step, i).backward()
        if give_up:
            model.abandon_minibatch("a sample cannot be read")


def gradients_of_all(world: int, step: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for rank in range(world):
        model = Exact()
        for i in range(2):
            loss(model, rank, step, i).backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    return found


def equal_to_reference(rank: int, world: int, hosts: int, sharding: Any) -> float:
    """Six minibatches, the fourth of which is abandoned; returns the largest residual."""
    mesh = init_device_mesh("cpu", (world,))
    if sharding == "world":
        mesh = init_device_mesh("cpu", (hosts, world // hosts), mesh_dim_names=("replicas", "ranks"))
    model, here = Exact(), rank * hosts // world
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, settings=INT8, optimizer_sharding=sharding)
    residuals: dict[tuple[str, int], torch.Tensor] = {}
    for step in range(6):
        if step == 3:
            with pytest.raises(AbandonedMinibatchError):
                minibatch(model, rank, step, rank == world - 1)
            continue
        minibatch(model, rank, step, False)
        by_rank, apart = gradients_of_all(world, step), list[torch.Tensor]()
        for name, parameter in model.named_parameters():
            if name not in by_rank[0]:
                continue
            shards = [one[name].chunk(world)[rank].flatten() for one in by_rank]
            expected = torch.zeros_like(shards[0])
            for host, sums in enumerate(zip(*[iter(shards)] * (world // hosts), strict=True)):
                total = sum(sums, residuals.get((name, host), torch.zeros_like(expected)))
                came = total if host == here else crossed(total, "weight" in name)
                residuals[name, host] = total - came
                expected = expected + came
            grad: Any = parameter.grad
            apart.append((grad.to_local().flatten() - expected / world).abs() > 1e-4)
        wrong = torch.cat(apart).float().mean()  # the order of pushes may decide between two codes
        assert wrong < 0.02, f"rank {rank}, step {step}: {wrong} of the gradients are others"
        model.zero_grad()
    return max(float(one.abs().max()) for one in residuals.values())


@pytest.mark.parametrize(
    ("hosts", "per_host", "sharding"),
    [
        (2, 2, "mesh"),
        *(
            pytest.param(*grid, marks=pytest.mark.thorough)
            for grid in ((3, 1, "mesh"), (2, 2, "world"), (3, 2, "world"), (2, 1, "mesh"))
        ),
    ],
)
def test_gradients_are_those_of_plain_torch_rounded_with_feedback(
    host_ranks: HostPools, hosts: int, per_host: int, sharding: str
) -> None:
    residuals = host_ranks(hosts, per_host).run(equal_to_reference, hosts, sharding)
    assert min(residuals) > 0.01, "nothing was rounded"


class Tiny(nn.Module):
    """A language model of letters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(LETTERS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def text(rank: int, step: int) -> torch.Tensor:
    """int64 [16, 12]: runs through a fixed table of successors, with a wrong letter now and then."""
    draw, table = torch.Generator().manual_seed(1000 * step + rank), torch.Generator().manual_seed(7)
    after = torch.randperm(LETTERS, generator=table)
    rows = [torch.randint(LETTERS, (16,), generator=draw)]
    for _ in range(11):
        wrong = torch.rand(16, generator=draw) < 0.1
        rows.append(torch.where(wrong, torch.randint(LETTERS, (16,), generator=draw), after[rows[-1]]))
    return torch.stack(rows, 1)


def trained(rank: int, world: int, settings: Settings, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """The loss of each step over all ranks; what this rank computes with the trained model for one input."""
    model: Any = Tiny()
    for module in (*model.layers, model):
        fully_shard(module, settings=settings)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), list[torch.Tensor]()
    for step in range(steps):
        with model.minibatch():
            model.set_is_last_backward(True)
            ids = text(rank, step)
            now = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            now.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(now.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    whole = [one.full_tensor() for one in model.state_dict().values()]
    with torch.no_grad():
        return (total / world).tolist(), [*whole, model(text(0, 10**6))]


def follows(rank: int, world: int, steps: int) -> list[tuple[list[float], list[torch.Tensor]]]:
    return [trained(rank, world, settings, steps) for settings in (Settings(timeout_s=60.0), INT8)]


def test_a_training_follows_the_one_with_exact_sums(host_ranks: HostPools) -> None:
    """And every rank computes with the same weights, bit for bit. `bench.int8_sums` goes on for 1,000 steps."""
    exact, rounded = zip(*host_ranks(2, 2).run(follows, 60), strict=True)
    losses = [sum(found[0][0][-20:]) / 20 for found in (exact, rounded)]
    assert losses[0] < 0.9 * exact[0][0][0], "it has learnt nothing"
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-3)
    for _, outputs in rounded[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outputs, rounded[0][1], strict=True))


@on_hosts(2, 2)
def test_matrices_cross_as_int8_and_hybrid_sums_are_refused(rank: int, world: int) -> None:
    for tied, settings in ((False, INT8), (True, INT8), (False, Settings(sums_dtype="bfloat16"))):
        model: Any = Tiny()
        if tied:
            model.head.weight = model.tokens.weight
        for module in (*model.layers, model):
            fully_shard(module, settings=settings)
        coarse = {spec.name for unit in root_of(model).layout.units for spec in unit.params if spec.coarse}
        expected = {f"layers.{i}.{j}.weight" for i in (0, 1) for j in (1, 3)} if settings is INT8 else set()
        assert coarse == expected, (tied, coarse)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    hybrid = Exact()
    fully_shard(hybrid, mesh=mesh, settings=INT8)
    with pytest.raises(UnsupportedError, match=f"rank {rank}: .*'int8'.* is for a mesh whose shards lie on several"):
        hybrid(batch(rank, 0, 0))
