"""What FSDP2's users do between and around steps: each program runs under both, and everything it returns is equal.

Two ranks, one backward a minibatch unless noted otherwise, so equal means to the bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.compare import differences
from support.models import (
    Case,
    adamw,
    clip,
    make,
    next_token_loss,
    own_gradients,
    own_parameters,
    shard,
    tokens,
    train,
)
from support.on_ranks import on_ranks
from support.programs import PLAIN, Compared, Make, Programs, Result, backward, new, step
from support.ranks import Pools
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import distribute_tensor

import odc
from odc import fully_shard

PROGRAMS = Programs()


def added_if(torch_can: bool) -> Callable[[Any], Any]:
    return PROGRAMS.add if torch_can else lambda program: program


@PROGRAMS.add
def two_forwards_before_one_backward(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    for number in range(2):
        first, second = tokens(rank, number, 0), tokens(rank, number, 1)
        (next_token_loss(model(first), first) / 18 + next_token_loss(model(second), second) / 36).backward()
        clip(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return own_parameters(model)  # type: ignore[return-value]


@added_if(hasattr(FSDPModule, "set_reduce_scatter_unused_params"))
def a_branch_that_no_rank_takes(shard_with: Make, rank: int, world: int) -> Result:
    """A unit is used by all ranks in every second step: torch gives it no gradient before the first."""
    torch.manual_seed(0)
    model: Any = Branches()
    for part in (model.always, model.sometimes, model):
        shard_with(part, mesh=init_device_mesh("cpu", (world,)))
    model.set_reduce_scatter_unused_params(True)
    optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1), dict[str, torch.Tensor | None]()
    for number, all_of_it in enumerate((False, True, False, True)):
        model(torch.full((2, 4), rank + 1.0), all_of_it).sum().backward()
        seen |= {f"{number} {name}": one for name, one in own_gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **own_parameters(model)}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        return self.sometimes(self.always(x)) if all_of_it else self.always(x)


@added_if(hasattr(_fsdp_common, "_disable_functorch_if_active"))
def a_directional_derivative(shard_with: Make, rank: int, world: int) -> Result:
    """As of MeanFlow's loss: torch.func.jvp through the model, first thing in a minibatch, and a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for part in (model[0], model[2], model):
        shard_with(part, mesh=init_device_mesh("cpu", (world,)))
    x, seen = torch.arange(8.0).view(2, 4) + rank, dict[str, torch.Tensor | None]()
    for number in range(2):
        out, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        (out - along).square().sum().backward()
        seen |= {f"{number} {name}": one for name, one in own_gradients(model).items()} | {f"{number}": along.detach()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
    return seen


@PROGRAMS.add
def evaluation_between_steps(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with, Case(counts=((1, 1),), checkpointing="function"))
    seen: Result = {}
    for number, mode in enumerate([torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode]):
        step(model, optimizer, rank, number)
        model.eval()
        with mode():
            for i in range(number + 1):
                seen[f"{number}.{i}"] = model(tokens(rank, 50 + number, i)).clone()
        model.train()
    return {**seen, **own_parameters(model)}


@PROGRAMS.add
def evaluation_first_and_twice(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    seen: Result = {}
    for number in range(3):
        with torch.no_grad():
            seen[f"a{number}"] = model(tokens(rank, number, 5))
            seen[f"b{number}"] = model(tokens(rank, number, 6))
        step(model, optimizer, rank, number)
    return {**seen, **own_parameters(model)}


@PROGRAMS.add
def forward_with_gradients_but_no_backward(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    for number in range(2):
        model(tokens(rank, number, 7))
        step(model, optimizer, rank, number)
    return own_parameters(model)  # type: ignore[return-value]


@PROGRAMS.add
def load_state_dict_between_steps(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(2):
        step(model, optimizer, rank, number)
    with torch.no_grad():
        model(tokens(rank, 3, 0))  # an evaluation is open when the weights come
    model.load_state_dict(first)
    loss = step(model, optimizer, rank, 5)
    return {"loss": loss, **own_parameters(model)}


@PROGRAMS.add
def weights_set_by_hand_between_steps(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    step(model, optimizer, rank, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        model.head.weight.data.add_(0.25)
    loss = step(model, optimizer, rank, 1)
    return {"loss": loss, **own_parameters(model)}


@PROGRAMS.add
def meta_init(shard_with: Make, rank: int, world: int) -> Result:
    source = make(Case(counts=((1, 1),), tied=True)).state_dict()
    with torch.device("meta"):
        empty = make(Case(counts=((1, 1),), tied=True))
    model = shard(shard_with, empty, PLAIN, init_device_mesh("cpu", (world,)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.state_dict().items():
            p.copy_(distribute_tensor(source[name], p.device_mesh, p.placements))
    assert model.head.weight is model.embed.weight, "tied weights came apart"
    optimizer = adamw(model)
    losses = {f"loss{number}": step(model, optimizer, rank, number) for number in range(2)}
    return {**losses, **own_parameters(model)}


@PROGRAMS.add
def distributed_checkpoint(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    for number in range(2):
        step(model, optimizer, rank, number)
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folder, src=0)
    saved, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved, "optimizer": saved_optimizer}, checkpoint_id=folder[0])

    again, again_optimizer = new(shard_with)
    loaded, loaded_optimizer = get_state_dict(again, again_optimizer)
    state = {"model": loaded, "optimizer": loaded_optimizer}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(again, again_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, value in own_parameters(again).items():
        assert torch.equal(value, own_parameters(model)[name]), f"{name} came back changed"
    step(again, again_optimizer, rank, 2)
    step(model, optimizer, rank, 2)
    continued = differences(own_parameters(again), own_parameters(model), None)
    assert not continued, f"resumed and uninterrupted part: {continued}"
    return own_parameters(again)  # type: ignore[return-value]


@PROGRAMS.add
def zero_grad_keeps_tensors(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    for number in range(3):
        backward(model, rank, number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {**own_gradients(model), **{f"p.{name}": p for name, p in own_parameters(model).items()}}


@PROGRAMS.add
def gradients_add_up_without_zero_grad(shard_with: Make, rank: int, world: int) -> Result:
    model, _ = new(shard_with)
    for number in range(3):
        backward(model, rank, number)
    return own_gradients(model)


@PROGRAMS.add
def freeze_then_unfreeze(shard_with: Make, rank: int, world: int) -> Result:
    model, optimizer = new(shard_with)
    losses: Result = {}
    for number in range(4):
        model.layers[0].requires_grad_(number % 2 == 1)
        losses[f"loss{number}"] = step(model, optimizer, rank, number)
    return {**losses, **own_parameters(model)}


@PROGRAMS.add
def modules_in_one_unit(shard_with: Make, rank: int, world: int) -> Result:
    mesh = init_device_mesh("cpu", (world,))
    model = make(PLAIN)
    shard_with([model.layers[0], model.layers[1]], mesh=mesh)
    shard_with([model.norm, model.head], mesh=mesh)
    shard_with(model, mesh=mesh)
    optimizer = adamw(model)
    losses = {f"loss{number}": step(model, optimizer, rank, number) for number in range(2)}
    return {**losses, **own_parameters(model)}


@PROGRAMS.add
def several_optimizers(shard_with: Make, rank: int, world: int) -> Result:
    model, _ = new(shard_with)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9)
    others = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2, eps=1e-4)
    for number in range(3):
        backward(model, rank, number)
        clip(model, 0.5)
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad()
    return own_parameters(model)  # type: ignore[return-value]


@PROGRAMS.add
def optimizers_that_take_turns(shard_with: Make, rank: int, world: int) -> Result:
    model, _ = new(shard_with)
    optimizers = [torch.optim.SGD(list(model.parameters())[i::2], lr=0.1) for i in range(2)]
    for number in range(4):
        backward(model, rank, number)
        optimizers[number % 2].step()
        model.zero_grad()
    return own_parameters(model)  # type: ignore[return-value]


@PROGRAMS.add
def fused_adamw(shard_with: Make, rank: int, world: int) -> Result:
    model, _ = new(shard_with, Case(counts=((1, 1),), low_precision=True))
    optimizer = adamw(model, fused=True)
    for number in range(3):
        step(model, optimizer, rank, number)
    return own_parameters(model)  # type: ignore[return-value]


@PROGRAMS.add
def a_step_and_clipping_that_are_compiled(shard_with: Make, rank: int, world: int) -> Result:
    """With another root alive, whose hooks are those of the process."""
    torch._dynamo.reset()
    model, _ = new(shard_with, Case(((1, 1),), layers=1))
    optimizer = adamw(model)
    clipped = torch.compile(torch.nn.utils.clip_grad_norm_, backend="eager")
    stepped = torch.compile(optimizer.step, backend="eager")
    norms = {}
    for number in range(3):
        backward(model, rank, number)
        norms[f"norm{number}"] = clipped(list(model.parameters()), 0.5).full_tensor()
        stepped()
        optimizer.zero_grad()
    return {**own_parameters(model), **norms}


@PROGRAMS.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)


@on_ranks(2)
def test_nothing_of_odc_is_compiled_with_a_layer(rank: int, world: int) -> None:
    """A hook that is traced turns torch's weak dictionaries into inputs, which change while they are read."""
    from torch._dynamo.convert_frame import input_codes

    torch._dynamo.reset()
    train(fully_shard, Case(((1, 1),), compiled=True), rank, world)
    codes = [code for code in (reference() for reference in input_codes.seen) if code is not None]
    assert codes, "nothing was compiled"
    ours = str(Path(odc.__file__).parent)  # a clone may lie in a folder called odc
    assert not {code.co_filename for code in codes if code.co_filename.startswith(ours)}
