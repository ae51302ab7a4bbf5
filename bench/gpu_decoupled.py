"""Whether a rank on a GPU waits for another's compute: `bench.decoupled` with a real device in the place of threads.

Run as `OMP_NUM_THREADS=1 python -m bench.gpu_decoupled --results bench/results`. Everything is *measured*; compute is
`torch.cuda._sleep`, which occupies one multiprocessor for a time. Two ranks share a device where there is one. The
fast rank runs three microbatches of 28 units and pushes each unit's gradient, half of it to its peer; the time runs
from its first forward until all is posted. The peer meanwhile

* "computes": has units of `--owner-ms` in its backward,
* "idle, device shared": has ended its microbatch; a third process computes as long, which knows nothing of odc,
* "idle": has ended its microbatch, and the device is the fast rank's.

Processes that share a device without MPS take turns on it, which odc cannot change: the second is the baseline there.
With a device each the third is, and there is no second. "times_baseline" is the median over rounds of a way's time over
the baseline's. "status" is how long all ranks together take to answer `odc status` while the peer computes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.script import Script
from odc import Settings, fully_shard
from odc.bench.ranks import RankPool, held, meet
from odc.fsdp import root_of
from odc.runtime.daemon import ask_all

FAST, OWNER = 0, 1
UNITS, MICROBATCHES, WIDTH = 28, 3, 1024
COMPUTES, SHARED, IDLE = "computes", "idle, device shared", "idle"
_CALIBRATION = 20_000_000  # cycles


class _Busy(torch.autograd.Function):
    """Nothing in forward; so many cycles of the device in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.cycles:
            torch.cuda._sleep(ctx.cycles)
        return gradients[0].clone(), None


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cycles = nn.Linear(WIDTH, WIDTH, bias=False), 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Busy.apply(self.linear(value), self.cycles)  # type: ignore[no-untyped-call, no-any-return]


def build() -> None:
    """The model of this rank, in `held`, after a minibatch that compiles and connects."""
    held.device = torch.device("cuda", torch.cuda.current_device())
    held.units = [Unit().to(held.device) for _ in range(UNITS)]
    held.model = nn.Sequential(*held.units)
    mesh = init_device_mesh("cuda", (2,))
    for module in (*held.units, held.model):
        fully_shard(module, mesh=mesh, settings=Settings(timeout_s=60.0))
    rounds(0.0, 1)


def rounds(unit_s: float, microbatches: int) -> float:
    """A minibatch of so many microbatches, with units of `unit_s` in backward; seconds until all was posted."""
    cycles = cycles_of(unit_s) if unit_s else 0
    for unit in held.units:
        unit.cycles = cycles
    meet()
    begin = time.perf_counter()
    with held.model.minibatch():
        for _ in range(microbatches):
            held.model(torch.ones(8, WIDTH, device=held.device)).sum().backward()
        root_of(held.model).sender.flush()
        took = time.perf_counter() - begin
    held.model.zero_grad()
    return took


def baseline(devices: int) -> str:
    """What the times are held against: a device that is shared is taken from the fast rank for half of the time."""
    return SHARED if devices == 1 else IDLE


def pushed(pool: RankPool, other: Occupant, way: str, fast_s: float, owner_s: float) -> float:
    """Seconds in which the fast rank has posted everything."""
    with other.computing() if way == SHARED else contextlib.nullcontext():
        pool.start(rounds, owner_s if way == COMPUTES else 0.0, 1)
        took = rounds(fast_s, MICROBATCHES)
        pool.finish()
    return took


def cycles_of(seconds: float) -> int:
    """Cycles of `torch.cuda._sleep`, measured."""
    for _ in range(2):  # the first one loads the kernel
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(_CALIBRATION)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
    return int(seconds * _CALIBRATION / took)


class Occupant:
    """A process that computes on the device when it is told to, and knows nothing of odc. A context manager."""

    def __init__(self, unit_s: float) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._go, self._busy = spawn.Event(), spawn.Event()
        self._process = spawn.Process(target=_occupy, args=(self._go, self._busy, unit_s), daemon=True)

    def __enter__(self) -> Occupant:
        self._process.start()
        return self

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        self._go.set()
        if not self._busy.wait(60):
            raise SystemExit("bench.gpu_decoupled: the process that is to occupy the device does not begin")
        try:
            yield
        finally:
            self._go.clear()
            while self._busy.is_set():
                time.sleep(0.001)

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.join()


def _occupy(go: Any, busy: Any, unit_s: float) -> None:
    """Compute one unit after the other, never more than two ahead."""
    cycles, before = cycles_of(unit_s), torch.cuda.Event()
    while True:
        go.wait()
        while go.is_set():
            torch.cuda._sleep(cycles)
            busy.set()
            before.synchronize()
            before.record()
        torch.cuda.synchronize()
        busy.clear()


def answers(pool: RankPool, owner_s: float) -> list[float]:
    """Seconds of each answer while the owner computes a microbatch."""
    pool.start(rounds, owner_s, 1)
    meet()
    found = []
    with held.model.minibatch():
        end = time.perf_counter() + 0.6 * UNITS * owner_s
        while time.perf_counter() < end:
            begin = time.perf_counter()
            if len(ask_all()) != pool.world:
                raise SystemExit("bench.gpu_decoupled: a rank did not answer")
            found.append(time.perf_counter() - begin)
            time.sleep(0.02)
    pool.finish()
    held.model.zero_grad()
    return found


def main() -> None:
    script = Script(
        __doc__,
        rounds=(5, "of each way"),
        fast_ms=(10, "of a unit of the fast rank"),
        owner_ms=(120, "of a unit of its busy owner"),
    )
    given = script.given
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu_decoupled: no CUDA device here (see `odc doctor`)")
    fast_s, owner_s = given.fast_ms / 1e3, given.owner_ms / 1e3
    base = baseline(torch.cuda.device_count())
    times: dict[str, list[float]] = {way: [] for way in dict.fromkeys((IDLE, base, COMPUTES))}
    rows = list[dict[str, Any]]()
    with RankPool(2, 120.0, "cuda") as pool, Occupant(owner_s) as other:
        pool.each(build)
        for _ in range(given.rounds):
            for way, taken in times.items():
                taken.append(pushed(pool, other, way, fast_s, owner_s))
        waits = answers(pool, owner_s)
    for way, taken in times.items():
        ratio = median(mine / least for mine, least in zip(taken, times[base], strict=True))
        rows.append({"its peer": way, "median_s": median(taken), "least_s": min(taken), "times_baseline": ratio})
    rows.append({"its peer": f"{COMPUTES}: odc status", "median_s": median(waits), "longest_s": max(waits)})
    script.store(
        "gpu_decoupled",
        "84 pushes of a rank on a GPU beside a peer's compute",
        rows,
        fast_ms=given.fast_ms,
        owner_ms=given.owner_ms,
    )


if __name__ == "__main__":
    main()
