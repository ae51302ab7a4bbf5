"""Prepares a `CompiledMover` and then moves units by it in other threads; prints which thread loaded what, and which
took the lock that is held around a compilation.

Run as a script by `tests/movers/test_prepared.py`, in a process where nothing is interpreted. Kernels are compiled for
sm_90 and never run: a stand-in for triton's driver counts what is loaded and drops launches. Memory of the CPU stands
for a device's.
"""

from __future__ import annotations

import importlib
import json
import threading
from typing import Any

import numpy as np
import torch

from odc.movers.compiled import CompiledMover
from odc.movers.plans import Patches, Rounding
from support.triton_driver import StandInDriver, StandInUtils, use

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
loaded: list[str] = []  # by which thread
launched: list[str] = []
locked: list[str] = []


class NotedUtils(StandInUtils):
    def load_binary(self, *asked: object) -> tuple[int, ...]:
        loaded.append(threading.current_thread().name)
        return super().load_binary(*asked)


class Launcher:
    def __init__(self, *_: object) -> None: ...

    def __call__(self, *_: object) -> None:
        launched.append(threading.current_thread().name)


class Driver(StandInDriver):
    utils, launcher_cls = NotedUtils(), Launcher


def no_copies(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    """In place of the copy engine."""


def minibatch(
    mover: CompiledMover,
    dtypes: list[torch.dtype],
    total: torch.dtype,
    atomic: bool,
    patches: list[Patches],
    rounding: Rounding,
) -> None:
    """What odc's threads ask for, of units of every kind: large, small, of one dtype, mixed, with short gradients."""
    shards, sums = 2, torch.zeros(1 << 16, dtype=total)
    for one in patches:
        one.run(torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(1 << 16, dtype=torch.uint8))
    rounded, whole = torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(1 << 14)
    rounding.write(whole, rounded)
    rounding.add(whole, rounded, whole)
    rounding.keep(whole, rounded, whole, [True, False, True])
    for numel in (3, 16, 5000):
        for unit in ([dtype] for dtype in dtypes), [dtypes], [dtypes[::-1]]:
            for kinds in unit:
                outs = [torch.zeros(shards * numel, dtype=kind) for kind in kinds]
                offsets = [i * numel * 8 for i in range(len(kinds))]
                memory = [(shard, torch.zeros(1 << 19, dtype=torch.uint8)) for shard in (1, 0)]
                mover.gather(outs, offsets, shards, memory)
                for kind in kinds:
                    values = [torch.zeros(shards * numel - 1, dtype=kind)]
                    mover.stage(values, (numel,), (0,), memory)
                    mover.add_part(values, (numel,), (0,), 0, sums)
                    mover.addition([sums[:numel]], [[values[0][:numel]] * 3]).run()
                    mover.add([sums[1 : 1 + numel]], [values[0][:numel]])
                    shard, found = torch.zeros(numel, dtype=total), torch.zeros(1, dtype=torch.int32)
                    mover.differ([values[0][:numel]], [shard], found)
                    if atomic:
                        mover.accumulate_all(values, (numel,), (0,), [(0, sums), (1, sums)])


def note_locks() -> None:
    launch = importlib.import_module("odc.kernels.launch")
    alone = launch._alone

    def noted(*asked: Any) -> Any:
        locked.append(threading.current_thread().name)
        return alone(*asked)

    launch._alone = noted


def main() -> None:
    """Print what the main thread loaded, what others loaded, how much others launched, and how often under the lock."""
    use(Driver())
    note_locks()
    for dtypes, total, atomic in ([BF16, F32], F32, True), ([F16, F64], F64, False):
        for least in (1 << 30, 4096):
            mover = CompiledMover(0, least, no_copies)
            mover.prepare(torch.device("cpu"), [(total, dtype, total) for dtype in dtypes], atomic)
            sizes = [[(16, 2)], [(5000, 4)], [(3, 8), (40, 1)]]  # elements and their bytes, by unit
            units = [[(8192 * i, *size) for i, size in enumerate(unit)] for unit in sizes]
            patches: list[Patches] = [mover.patches(unit, torch.device("cpu")) for unit in units]
            rounding = mover.rounding([(5000, 0, True), (40, 5200, False), (3, 5280, True)], torch.device("cpu"))
            name = f"odc-{total}-{least}"
            thread = threading.Thread(
                target=minibatch, args=(mover, dtypes, total, atomic, patches, rounding), name=name
            )
            thread.start()
            thread.join()
    others = [name for name in launched if name.startswith("odc-")]
    late = [name for name in loaded if name.startswith("odc-")]
    found = {"early": len(loaded) - len(late), "late": late, "launched": len(others)}
    print(json.dumps(found | {"locked": [name for name in locked if name.startswith("odc-")]}))


if __name__ == "__main__":
    main()
