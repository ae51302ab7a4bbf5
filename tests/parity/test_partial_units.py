"""A unit of several modules of which only one runs: `fully_shard([norm, head])`, the head alone, chunk by chunk."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import own_gradients, own_parameters
from support.on_ranks import on_ranks
from support.programs import Compared, Make, Programs, Result
from support.ranks import Pools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from odc import fully_shard
from odc.fsdp._torch_compat import FSDPParamGroup

# Before torch 2.13 a module of a unit that runs alone for a second time finds its parameters sharded.
pytestmark = pytest.mark.skipif(
    "is_partial_group_backward" not in inspect.unwrap(FSDPParamGroup.post_backward).__code__.co_varnames,
    reason=f"torch {torch.__version__} does not run a module of a unit alone",
)

programs = Programs()
WIDTH, WORDS, CHUNKS = 12, 17, 3


class Chunked(nn.Module):
    """A trunk and a head that the loss calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.body(self.embed(x))))


def sharded(make: Make, *, reshard: bool = True) -> Any:
    torch.manual_seed(0)
    model: Any = Chunked()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    make(model.body, mesh=mesh, reshard_after_forward=reshard)
    make([model.norm, model.head], mesh=mesh, reshard_after_forward=reshard)
    return make(model, mesh=mesh, reshard_after_forward=reshard)


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (2, 2 * CHUNKS), generator=generator)


def chunks(model: Any, h: torch.Tensor, after: Callable[[int], None]) -> torch.Tensor:
    """Run the head on each chunk with a backward of its own; returns the gradient of `h`."""
    grads = []
    for i, chunk in enumerate(torch.chunk(h.detach(), CHUNKS, dim=1)):
        mine = chunk.contiguous().requires_grad_(True)
        model.head(mine).logsumexp(-1).sum().backward()
        grads.append(mine.grad)
        after(i)
    return torch.cat(grads, dim=1)  # type: ignore[arg-type]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.detach().clone()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def chunked(make: Make, rank: int, *, reshard: bool, step_on_head: bool, toggled: bool) -> Result:
    """Returns the head's gradient after each chunk, and all gradients and parameters after each step."""
    model = sharded(make, reshard=reshard)
    optimizer, of_head = optimizer_of(model.parameters()), optimizer_of(model.head.parameters())
    unit = model.head._get_fsdp_state()._fsdp_param_group
    found: Result = {}
    for step in range(3):

        def after(i: int, step: int = step) -> None:
            found.update({f"{step} {i} {name}": grad for name, grad in own_gradients(model.head).items()})
            assert not toggled or unit.is_unsharded, "a chunk's backward has resharded the head"
            if step_on_head:
                of_head.step()
                of_head.zero_grad()

        h = model(tokens(rank, step))
        if toggled:
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
        grad = chunks(model, h, after)
        if toggled:
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
            assert not unit.is_unsharded
        h.backward(grad)
        found.update({f"{step} all {name}": one for name, one in own_gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return {**found, **own_parameters(model)}


@programs.add
def gradients_appear_chunk_by_chunk(make: Make, rank: int, world: int) -> Result:
    found = chunked(make, rank, reshard=True, step_on_head=False, toggled=False)
    assert all(found[f"0 {i} weight"] is not None for i in range(CHUNKS))
    return found


@programs.add
def without_reshard_after_forward(make: Make, rank: int, world: int) -> Result:
    return chunked(make, rank, reshard=False, step_on_head=False, toggled=False)


@programs.add
def a_step_on_the_head_after_every_chunk(make: Make, rank: int, world: int) -> Result:
    return chunked(make, rank, reshard=True, step_on_head=True, toggled=False)


@programs.add
def the_head_kept_unsharded_over_the_chunks(make: Make, rank: int, world: int) -> Result:
    return chunked(make, rank, reshard=False, step_on_head=False, toggled=True)


@programs.add
def the_head_in_one_backward_with_the_trunk(make: Make, rank: int, world: int) -> Result:
    model = sharded(make)
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        model.head(model(tokens(rank, step))).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(own_parameters(model))


@programs.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)


@on_ranks(2)
def test_in_a_block_no_chunk_ends_the_minibatch(rank: int, world: int) -> None:
    """In a block nothing ends with a chunk: ranks may run any number of them."""
    model = sharded(fully_shard)
    with model.minibatch():
        for step in range(1 + rank):
            h = model(tokens(rank, step))
            h.backward(chunks(model, h, lambda i: None))
            assert model.head.weight.grad is None
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_a_step_never_leaves_old_weights_unsharded(rank: int, world: int) -> None:
    """A step reshards a unit that was kept over the chunks, so that the next chunk sees the new weights."""
    model = sharded(fully_shard, reshard=False)
    of_head = torch.optim.SGD(model.head.parameters(), lr=0.5)
    unit = model.head._get_fsdp_state()._fsdp_param_group
    model.head.set_reshard_after_backward(False)
    x = torch.ones(1, WIDTH, requires_grad=True)
    model(tokens(rank, 0))
    model.head(x).sum().backward()
    before = whole(model.head.weight)
    model.head(x).sum().backward()
    assert unit.is_unsharded
    of_head.step()
    assert not unit.is_unsharded
    after = whole(model.head.weight)
    assert not torch.equal(after, before)
    assert torch.equal(model.head(x), x @ after.T)
