"""What one GPU says of odc's kernels and copies, in one process: rates, what they cost compute beside them, host time.

Run as `OMP_NUM_THREADS=1 python -m bench.one_gpu --results bench/results`; every figure is written as soon as it is
there, so a run that is cut off has said what it knew. With `--rehearse` the same script runs on the CPU, with tiny
sizes and interpreted kernels (TRITON_INTERPRET=1): does it run, not how fast.

A kernel's rate counts the bytes that it reads and writes, and is held against a device copy of as many. "Beside a GEMM"
is how much longer a row of matrix products takes while gathers run in another stream, as fetches do during forward;
peers' memory is this device's own here, which is faster than any link: an upper bound of what a gather takes away.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from odc.bench.alone import OWNERS, SLICE, SLICES, Members, host_times, lanes_of
from odc.bench.report import facts, table
from odc.movers import driver
from odc.movers.choice import DataMover
from odc.movers.cuda import CudaMover
from odc.provenance import begin
from odc.settings import Settings

MIB = 1 << 20
TILES, WARPS, PROGRAMS = (8192, 16384, 32768), (4, 8), (16, 32, 64, 132)
_FAILED = "FAILED"
_PEER, _OWN = 0, 1  # shards of the gathers: all memory counts as a peer's

Row = dict[str, Any]


class Here:
    """The device of the run, its clock and its sizes."""

    def __init__(self, rehearse: bool) -> None:
        self.on_gpu = not rehearse
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        self.nbytes = 256 * MIB if self.on_gpu else 4096
        self.rounds = 10 if self.on_gpu else 2
        self.width, self.products = (8192, 20) if self.on_gpu else (16, 2)

    def lane(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream) if self.on_gpu else nullcontext()

    def stream(self, priority: int = 0) -> Any:
        return torch.cuda.Stream(self.device, priority=priority) if self.on_gpu else None

    def settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of the device for one `run`, after two to warm up."""
        taken = []
        for turn in range(2 + self.rounds):
            if self.on_gpu:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(200_000)  # until everything below is asked for
                first.record()
                run()
                last.record()
                self.settle()
                took = first.elapsed_time(last) / 1e3
            else:
                start = time.perf_counter()
                run()
                took = time.perf_counter() - start
            if turn >= 2:
                taken.append(took)
        return median(taken)


def kernels(here: Here) -> Iterator[Row]:
    """Every kernel by tile size, warps and, where it has a few, programs at once."""
    from odc import kernels as odc

    launch = importlib.import_module("odc.kernels.launch")
    usual = dict(launch.OPTIONS)
    device, n = here.device, here.nbytes // 4
    source, target, half = (torch.ones(n, dtype=t, device=device) for t in (torch.float32,) * 2 + (torch.bfloat16,))
    eighths = [piece.data_ptr() for piece in source.split(n // 8)]
    table_of = odc.pointer_table([source.data_ptr()], device)
    owners = odc.pointer_table(eighths, device)
    sums = odc.pointer_table([piece.data_ptr() for piece in target.split(n // 8)], device)
    eighth, sevens = target[: n // 8], [list(half.split(n // 8))[:7]]
    # What runs, and the bytes that it reads and writes.
    runs: dict[str, tuple[Callable[..., object], float]] = {
        "get": (lambda b, **_: odc.get(target, table_of, 0, block=b), 8 * n),
        "publish, cast to bf16": (lambda b, **_: odc.publish([half], [source], block=b), 6 * n),
        "differ": (lambda b, **_: odc.differ([half], [source], found, block=b), 6 * n),
        "add": (lambda b, **_: odc.add([target], [half], block=b), 10 * n),
        "add, 7 sources": (lambda b, **_: odc.add_all([eighth], sevens, block=b), 22 * n / 8),
        "gather, 8 owners": (lambda b, **o: odc.gather([target], [0], owners, block=b, **o), 8 * n),
        "accumulate, 8 owners": (
            lambda b, **o: odc.accumulate([half], [n // 8], [0], sums, block=b, **o),
            10 * n,
        ),
    }
    found = torch.zeros(1, dtype=torch.int32, device=device)
    limits: dict[int, float] = {}
    for name, tile, warps, programs in _configurations(here, runs, launch):
        run, moved = runs[name]
        copied = min(int(moved) // 8 * 4, 4 * n)
        row: Row = {"kernel": name, "tile, bytes": tile, "warps": warps, "programs": programs or ""}
        try:
            if copied not in limits:
                limits[copied] = here.seconds(
                    lambda c=copied: target.view(torch.uint8)[:c].copy_(source.view(torch.uint8)[:c])
                )
            launch.OPTIONS["num_warps"] = warps
            options = {} if programs is None else {"programs": programs}
            took = here.seconds(lambda r=run, b=tile // 4, o=options: r(b, **o))
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
        "copy engine": CudaMover(_OWN, 1, driver.copy_all if here.on_gpu else _moved_by_hand),
        "torch's kernel": CudaMover(_OWN, 1 << 62),
        f"odc's kernel, {BESIDE_COMPUTE} programs": CompiledMover(_OWN, 1 << 62),
    }


def beside(here: Here) -> Iterator[Row]:
    """How a row of GEMMs slows down while gathers run beside it, by each way and by number of programs."""
    from odc import kernels as odc

    device, width = here.device, here.width
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)
    memory = torch.ones(here.nbytes, dtype=torch.uint8, device=device)
    out = torch.empty(here.nbytes // 4, device=device)
    owners = odc.pointer_table([memory.data_ptr()], device)
    computing, fetching = here.stream(), here.stream(-1)

    def multiply() -> None:
        for _ in range(here.products):
            torch.mm(left, right, out=product)

    ways: dict[str, Callable[[], object]] = {
        name: lambda mover=mover: mover.gather([out], [0], 1, [(_PEER, memory)]) for name, mover in movers(here).items()
    }
    for programs in PROGRAMS if here.on_gpu else PROGRAMS[:1]:
        for warps in WARPS if here.on_gpu else WARPS[:1]:
            ways[f"odc's kernel, {programs} programs of {warps} warps"] = lambda p=programs, w=warps: odc.gather(
                [out], [0], owners, programs=p, warps=w
            )
    with here.lane(computing):
        alone = here.seconds(multiply)
    for name, gather in ways.items():
        slowed = []
        try:
            with here.lane(fetching):
                each = here.seconds(gather)
            times = max(1, int(3 * alone / each)) if here.on_gpu else 1  # longer than the products, however slow
            for turn in range(1 + here.rounds):
                took = _together(here, computing, fetching, multiply, lambda g=gather, n=times: [g() for _ in range(n)])
                if turn:
                    slowed.append(took / alone - 1)
        except Exception as error:  # the other ways are measured all the same
            yield {"gather by": name, "GB/s alone": "", "GEMMs slowed by": _failure(error), "worst": ""}
            continue
        yield {
            "gather by": name,
            "GB/s alone": here.nbytes / each / 1e9,
            "GEMMs slowed by": f"{median(slowed):.1%}",
            "worst": f"{max(slowed):.1%}",
        }


def _together(
    here: Here, computing: Any, fetching: Any, multiply: Callable[[], None], gathers: Callable[[], object]
) -> float:
    """Seconds of the products while the gathers run; both begin together, once all is asked for."""
    if not here.on_gpu:
        start = time.perf_counter()
        multiply(), gathers()
        return time.perf_counter() - start
    go, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    here.settle()
    torch.cuda._sleep(20_000_000)  # some ten milliseconds, in which everything below is asked for
    go.record()
    for stream in (computing, fetching):
        stream.wait_event(go)
    with here.lane(fetching):
        gathers()
    with here.lane(computing):
        first.record()
        multiply()
        last.record()
    here.settle()
    return float(first.elapsed_time(last)) / 1e3


def host(here: Here) -> Iterator[Row]:
    """Microseconds of this process for a fetch and a push of a unit over 8 owners; a push waits for the device."""
    chosen: tuple[Any, ...] = ("auto", "torch") if here.on_gpu else ("torch",)
    for kernels_ in chosen:
        for least in (1, 1 << 40) if here.on_gpu else (1,):
            settings = Settings(kernels=kernels_, copy_engine_bytes=least)
            members = Members(here.device, lanes_of(here.device), settings, OWNERS, SLICES, SLICE)
            took = host_times(members, here.device, 200 if here.on_gpu else 3)
            members.close()
            yield {
                "kernels": kernels_,
                "pieces of peers": "copy engine" if least == 1 else "kernel",
                **{f"{name}, us": pair[0] for name, pair in took.items()},
                **{f"fastest {name}": pair[1] for name, pair in took.items()},
            }


PARTS: dict[str, Callable[[Here], Iterator[Row]]] = {"host": host, "beside": beside, "kernels": kernels}


def main() -> None:
    """Measure the parts in turn; what is measured stands in the files at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU: does the script run?")
    options = parser.parse_args()
    if not (options.rehearse or torch.cuda.is_available()):
        parser.exit(1, "bench.one_gpu: no CUDA device here (`odc doctor` says what is missing)\n")
    if options.rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        parser.exit(1, "bench.one_gpu: --rehearse needs TRITON_INTERPRET=1 in the environment\n")
    begun, here = begin(), Here(options.rehearse)
    rows: dict[str, list[Row]] = {}
    failed: list[str] = []
    for part in options.only:
        rows[part] = []
        try:
            for row in PARTS[part](here):
                rows[part].append(row)
                failed += [f"{part}: {value}" for value in row.values() if str(value).startswith(_FAILED)]
                print(json.dumps(row), flush=True)
                save(options.results, "one_gpu" if here.on_gpu else "one_gpu_rehearsal", facts(begun), rows)
        except Exception as error:  # the other parts are measured all the same
            failed.append(f"{part}: {type(error).__name__}: {error}")
            print(f"FAILED {failed[-1]}", flush=True)
    if failed:
        raise SystemExit(1)


def save(folder: Path, name: str, about: dict[str, Any], rows: dict[str, list[Row]]) -> None:
    """All that is known by now, as JSON and as tables."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({**about, "parts": rows}, indent=1) + "\n")
    where = ", ".join(f"{key} {value}" for key, value in {**about["machine"], **about["versions"]}.items())
    parts = [f"## {part}\n\n{table(found)}" for part, found in rows.items() if found]
    title = (__doc__ or "").splitlines()[0]
    head = f"# {title}\n\n`{about['command']}`\n\n{where}\n\n{about['date']}, commit {about['commit']}\n\n"
    (folder / f"{name}.md").write_text(head + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
