"""Timing actions on every rank at once, in turn with what they are measured against.

In each round every action runs once after an untimed barrier of all ranks, and the slowest rank's time counts.

On CUDA an action that only enqueues work has a second time, the device's: a kernel that spins holds the device back
until everything is enqueued, and events are recorded around it. Ranks that share a device take turns on it, which only
the first time shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from odc.bench.ranks import meet


@dataclass(frozen=True)
class Action:
    """Something to time."""

    name: str  # for tables; unique among the actions of a case
    run: Callable[[], object]  # repeats the action `times` times; on CUDA it may return before the device is done
    nbytes: int = 0  # moved to or from this rank by one repetition, 0 where bytes mean nothing
    against: tuple[str, ...] = ()  # names of the actions it is measured against; empty for those themselves
    times: int = 1
    after: Callable[[], object] = lambda: None  # undoes it, not timed
    limit: bool = False  # nothing that does the same could be faster, such as a plain copy
    queued: bool = False  # on CUDA `run` does not wait, so the device's time is taken too
    most: int | None = None  # rounds at most, for slow baselines
    optional: bool = False  # it may raise here, and is then left out with the reason


@dataclass(frozen=True)
class Timed:
    """Seconds of one repetition of an action, by round."""

    name: str
    nbytes: int
    against: tuple[str, ...]
    seconds: list[float]
    device_seconds: list[float] = field(default_factory=list)  # by the device's clock; empty where not taken
    host_seconds: list[float] = field(default_factory=list)  # until the call returned, where the device goes on
    limit: bool = False
    refused: str = ""  # why it could not be done here; then there are no seconds


Prepare = Callable[[int, str], list[Action]]


def measure(prepare: Prepare, nbytes: int, device: str, rounds: int, warm: int) -> list[Timed]:
    """Runs the actions of `prepare(nbytes, device)` for `warm + rounds` rounds. Called on every rank at once."""
    actions = prepare(nbytes, device)
    timed = [Timed(a.name, a.nbytes, a.against, [], limit=a.limit) for a in actions]
    for turn in range(warm + rounds):
        for i, action in enumerate(actions):
            if timed[i].refused or turn >= warm + (action.most or rounds):
                continue
            try:
                took, asked = _wall(action, device)
            except Exception as error:
                if not action.optional:
                    raise
                timed[i] = replace(timed[i], seconds=[], refused=f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            on_device = _on_device(action, asked) if device == "cuda" and action.queued else None
            if turn >= warm:
                timed[i].seconds.append(took / action.times)
                timed[i].device_seconds.extend([] if on_device is None else [on_device / action.times])
                timed[i].host_seconds.extend([] if on_device is None else [asked / action.times])
    return timed


def _wall(action: Action, device: str) -> tuple[float, float]:
    """Seconds until an action is done, and until it was enqueued."""
    _settle(device)
    meet()
    begin = time.perf_counter()
    action.run()
    asked = time.perf_counter() - begin
    _settle(device)
    took = time.perf_counter() - begin
    action.after()
    return took, asked


_CYCLES_A_SECOND = 2e9  # at least: a device with a slower clock is only held back for longer


def _on_device(action: Action, asked: float) -> float:
    """Seconds on the device of an action that takes the processor `asked` seconds to enqueue."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _settle("cuda")
    meet()
    torch.cuda._sleep(int((2 * asked + 1e-4) * _CYCLES_A_SECOND))
    begin.record()
    action.run()
    end.record()
    _settle("cuda")
    action.after()
    return float(begin.elapsed_time(end)) / 1e3


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def slowest(ranks: Sequence[list[Timed]]) -> list[Timed]:
    """The same actions with the slowest rank's time of each round."""

    def most(rounds: Iterable[list[float]]) -> list[float]:
        return [max(round_) for round_ in zip(*rounds, strict=True)]

    return [
        replace(
            same[0],
            seconds=most(one.seconds for one in same),
            device_seconds=most(one.device_seconds for one in same),
            host_seconds=most(one.host_seconds for one in same),
        )
        for same in zip(*ranks, strict=True)
    ]
