"""One member's state machine without torch's modules, for tests that call it one step at a time."""

from __future__ import annotations

import torch
from torch import nn

from odc.fsdp.minibatch import Minibatch
from odc.fsdp.sender import Sender
from odc.protocol import Gradient, RootState, Word
from support.members import F32, HeapGroup

LAYOUT = [[("w", 4, F32), ("b", 2, F32)], [("v", 3, F32)]]


class Param:
    """Stands in for a sharded parameter."""

    own_dtype = gradient_dtype = F32

    def __init__(self, numel: int) -> None:
        self.values = torch.zeros(numel)
        self.numel = numel
        self.parameter = nn.Parameter(torch.zeros(1))
        self.grad: torch.Tensor | None = None

    def shard(self) -> torch.Tensor:
        return self.values

    def add_gradient(self, flat: torch.Tensor, first: int) -> None:
        self.grad = flat[first : first + self.numel].clone()


class Group:
    """Stands in for a parameter group."""

    gradient_divide_factor: float | None = None
    odc_fills_unused = False

    def __init__(self, numels: list[int]) -> None:
        self.odc_params = [Param(numel) for numel in numels]
        self.calls: list[str] = []

    def drop_fetch(self) -> None:
        self.calls.append("drop")


class Iteration:
    """Stands in for what torch keeps of an iteration."""

    def __init__(self) -> None:
        self.resets = 0
        self.cut_short: str | None = None  # what an exception has ended: "forward" or "backward"
        self.marked_last = True  # the backward that it has ended

    def is_last_backward(self) -> bool:
        return False

    def post_optim_event(self) -> None:
        return None

    def backward_cut_short(self) -> bool:
        return self.cut_short == "backward"

    def cut_short_last(self) -> bool:
        return self.marked_last

    def forward_cut_short(self) -> bool:
        return self.cut_short == "forward"

    def reset(self, groups: list[Group]) -> None:
        self.resets += 1
        self.cut_short = None


class Rank:
    """One member's state machine, with groups that only listen."""

    def __init__(self, group: HeapGroup, me: int) -> None:
        self.heaps, self.me = group, me
        self.groups = [Group([numel for _, numel, _ in unit]) for unit in LAYOUT]
        member = group.members[me]
        self.sender, self.iteration = Sender(member.pusher, overlap=False), Iteration()
        self.machine = Minibatch(member, self.sender, self.groups, self.iteration)  # type: ignore[arg-type]

    def push(self, unit: int, value: float, params: tuple[int, ...] | None = None) -> None:
        spec, shards = self.heaps.units[unit], self.heaps.members[self.me].grid.shards
        chosen = range(len(spec.params)) if params is None else params
        self.machine.push(spec, [Gradient(i, torch.full((shards * spec.params[i].numel,), value)) for i in chosen])

    def grads(self) -> list[list[float] | None]:
        found = [p.grad for group in self.groups for p in group.odc_params]
        for group in self.groups:
            for param in group.odc_params:
                param.grad = None
        return [None if grad is None else grad.tolist() for grad in found]


def finish(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.machine.done()
    for rank in ranks:
        rank.machine.collect()


def states(ranks: list[Rank]) -> list[RootState]:
    on_board = [RootState(rank.heaps.layouts[0].peer(rank.me).board.load(Word.STATE)) for rank in ranks]
    assert on_board == [rank.machine.state for rank in ranks], "`odc status` would show something else"
    return on_board
