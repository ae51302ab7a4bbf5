"""Rates of odc's kernels and copies on one GPU, in one process, and what they cost compute beside them.

Run as `OMP_NUM_THREADS=1 python -m bench.one_gpu --results bench/results`; every figure is written as soon as it is
there, so a run that is cut off keeps what it measured. With `--rehearse` the same script runs on the CPU, with tiny
sizes and interpreted kernels (TRITON_INTERPRET=1): does it run, not how fast. Host time is `odc bench --only host`.

A kernel's rate counts the bytes that it reads and writes, and is held against a device copy of as many. "Beside a GEMM"
is how much longer a row of matrix products takes while gathers run in another stream, as fetches do during forward;
peers' memory is this device's here, which is faster than any link: an upper bound of what a gather takes away.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.script import Script
from odc.bench.ranks import RankPool
from odc.bench.rounds import Action, measure
from odc.movers import driver
from odc.movers.choice import DataMover
from odc.movers.cuda import CudaMover

MIB = 1 << 20
TILES, WARPS, PROGRAMS = (8192, 16384, 32768), (4, 8), (16, 32, 64, 132)
_FAILED = "FAILED"
_PEER, _LOCAL = 0, 1  # shards of the gathers: all memory counts as a peer's

Row = dict[str, Any]


class Here:
    """The device of the run and its sizes."""

    def __init__(self, rehearse: bool) -> None:
        self.on_gpu = not rehearse
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        self.nbytes, self.rounds = (256 * MIB, 10) if self.on_gpu else (4096, 2)
        self.width, self.products = (8192, 20) if self.on_gpu else (16, 2)

    def lane(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream) if self.on_gpu else nullcontext()

    def stream(self, priority: int = 0) -> Any:
        return torch.cuda.Stream(self.device, priority=priority) if self.on_gpu else None

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of the device for one `run`, after two to warm up."""
        (timed,) = measure(lambda *_: [Action("one", run, queued=True)], 0, self.device.type, self.rounds, 2)
        return median(timed.device_seconds or timed.seconds)


def kernels(here: Here) -> Iterator[Row]:
    """Every kernel by tile size, warps and, where it has a few, programs at once."""
    from odc import kernels as odc

    launch, rows, add = (importlib.import_module(f"odc.kernels.{name}") for name in ("launch", "rows", "add"))
    usual = dict(launch.OPTIONS)
    device, n = here.device, here.nbytes // 4
    source, target, half = (torch.ones(n, dtype=t, device=device) for t in (torch.float32,) * 2 + (torch.bfloat16,))
    memory = odc.pointer_table([source.data_ptr()], device)
    owners = odc.pointer_table([piece.data_ptr() for piece in source.split(n // 8)], device)
    sums = odc.pointer_table([piece.data_ptr() for piece in target.split(n // 8)], device)
    eighth, sevens = target[: n // 8], [list(half.split(n // 8))[:7]]
    found = torch.zeros(1, dtype=torch.int32, device=device)
    # What runs, and the bytes that it reads and writes.
    runs: dict[str, tuple[Callable[..., object], float]] = {
        "get": (lambda b, **_: odc.get(target, memory, 0, block=b), 8 * n),
        "publish, cast to bf16": (lambda b, **_: odc.publish([half], [source], block=b), 6 * n),
        "differ": (lambda b, **_: odc.differ([half], [source], found, block=b), 6 * n),
        "add": (lambda b, **_: odc.add([target], [half], block=b), 10 * n),
        "add, 7 sources": (lambda b, **_: odc.AddPlan([eighth], sevens, block=b).run(), 22 * n / 8),
        "gather, 8 owners": (lambda b, **o: odc.gather([target], [0], owners, block=b, **o), 8 * n),
        "accumulate, 8 owners": (lambda b, **o: odc.accumulate([half], [n // 8], [0], sums, block=b, **o), 10 * n),
    }
    limits: dict[int, float] = {}
    for name, tile, warps, programs in _configurations(here, runs, launch):
        run, moved = runs[name]
        copied = min(int(moved) // 8 * 4, 4 * n)
        row: Row = {"kernel": name, "tile, bytes": tile, "warps": warps, "programs": programs or ""}
        try:
            if copied not in limits:
                into, out_of = (memory.view(torch.uint8)[:copied] for memory in (target, source))
                limits[copied] = here.seconds(lambda into=into, out_of=out_of: into.copy_(out_of))
            launch.OPTIONS["num_warps"] = warps
            for kept in (launch.prepared, rows._launches, add._launches):  # what was compiled with other warps
                kept.cache_clear()
            options = {} if programs is None else {"programs": programs}
            took = here.seconds(lambda run=run, b=tile // 4, options=options: run(b, **options))
            rate = moved / took / (2 * copied / limits[copied])
            yield {**row, "GB/s": moved / took / 1e9, "of a copy": f"{rate:.0%}"}
        except Exception as error:  # the other kernels are measured all the same
            yield {**row, "GB/s": "", "of a copy": _failure(error)}
        finally:
            launch.OPTIONS.update(usual)


def _configurations(here: Here, runs: Collection[str], launch: Any) -> list[tuple[str, int, int, int | None]]:
    """(kernel, tile, warps, programs): of every kernel what odc uses, then all others, in case time runs out."""
    usual, sweep = [], []
    for name in runs:
        few = PROGRAMS if name.startswith(("gather", "accumulate")) else (None,)
        used = launch.TILE_BYTES, launch.OPTIONS["num_warps"], launch.BESIDE_COMPUTE if len(few) > 1 else None
        usual.append((name, *used))
        sweep += [(name, *one) for one in itertools.product(TILES, WARPS, few) if one != used]
    return usual + sweep if here.on_gpu else usual


def _failure(error: Exception) -> str:
    return f"{_FAILED} {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _moved_by_hand(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    """In place of the copy engine, in a rehearsal."""
    for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)


def movers(here: Here) -> dict[str, DataMover]:
    """Ways to gather a unit."""
    from odc.kernels.launch import BESIDE_COMPUTE
    from odc.movers.compiled import CompiledMover

    return {
        "copy engine": CudaMover(_LOCAL, 1, driver.copy_all if here.on_gpu else _moved_by_hand),
        "torch's kernel": CudaMover(_LOCAL, 1 << 62),
        f"odc's kernel, {BESIDE_COMPUTE} programs": CompiledMover(_LOCAL, 1 << 62),
    }


def beside(here: Here) -> Iterator[Row]:
    """How a row of GEMMs slows down while gathers run beside it, by each way and by number of programs."""
    from odc import kernels as odc

    device, width = here.device, here.width
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    product, out = torch.empty_like(left), torch.empty(here.nbytes // 4, device=device)
    memory = torch.ones(here.nbytes, dtype=torch.uint8, device=device)
    owners = odc.pointer_table([memory.data_ptr()], device)
    computing, fetching = here.stream(), here.stream(-1)

    def multiply() -> None:
        for _ in range(here.products):
            torch.mm(left, right, out=product)

    ways: dict[str, Callable[[], object]] = {
        name: lambda mover=mover: mover.gather([out], [0], 1, [(_PEER, memory)]) for name, mover in movers(here).items()
    }
    for p, w in itertools.product(PROGRAMS, WARPS) if here.on_gpu else [(PROGRAMS[0], WARPS[0])]:
        ways[f"odc's kernel, {p} programs of {w} warps"] = lambda p=p, w=w: odc.gather(
            [out], [0], owners, programs=p, warps=w
        )
    with here.lane(computing):
        alone = here.seconds(multiply)
    for name, gather in ways.items():
        try:
            with here.lane(fetching):
                each = here.seconds(gather)
            times = max(1, int(3 * alone / each)) if here.on_gpu else 1  # longer than the products, however slow
            gathers = [gather] * times
            slowed = [_together(here, computing, fetching, multiply, gathers) / alone - 1 for _ in range(here.rounds)]
            figures = {"GEMMs slowed by": f"{median(slowed):.1%}", "worst": f"{max(slowed):.1%}"}
            yield {"gather by": name, "GB/s alone": here.nbytes / each / 1e9, **figures}
        except Exception as error:  # the other ways are measured all the same
            yield {"gather by": name, "GB/s alone": "", "GEMMs slowed by": _failure(error), "worst": ""}


def _together(
    here: Here, computing: Any, fetching: Any, multiply: Callable[[], None], gathers: list[Callable[[], object]]
) -> float:
    """Seconds of the products while the gathers run; both begin together, once all is asked for."""
    if not here.on_gpu:
        start = time.perf_counter()
        multiply(), gathers[0]()
        return time.perf_counter() - start
    go, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize(here.device)
    torch.cuda._sleep(20_000_000)  # some ten milliseconds, in which everything below is asked for
    go.record()
    for stream in (computing, fetching):
        stream.wait_event(go)
    with here.lane(fetching):
        for gather in gathers:
            gather()
    with here.lane(computing):
        first.record()
        multiply()
        last.record()
    torch.cuda.synchronize(here.device)
    return float(first.elapsed_time(last)) / 1e3


def by_cupy(here: Here) -> Iterator[Row]:
    """Odc's gather beside one in CUDA C++ and the runtime's copies: what Triton loses."""
    from bench.cupy_baselines import baselines
    from odc import kernels as odc
    from odc.kernels.launch import BESIDE_COMPUTE

    n, count = here.nbytes // 4, 8
    source = torch.arange(n, dtype=torch.float32, device=here.device)
    target = torch.zeros_like(source)
    owners = odc.pointer_table([piece.data_ptr() for piece in source.split(n // count)], here.device)
    ways = baselines(target, source, owners, BESIDE_COMPUTE)
    ways = {f"odc's kernel, {count} owners": lambda: odc.gather([target], [0], owners), **ways}
    usual = 0.0
    for name, run in ways.items():
        try:
            target.zero_()
            run()
            if not torch.equal(target, source):
                raise ValueError("other bytes have come")
            took = here.seconds(run)
            usual = usual or took
            yield {"gather by": name, "GB/s": 2 * here.nbytes / took / 1e9, "of odc's rate": f"{usual / took:.0%}"}
        except Exception as error:  # the other ways are measured all the same
            yield {"gather by": name, "GB/s": "", "of odc's rate": _failure(error)}


PARTS: dict[str, Callable[[Here], Iterator[Row]]] = {"beside": beside, "kernels": kernels, "cupy": by_cupy}


def main() -> None:
    """Measure the parts in turn; what is measured stands in the files at once."""
    script = Script(
        __doc__,
        only=(["beside", "kernels"], "parts; cupy needs the extra of this name", PARTS),
        rehearse=(False, "tiny sizes on the CPU: does the script run?"),
    )
    given = script.given
    if not (given.rehearse or torch.cuda.is_available()):
        raise SystemExit("bench.one_gpu: no CUDA device here (see `odc doctor`)")
    if given.rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("bench.one_gpu: --rehearse needs TRITON_INTERPRET=1 in the environment")
    failed, what = list[str](), "rehearsal" if given.rehearse else "one_gpu"
    with RankPool(1, device="cpu" if given.rehearse else "cuda"):
        for part in given.only:
            rows = list[Row]()
            for row in PARTS[part](Here(given.rehearse)):
                rows.append(row)
                failed += [f"{part}: {value}" for value in row.values() if str(value).startswith(_FAILED)]
                print(json.dumps(row), flush=True)
                script.store(f"{what}_{part}", (__doc__ or "").splitlines()[0], rows, show=False)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
