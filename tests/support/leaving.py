"""A job whose ranks become fewer, and more again, for tests; and the same steps as one job for each number of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import odc
from odc import Settings, fully_shard
from odc.experiments.launch import launch
from odc.recovery.generations import Generations
from odc.recovery.reshard import FormerLayout
from odc.recovery.slots import StateSlot
from support.recovering import Death, Fate

WIDTH = 10  # rows that no number of ranks here divides


class Leave(NamedTuple):
    """The process with place `place` ends at `point` of step `step`; one takes part again from step `back` on.

    -1: none does.
    """

    place: int
    step: int
    point: str
    back: int = -1


class Ended(NamedTuple):
    """What a process has at the end: how many ranks did each step, weights and moments, random numbers, layouts.

    `done` are the steps that it has ended, in order, each as often as it has.
    """

    worlds: list[int]
    state: dict[str, list[torch.Tensor]]
    random: torch.Tensor
    layouts: int
    done: list[int]


class Phase(NamedTuple):
    """Steps that as many ranks have done: `first` to before `last`."""

    world: int
    first: int
    last: int


class History:
    """How many ranks did each step: also of those that a process that came later has not done."""

    def __init__(self) -> None:
        self.worlds: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"worlds": list(self.worlds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.worlds = list(state["worlds"])


def data(step: int, rank: int, world: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * world + rank))


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Linear(17, WIDTH)) for _ in range(2)]
    # The root's shape is no other unit's: torch's cache of how tensors are sharded would give it the other's mesh.
    model: Any = nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7))
    settings = Settings(reproducible=True, timeout_s=60, check_protocol=True)
    for block in model[:2]:
        fully_shard(block, settings=settings)
    fully_shard(model, settings=settings)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def do_step(model: Any, optimizer: torch.optim.Optimizer, step: int, fate: Fate | None = None) -> None:
    loss = model(data(step, dist.get_rank(), dist.get_world_size())).square().mean()
    if fate is not None:
        fate.at("forward")
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if fate is not None:
        fate.at("clip")
    optimizer.step()
    optimizer.zero_grad()


def train(folder: str, steps: int, leaves: Sequence[Leave], options: dict[str, Any]) -> Ended | None:
    """The program of a rank; each step it draws one random number. None where it does not come back."""
    place = int(os.environ["RANK"])
    fate = Fate(place, [Death(one.place, one.step, one.point) for one in leaves], Path(folder))
    for one in leaves:
        if one.place == place and (Path(folder) / f"{place}.{one.step}.{one.point}").exists():
            if one.back < 0:
                return None
            _await(Path(folder) / f"back.{place}")
    fate.watch(StateSlot, "fill", "keep", after=True)
    fate.watch(FormerLayout, "part", "divide")
    fate.watch(Generations, "ready", "ready")
    with odc.Recovery(**{"rejoin_s": 10.0, **options}) as recovery:
        fate.step = recovery.step
        model, optimizer = build()
        history, done = History(), list[int]()
        torch.manual_seed(place)
        recovery.protect(model, optimizer, history=history)
        for step in recovery.steps(steps):
            fate.step = step
            with recovery.attempt():
                _let_back(Path(folder), step, leaves, recovery)
                do_step(model, optimizer, step, fate)
                torch.rand(1)
                history.worlds.append(recovery.world)
                done.append(step)
        layouts = {share.layout for share in recovery._held}
        return Ended(history.worlds, whole(model, optimizer), torch.get_rng_state(), len(layouts), done)


def _let_back(folder: Path, step: int, leaves: Sequence[Leave], recovery: odc.Recovery) -> None:
    """Before the step in which processes are to come back: let them, and wait until they have asked for it."""
    due = [one.place for one in leaves if one.back == step + 1]
    if due and recovery.world < int(os.environ["WORLD_SIZE"]):
        for place in due:
            (folder / f"back.{place}").touch()
        while not recovery._generations.superseded():
            time.sleep(0.01)


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """Weights and moments, gathered. Every rank calls it."""
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": [_gathered(parameter) for parameter in model.parameters()],
        "moments": [_gathered(moment) for moment in moments],
    }


def _gathered(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor()  # type: ignore[no-any-return]


def train_phase(phase: Phase, before: dict[str, list[torch.Tensor]] | None) -> Any:
    """Steps of an ordinary job, from weights and moments of the one before."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model, optimizer = build()
    if before is not None:
        moments = iter(before["moments"])
        for parameter, weight in zip(model.parameters(), before["weights"], strict=True):
            parameter.to_local().detach().copy_(_own(weight))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(phase.first)),
                **{name: _sharded(next(moments), parameter) for name in ("exp_avg", "exp_avg_sq")},
            }
    for step in range(phase.first, phase.last):
        do_step(model, optimizer, step)
    found = whole(model, optimizer)
    odc.shutdown()
    dist.destroy_process_group()
    return found


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, as torch deals it out."""
    chunks = tensor.chunk(dist.get_world_size())
    return chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else tensor[:0]


def _sharded(tensor: torch.Tensor, like: Any) -> Any:
    shape, stride = tensor.shape, tensor.stride()
    local = _own(tensor).clone()
    return DTensor.from_local(local, like.device_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def phases_of(worlds: Sequence[int]) -> list[Phase]:
    found: list[Phase] = []
    for step, world in enumerate(worlds):
        if found and found[-1].world == world:
            found[-1] = found[-1]._replace(last=step + 1)
        else:
            found.append(Phase(world, step, step + 1))
    return found


def in_phases(phases: Sequence[Phase]) -> Any:
    """Weights and moments after one job for each phase."""
    state: Any = None
    for phase in phases:
        state = launch(train_phase, phase, state, ranks=phase.world)[0]
    return state


def run(folder: Path, ranks: int, steps: int, leaves: Sequence[Leave], **options: Any) -> list[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return launch(train, str(folder), steps, tuple(leaves), options, ranks=ranks, restarts=len(leaves))
