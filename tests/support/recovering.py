"""A job that survives deaths, for tests: it trains a small model with dropout, and ranks die at chosen points."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import odc
from odc import Settings, fully_shard
from odc.errors import OdcError
from odc.experiments.launch import launch
from odc.fsdp import _torch_groups
from odc.fsdp.collect import Collector
from odc.fsdp.minibatch import before_done
from odc.memory import driver_memory
from odc.recovery import process_group
from odc.recovery.generations import Generations
from odc.recovery.holdings import Holdings
from odc.recovery.slots import StateSlot
from odc.recovery.state import TrainingState, random_states
from odc.trace import recorder
from support.device import own_device

STEPS, WIDTH = 8, 16
#: How a process ends.
HOW: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "raise": lambda: (_ for _ in ()).throw(ValueError("the tokenizer ran out of words")),
    "hang": lambda: time.sleep(3600.0),
    "late": lambda: time.sleep(3.0),
    "raise as torch": lambda: (_ for _ in ()).throw(RuntimeError("shapes cannot be multiplied")),
}


class Death(NamedTuple):
    """Rank `rank` ends once, at `point` of step `step` (from 0), as `how` says; "late", it goes on, but later."""

    rank: int
    step: int
    point: str
    how: str = "kill"


class Work(NamedTuple):
    """What a step computes. Without `clip` it calls no collective of torch's; `idle` it has no microbatches.

    `tidy`, it collects garbage before it counts what it holds: over hosts a generation leaves cycles of objects. With
    `device` "cuda" ranks share GPUs where there are fewer. `changes` is that of `Settings`.
    """

    clip: bool = True
    width: int = WIDTH
    idle: bool = False
    tidy: bool = False
    device: str = "cpu"
    changes: Any = "auto"


COMMON = Work()


class Counter:
    """What a loop has of its own: microbatches that it has seen."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Fate:
    """Lets this process end where a death is due; each is noted in a file of `folder`, so that it comes once."""

    def __init__(self, rank: int, deaths: Collection[Death], folder: Path) -> None:
        self._rank, self._deaths, self._folder = rank, deaths, folder
        self.step = -1

    def at(self, point: str) -> None:
        for death in self._deaths:
            note = self._folder / f"{death.rank}.{death.step}.{death.point}"
            if (death.rank, death.step, death.point) == (self._rank, self.step, point) and not note.exists():
                note.touch()
                HOW[death.how]()

    def watch(self, owner: Any, name: str, point: str, *, after: bool = False) -> None:
        """Make a method a point."""
        method = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            if not after:
                self.at(point)
            result = method(*args, **options)
            if after:
                self.at(point)
            return result

        setattr(owner, name, called)


def model_of(width: int = WIDTH) -> nn.Sequential:
    """Two blocks, to be units of their own, and parameters of the root's."""
    torch.manual_seed(0)
    inner = width * 3 // 2
    blocks = [
        nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.2), nn.Linear(inner, width)) for _ in range(2)
    ]
    return nn.Sequential(*blocks, nn.LayerNorm(width))


def kill_at_any_moment(folder: Path, mean_s: float, most: int, seed: int) -> None:
    """From now on this process may end at any moment, `mean_s` from here in the mean, until `most` have."""

    def kill() -> None:
        rank, past = int(os.environ["RANK"]), len(list(folder.iterdir()))
        draw = random.Random(f"{seed} {rank} {past}")
        time.sleep(draw.expovariate(1 / mean_s))
        if len(list(folder.iterdir())) < most:
            (folder / f"{rank}.{past}.{time.monotonic_ns()}").touch()
            HOW[draw.choice(("kill", "segfault", "exit"))]()

    threading.Thread(target=kill, daemon=True).start()


def train(
    folder: str,
    deaths: Collection[Death],
    steps: int,
    killed: tuple[float, int, int] | None,
    options: dict[str, Any] | None = None,
    work: Work = COMMON,
) -> dict[str, Any]:
    """The program of a rank; returns what must be equal after any deaths, and what it held after each step.

    `killed` are the arguments of `kill_at_any_moment` after its first. `options` are those of `odc.Recovery`.
    """
    rank, fate = int(os.environ["RANK"]), Fate(int(os.environ["RANK"]), deaths, Path(folder))
    if killed is not None:
        kill_at_any_moment(Path(folder), *killed)
    fate.watch(Collector, "collect", "finish")
    fate.watch(StateSlot, "fill", "keep", after=True)
    fate.watch(TrainingState, "put", "restore", after=True)
    fate.watch(Generations, "enter", "met", after=True)
    fate.watch(Generations, "ready", "ready")
    fate.watch(process_group, "announce_rank", "connect", after=True)
    if any(Path(folder).glob(f"{rank}.*")):
        fate.watch(Holdings, "hold_others", "returned")
    if work.device == "cuda":
        own_device(rank)
        fate.watch(driver_memory, "map_shared", "map")
    with odc.Recovery(**{"rejoin_s": 60, **(options or {})}) as recovery:
        fate.step = recovery.step
        settings = Settings(
            reproducible=True, timeout_s=60, check_protocol=True, changes=work.changes,
            copy_engine_bytes=1,  # on a device: by the copy engine, as pieces of large models go
        )  # fmt: skip
        model: Any = model_of(work.width).to(work.device)
        for block in model[:2]:
            fully_shard(block, settings=settings)
        fully_shard(model, settings=settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule, counter = torch.optim.lr_scheduler.LinearLR(optimizer), Counter()
        torch.manual_seed(100 + rank)
        fate.at("building")
        recovery.protect(model, optimizer, schedule=schedule, counter=counter)
        held = []
        for step in recovery.steps(steps):
            fate.step = step
            with recovery.attempt():
                if work.device == "cuda":
                    _kept()  # steps are short there, and a death in a recovery is due in the step after the kept one
                fate.at("begin")
                _step(model, optimizer, rank, step, fate, work)
                schedule.step()
                counter.seen += _microbatches(rank, step)
            if work.idle:
                _kept()  # at the end a job does not wait until buddies have the last state
            if work.tidy:
                gc.collect()
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count(), _heaps()))
        return {
            "weights": [parameter.to_local().detach().cpu().clone() for parameter in model.parameters()],
            "moments": [state["exp_avg_sq"].to_local().cpu().clone() for state in optimizer.state.values()],
            "random": torch.cat([one for one in random_states().values() if isinstance(one, torch.Tensor)]),
            "seen": counter.seen,
            "held": held,
            "recoveries": recovery.recoveries,
            "cut short": len(_torch_groups._cut_short),
            "spans": recorder().spans(),
        }


def _kept() -> None:
    """Return when buddies have the state of the last step."""
    for wait in before_done:
        wait()


def _microbatches(rank: int, step: int) -> int:
    """Unequal by rank, and none at times."""
    return (rank + step) % 3


def _step(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int, fate: Fate, work: Work) -> None:
    with model.minibatch():
        for _ in range(0 if work.idle else _microbatches(rank, step)):
            loss = model(torch.randn(4, work.width, device=work.device)).square().mean()
            fate.at("forward")
            loss.backward()
            fate.at("backward")
    if work.idle:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    fate.at("collected")
    if work.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # a collective of torch's
    fate.at("clip")
    optimizer.step()
    optimizer.zero_grad()
    fate.at("step")


def _heaps() -> int:
    """Mappings of memory files."""
    return Path("/proc/self/maps").read_text().count("/memfd:odc")


def run(
    folder: Path,
    ranks: int,
    deaths: Collection[Death] = (),
    *,
    steps: int = STEPS,
    restarts: int | None = None,
    killed: tuple[float, int, int] | None = None,
    work: Work = COMMON,
    **options: Any,
) -> Any:
    """The job, and what each rank returned; None if it ended after the last step.

    `killed` is that of `train`; `options` go to `odc.Recovery`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    allowed = len(deaths) if restarts is None else restarts  # no survivor may end
    program = train, str(folder), tuple(deaths), steps, killed, options, work
    return launch(unless_over, *program, ranks=ranks, restarts=allowed)


def unless_over(entry: Callable[..., Any], *arguments: Any) -> Any:
    """What a rank's program returns; None in one that takes a place when the job has kept its last step."""
    try:
        return entry(*arguments)
    except OdcError as error:
        if "the job has kept its last step, and is over" not in str(error):
            raise
        return None


def unequal(found: list[dict[str, Any] | None], reference: list[dict[str, Any]]) -> list[str]:
    """What of two jobs is not equal to the bit, of the ranks that did not end after the first one's last step."""
    wrong = [] if any(one is not None for one in found) else ["no rank was there at the end"]
    for rank, (mine, theirs) in enumerate(zip(found, reference, strict=True)):
        if mine is None:
            continue
        for name in ("weights", "moments"):
            pairs = zip(mine[name], theirs[name], strict=True)
            wrong += [f"rank {rank}: {name} {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        if not torch.equal(mine["random"], theirs["random"]) or mine["seen"] != theirs["seen"]:
            wrong.append(f"rank {rank}: random numbers or place in the data")
    return wrong


if __name__ == "__main__":  # under torchrun: FOLDER OUTPUT, then RANK.STEP.POINT of each death
    torch.set_num_threads(1)
    given = [one.split(".") for one in sys.argv[3:]]
    found = train(sys.argv[1], [Death(int(rank), int(step), point) for rank, step, point in given], STEPS, None)
    torch.save(found, f"{sys.argv[2]}/{os.environ['RANK']}.pt")
