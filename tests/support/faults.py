"""A fault that befalls a job at a chosen moment: its description, and the job's program.

The culprit does the fault to itself in its third step (`STEP`), or while it sets up or shuts down. A fault of the
moment "any" comes from outside, once every rank has reported that it trains.
"""

from __future__ import annotations

import itertools
import multiprocessing.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

import odc
from odc import Settings, fully_shard
from odc.fsdp import hooks
from odc.protocol.push import HostRoute
from odc.runtime import Member, Rendezvous, daemon
from support.failing import STEPS, backward, until_watched
from support.models import Case, build, tokens
from support.rank_worker import die, report

STEP = 2  # the one that the fault comes in
DEADLINE_S = 30.0  # of a job in which a rank hangs
ERROR = "the tokenizer ran out of words"

Moment = Literal[
    "before_fully_shard", "after_fully_shard", "announce", "connect", "forward", "backward", "push", "finish",
    "step", "between_minibatches", "evaluation", "shutdown", "any",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens to a job of `world` ranks, and what follows.

    Attributes:
        who: a rank, its server daemon, or all ranks of a host.
        how: a key of `HOW`. At the moment "any", and to a host, the test does it from outside.
        culprit: the rank, or the number of the host.
        says: a pattern in what every other rank raises; empty where no rank is blamed.
        hosts: over which the ranks are spread.
        replicas: the mesh is of two replicas.
        loader: when worker processes of a DataLoader are forked: before or after the ranks have heaps.
        quick: whether `make test` shows it.
    """

    who: Literal["rank", "daemon", "host"]
    how: str
    when: Moment
    says: str
    culprit: int = 1
    world: int = 3
    hosts: int = 1
    replicas: bool = False
    loader: Literal["", "before", "after"] = ""
    quick: bool = False

    def __str__(self) -> str:
        spread = f"-{self.hosts}hosts" * (self.hosts > 1) + "-replicas" * self.replicas
        return f"{self.who}{self.culprit}-{self.how}-{self.when}{spread}" + f"-loader_{self.loader}" * bool(self.loader)

    @property
    def hangs(self) -> bool:
        """Whether nothing but a deadline shows it."""
        return self.how == "stop" or self.when == "before_fully_shard"

    @property
    def ranks(self) -> range:
        """Those that fail."""
        here = self.world // self.hosts if self.who == "host" else 1
        return range(self.culprit * here, (self.culprit + 1) * here)

    @property
    def others(self) -> list[int]:
        """Those that have to end with the culprit's name; of a host that is cut off, its own ranks too."""
        spared = range(0) if (self.how, self.when) == ("cut", "any") else self.ranks
        return [rank for rank in range(self.world) if rank not in spared]

    @property
    def ends_itself(self) -> bool:
        """Whether it matters how the interpreter ends, to the last module."""
        return "raise" in self.how or "exit" in self.how or "_it" in self.how

    @property
    def settings(self) -> Settings:
        return Settings(timeout_s=DEADLINE_S if self.hangs and self.when != "any" else 600.0)


def stop() -> None:
    report(time.monotonic())
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_it() -> None:
    report(time.monotonic())
    raise ValueError(ERROR)


def exit_with_it() -> None:
    """What many launchers and applications do."""
    try:
        raise_it()
    except ValueError:
        sys.exit(1)


def shut_down_with_it() -> None:
    try:
        raise_it()
    finally:
        odc.shutdown()


def end_a_child_with_it() -> None:
    """What the body of a process of `multiprocessing` does around its function."""
    multiprocessing.util.Finalize(None, hooks._child_ends, exitpriority=100)
    try:
        raise_it()
    finally:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def show_it_and_go_on() -> None:
    """What a test runner and an interactive session do: the process ends in good order later."""
    try:
        raise_it()
    except ValueError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    odc.shutdown()
    os._exit(0)


def exit_only() -> None:
    report(time.monotonic())
    sys.exit(3)


def leave() -> None:
    report(time.monotonic())
    odc.shutdown()
    os._exit(0)


def hold() -> None:
    report(time.monotonic())
    time.sleep(10_000)


def raise_in_daemon() -> None:
    def fail() -> None:
        raise RuntimeError(ERROR)

    report(time.monotonic())
    daemon(dist.get_rank())._reactor.call(fail)


HOW: dict[str, Callable[[], None]] = {
    "kill": die, "stop": stop, "raise": raise_it, "exit_with_it": exit_with_it, "exit_only": exit_only,
    "shut_down_with_it": shut_down_with_it, "end_a_child_with_it": end_a_child_with_it,
    "show_it_and_go_on": show_it_and_go_on, "leave": leave, "cut": hold, "raise_in_daemon": raise_in_daemon,
}  # fmt: skip


class Endless(IterableDataset[int]):
    """Data whose loader's worker, a forked child of the rank, outlives the rank for some seconds."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Script:
    """Does the fault, in the rank that is the culprit, when the program reaches its moment."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self._fault, self._mine, self.step = fault, rank in fault.ranks and fault.when != "any", STEP

    def at(self, moment: Moment) -> None:
        if self._mine and moment == self._fault.when and (self.step == STEP or moment in ("announce", "connect")):
            HOW[self._fault.how]()

    def before(self, owner: type, method: str, moment: Moment) -> None:
        """Reach `moment` just before a method is called. For ranks that end here: nothing puts the method back."""
        called = getattr(owner, method)

        def watched(*args: Any, **options: Any) -> Any:
            self.at(moment)
            return called(*args, **options)

        if self._mine and self._fault.when == moment:
            setattr(owner, method, watched)


def train(rank: int, world: int, fault: Fault, steps: int = STEPS) -> None:
    """Train with unequal counts, with an evaluation after every step, and shut down after the last."""
    torch.manual_seed(0)
    script = Script(fault, rank)
    loader = DataLoader(Endless(), num_workers=1) if fault.loader else ()
    batches = iter(loader) if fault.loader == "before" else iter(())
    script.at("before_fully_shard")
    script.before(Member, "announce", "announce")
    script.before(Rendezvous, "connect", "connect")
    script.before(HostRoute, "push_to", "push")
    shape, names = ((2, world // 2), ("outer", "inner")) if fault.replicas else ((world,), ("all",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model: Any = build(fully_shard, Case(counts=((1,) * world,)), mesh, settings=fault.settings)
    # Not foreach: torch would work out for seconds how DTensors are laid out, and no rank learns of a death meanwhile.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    if fault.hosts > 1:
        until_watched(world)
        dist.barrier()  # a neighbour that has ended already is not waited for
    script.at("after_fully_shard")
    model.layers[1].register_forward_pre_hook(lambda *unused: script.at("forward"))
    model.layers[1].register_full_backward_pre_hook(lambda *unused: script.at("backward"))
    optimizer.register_step_pre_hook(lambda *unused: script.at("step"))
    for step in range(steps):
        script.step = step
        script.at("between_minibatches")
        with model.minibatch():
            for i in range(max((rank + step) % 3, step == STEP)):  # each has a microbatch to fail in
                backward(model, rank, step, i)
            script.at("finish")
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens(rank, step, 7))
        script.at("evaluation")
        if step == 1:
            batches = iter(loader) if fault.loader == "after" else batches
            next(batches, None)
            report("trains")
    script.step = STEP
    dist.barrier()  # no rank is in the midst of a minibatch
    script.at("shutdown")
    odc.shutdown()
