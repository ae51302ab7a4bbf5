"""The idea of odc in one file: a minibatch of several ranks, on plain tensors, in one process. Nothing imports it.

Each rank owns one row of every unit (a square matrix, one row a rank) and its optimizer steps that row alone, as under
FSDP. Unlike under FSDP no rank calls a collective. A rank *fetches* the rows of its peers when it needs them and
*pushes* each row of a gradient to the rank that owns it, so ranks may compute different numbers of microbatches, at
their own pace. They meet once, at the end of the minibatch.

Ranks are generators here. Each yields a condition where odc would poll a word of shared memory, and `run` resumes any
rank whose condition holds. What real ranks add to this file: memory that processes share, a daemon thread for `serve`,
threads that fetch ahead and push behind, deadlines, and the deaths of ranks. `protocol.py` has the same words in the
same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

Condition = Callable[[], bool]
Steps = Generator[Condition, None, None]
SLOTS = 2  # of the staging ring between two ranks: the memory that a push may take up


@dataclass(frozen=True)
class PushedRow:
    """One pushed row of a gradient: of which unit it is, and its values, 1-D [width]."""

    unit: int
    values: torch.Tensor


class ToyRank:
    """What one rank holds. Others read `published` and the words, and fill `rings`; the rest is the rank's alone."""

    def __init__(self, me: int, world: int, weights: Sequence[torch.Tensor]) -> None:
        self.me = me
        self.shard = [weight[me].clone() for weight in weights]  # what the optimizer steps
        self.published = [torch.empty_like(row) for row in self.shard]  # a copy of it, which peers may read
        self.sums = [torch.zeros_like(row) for row in self.shard]  # the gradients that all ranks push to this one
        self.rings: list[list[PushedRow | None]] = [[None] * SLOTS for _ in range(world)]  # one ring for each pusher
        # The words. Each has one writer, and none ever falls.
        self.epoch = 0  # PUBLISHED: the newest minibatch whose rows can be fetched, and pushed to
        self.done = 0  # DONE: the newest minibatch in which this rank will neither fetch nor push any more
        self.sent = [0] * world  # SENT: blocks that each peer has posted here; the peer writes it
        self.accumulated = [0] * world  # ACCUMULATED: those of them that have been added, whose slots are free again


def begin(rank: ToyRank, ranks: Sequence[ToyRank]) -> Steps:
    """Publish this rank's rows, once no rank reads the last ones any more."""
    epoch = rank.epoch
    yield lambda: all(peer.done >= epoch for peer in ranks)
    for unit, row in enumerate(rank.shard):
        rank.published[unit].copy_(row)
        rank.sums[unit].zero_()
    rank.epoch = epoch + 1  # last: a rank that sees it finds the new rows, and empty sums


def begun(owner: ToyRank, epoch: int) -> Condition:
    """The owner has begun this minibatch too."""
    return lambda: owner.epoch >= epoch


def slot_free(owner: ToyRank, source: int) -> Condition:
    """The ring from `source` to the owner has room for a block."""
    return lambda: owner.sent[source] - owner.accumulated[source] < SLOTS


def fetch(rank: ToyRank, ranks: Sequence[ToyRank], unit: int) -> Generator[Condition, None, torch.Tensor]:
    """The whole matrix of one unit, row after row out of the memory of its owners, which take no part in it."""
    rows = []
    for owner in ranks:
        yield begun(owner, rank.epoch)
        rows.append(owner.published[unit].clone())
    return torch.stack(rows).requires_grad_()


def push(rank: ToyRank, ranks: Sequence[ToyRank], unit: int, gradient: torch.Tensor) -> Steps:
    """Post each row of a gradient to its owner; return before it is added."""
    for owner, row in zip(ranks, gradient, strict=True):
        yield begun(owner, rank.epoch)  # so its sums are empty
        if owner is rank:
            rank.sums[unit] += row
            continue
        posted = owner.sent[rank.me]
        yield slot_free(owner, rank.me)
        owner.rings[rank.me][posted % SLOTS] = PushedRow(unit, row)
        owner.sent[rank.me] = posted + 1  # after the block is in its slot


def serve(rank: ToyRank) -> Steps:
    """The daemon of a rank: add what peers have posted. It waits for no rank, so no ring stays full."""
    while True:
        yield lambda: rank.sent != rank.accumulated
        for source, ring in enumerate(rank.rings):
            if rank.accumulated[source] < rank.sent[source]:
                block = ring[rank.accumulated[source] % SLOTS]
                assert block is not None
                rank.sums[block.unit] += block.values
                rank.accumulated[source] += 1  # after the addition: the pusher may fill the slot again


def finish(rank: ToyRank, ranks: Sequence[ToyRank]) -> Steps:
    """The only wait for all ranks. Afterwards `rank.sums` holds the gradients of all microbatches of all ranks."""
    rank.done = rank.epoch  # after this rank's last fetch and push
    yield lambda: all(peer.done >= rank.epoch for peer in ranks)
    yield lambda: rank.accumulated == rank.sent  # which is final, as every pusher is done


def minibatch(rank: ToyRank, ranks: Sequence[ToyRank], inputs: Sequence[torch.Tensor], learning_rate: float) -> Steps:
    """One training step of one rank, on its own microbatches, each [samples, width]; there may be none."""
    yield from begin(rank, ranks)
    for x in inputs:
        weights: list[torch.Tensor] = []
        for unit in range(len(rank.shard)):
            weights.append((yield from fetch(rank, ranks, unit)))
            x = torch.tanh(x @ weights[-1])
        gradients = torch.autograd.grad(x.square().sum(), weights)
        for unit in reversed(range(len(weights))):
            yield from push(rank, ranks, unit, gradients[unit])
    yield from finish(rank, ranks)
    for row, total in zip(rank.shard, rank.sums, strict=True):
        row -= learning_rate * total


def run(ranks: Sequence[ToyRank], steps: Sequence[Steps], order: random.Random) -> Iterator[int]:
    """Resume ranks and daemons in a random order until all `steps` have ended; yields which program ran.

    Raises RuntimeError where each of them waits: a deadlock.
    """
    programs = [*steps, *map(serve, ranks)]
    waits: dict[int, Condition] = {number: next(program) for number, program in enumerate(programs)}
    while any(number < len(steps) for number in waits):
        ready = [number for number, condition in waits.items() if condition()]
        if not ready:
            raise RuntimeError(f"programs {sorted(waits)} wait for one another")
        number = order.choice(ready)
        yield number
        condition = next(programs[number], None)
        if condition is None:
            del waits[number]
        else:
            waits[number] = condition


def train(weights: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], seed: int) -> list[torch.Tensor]:
    """Two minibatches over `inputs`, by rank, in the order that `seed` draws; returns the trained weights."""
    ranks = [ToyRank(me, len(inputs), weights) for me in range(len(inputs))]

    def two_steps(rank: ToyRank) -> Steps:
        for _ in range(2):  # a fast rank begins the second while a slow one still waits at the end of the first
            yield from minibatch(rank, ranks, inputs[rank.me], learning_rate=0.1)

    for _ in run(ranks, [two_steps(rank) for rank in ranks], random.Random(seed)):
        pass
    return [torch.stack([rank.shard[unit] for rank in ranks]) for unit in range(len(weights))]
