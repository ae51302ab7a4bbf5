"""What odc costs the processor on CUDA, without a device: what it asks for is dropped, *measured* over a stand-in.

Run as `OMP_NUM_THREADS=1 python -m bench.stand_in --results bench/results`, in an environment with triton.

Eight members in one process, with the units of a model's config: each layer, the embedding, and the root with the rest.
The protocol, the rings, the daemons' services, the movers and their plans are real, and so is triton up to its
launcher, which with the driver is a stand-in: it counts what is asked for and returns at once. So the time of CUDA's
driver is in no figure, nor torch's for streams, events and allocations; `odc bench --only host` has them on a device.
All memory is reserved and never touched.

"fetch", "push" and "drain" are of one layer: a drain adds what all seven peers have pushed of it. "publish" and "stale
check" are of the whole model, and a drain waits for no device. Each call follows other work, so that the processor's
caches hold little of what it needs. "bar" is what a call may take at most.
"""

from __future__ import annotations

import gc
import mmap
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from bench.script import Script
from odc.bench.alone import OWNERS, Members, UnitCalls
from odc.blocks import blocks_of
from odc.doctor.ledger import model_of, regions_of
from odc.fsdp.stale import StaleCheck
from odc.memory import HostLanes, driver_calls
from odc.movers import driver
from odc.protocol import UnitSpec, layout
from odc.settings import Settings
from odc.simulate.catalog import config_named

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]  # triton's driver is the stand-in of the tests

CPU = torch.device("cpu")
#: Microseconds that a call may take at most, by its name.
BARS = {"fetch": 100, "push": 150, "drain": 60, "publish": 1500}


class CountingLanes(HostLanes):
    """Lanes of a device whose work is over as soon as it was asked for; waits are counted."""

    asynchronous = True

    def __init__(self, asked: Counter[str]) -> None:
        self._asked = asked

    def settle(self) -> None:
        self._asked["waits"] += 1


@contextmanager
def no_device() -> Iterator[Counter[str]]:
    """Let kernels and copies on memory of the CPU be asked for inside the block, and count them; nothing happens.

    Triton keeps the stand-in until the process ends.
    """
    from support.triton_driver import StandInDriver, StandInUtils, use

    from odc.movers.compiled import CompiledMover

    asked: Counter[str] = Counter()

    class Launcher:
        def __init__(self, *_: object) -> None: ...

        def __call__(self, *_: object) -> None:
            asked["launches"] += 1

    class Driver(StandInDriver):
        utils, launcher_cls = StandInUtils(), Launcher

    def batch(*_: object) -> int:
        asked["batches"] += 1
        return 0

    def memset(*_: object) -> tuple[int]:
        asked["memsets"] += 1
        return (0,)

    stream = SimpleNamespace(cuda_stream=5, query=lambda: True)
    use(Driver())
    with ExitStack() as patches:
        for module, name, made in (
            (torch.cuda, "device", lambda _: nullcontext()),
            (torch.cuda, "current_stream", lambda *_: stream),
            (driver, "_batch_function", lambda: batch),
            (driver_calls, "bindings", lambda: SimpleNamespace(cuMemsetD32Async=memset)),
            (layout, "mover_for", lambda settings, _, own: CompiledMover(own, settings.copy_engine_bytes)),
        ):
            patches.enter_context(patch.object(module, name, made))
        yield asked


def untouched(nbytes: int) -> torch.Tensor:
    """uint8 [bytes], zeros: addresses without memory behind them, until they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(64, nbytes), flags), dtype=torch.uint8)[:nbytes]


def units_of(model: str, owners: int) -> Sequence[UnitSpec]:
    """Of a model's config: each layer, the embedding, and the root with the rest."""
    built = model_of(config_named(model))
    embedding = next(one for one in built.modules() if isinstance(one, nn.Embedding))
    return regions_of(built, [*blocks_of(built), embedding], owners, 1, Settings(), True).units


@dataclass
class Timed:
    """Calls of one kind: what each took, and what one asked for."""

    asked: Counter[str]
    seconds: list[float] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)

    def call(self, run: Callable[[], object], count: bool) -> None:
        before, begin = self.asked.copy(), time.perf_counter()
        run()
        self.seconds.append(time.perf_counter() - begin)
        if count:
            self.found = dict(self.asked - before)

    def row(self, name: str, bar: int | None) -> dict[str, Any]:
        took = [second * 1e6 for second in self.seconds]
        columns = {kind: self.found.get(kind, 0) for kind in ("launches", "batches", "memsets", "waits")}
        return {"call": name, "least, us": min(took), "median, us": median(took), "bar, us": bar or "", **columns}


def measure(members: Members, asked: Counter[str], rounds: int) -> list[dict[str, Any]]:
    """Rounds of all calls, one after the other."""
    every = [UnitCalls(members, me) for me in range(len(members.endpoints))]
    first, service, published = every[0], members.services[0], members.endpoints[0].shards
    units, stale = len(members.layouts[0].units), StaleCheck(members.layouts[0])
    names = ["fetch", "fetch into new memory", "push", "drain", "publish", "stale check"]
    timed = {name: Timed(asked) for name in names}
    gc.collect()
    gc.disable()
    for number in range(rounds):
        last, fresh = number == rounds - 1, first.place()
        timed["fetch"].call(first.fetch, last)
        timed["fetch into new memory"].call(lambda fresh=fresh: first.fetch(fresh), last)
        timed["push"].call(first.push, last)
        for calls in every[1:]:
            calls.push()
        timed["drain"].call(service.drain, last)
        members.drain()
    for number in range(rounds // 10):
        last = number == rounds // 10 - 1
        for endpoint in members.endpoints[1:]:
            endpoint.shards.publish(members.shards, [False] * units)
        timed["publish"].call(lambda: published.publish(members.shards, [True] * units), last)
        timed["stale check"].call(lambda: stale.compare(1, members.shards, now=False), last)
    gc.enable()
    return [one.row(name, BARS.get(name)) for name, one in timed.items()]


def main() -> None:
    script = Script(
        __doc__, model=("qwen2.5-7b", "a name that `odc simulate` knows, or a config"), rounds=(400, "of calls")
    )
    given = script.given
    with no_device() as asked:
        lanes = CountingLanes(asked)
        members = Members(CPU, lambda _: lanes, Settings(), OWNERS, units_of(given.model, OWNERS), untouched)
        members.publish()
        rows = measure(members, asked, given.rounds)
        unit, units = members.unit, len(members.layouts[0].units)
        members.close()
    what = {
        "unit": f"{unit.name}: {len(unit.params)} parameters, {OWNERS * unit.published_bytes / 1e6:.0f} MB",
        "units": units,
        "owners": OWNERS,
    }
    script.store("stand_in", f"Host time on CUDA of {given.model}, over a stand-in for the device", rows, **what)


if __name__ == "__main__":
    main()
