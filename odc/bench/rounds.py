"""Timing actions on every rank at once, in turn with what they are measured against.

Chose rounds in which each action runs once after a meeting of all ranks, and of each round the slowest rank's time: a
collective and a one-sided copy are then the same question ("until every rank has its bytes"), and a machine that slows
down for a second slows all of them alike. The price is a meeting before every action (not timed).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from odc.bench.crew import meet


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Action:
    """Something to time.

    Args:
        name: for tables; unique among the actions of a case.
        run: does it `times` times; on CUDA it may return before the device is done.
        nbytes: that one time moves to or from this rank, 0 where bytes mean nothing.
        against: names of the actions it is measured against; empty for those themselves.
        times: how often `run` does it.
        after: undoes it, not timed.
    """

    name: str
    run: Callable[[], object]
    nbytes: int = 0
    against: tuple[str, ...] = ()
    times: int = 1
    after: Callable[[], object] = nothing


@dataclass(frozen=True)
class Timed:
    """Seconds of one action, round after round; of one time, wherever `run` did several."""

    name: str
    nbytes: int
    against: tuple[str, ...]
    seconds: list[float]


Prepare = Callable[[int, str], list[Action]]


def measure(prepare: Prepare, nbytes: int, device: str, rounds: int, warm: int) -> list[Timed]:
    """Run the actions of `prepare(nbytes, device)` for `warm + rounds` rounds; on every rank at the same time."""
    actions = prepare(nbytes, device)
    settle: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else nothing
    seconds: list[list[float]] = [[] for _ in actions]
    for turn in range(warm + rounds):
        for action, taken in zip(actions, seconds, strict=True):
            settle()
            meet()
            begin = time.perf_counter()
            action.run()
            settle()
            took = time.perf_counter() - begin
            action.after()
            if turn >= warm:
                taken.append(took / action.times)
    return [Timed(a.name, a.nbytes, a.against, taken) for a, taken in zip(actions, seconds, strict=True)]


def slowest(ranks: Sequence[list[Timed]]) -> list[Timed]:
    """The same actions with each round's slowest rank."""
    return [
        replace(first, seconds=[max(round_) for round_ in zip(*(one.seconds for one in (first, *others)), strict=True)])
        for first, *others in zip(*ranks, strict=True)
    ]
