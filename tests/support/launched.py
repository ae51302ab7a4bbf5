"""Launches compiled kernels by triton's own way to launch, with a stand-in for the driver; prints what came of it.

Run as a script by `test_launch`, in a process where nothing is interpreted. Kernels are compiled for sm_90 and never
run: the stand-in takes their launches and drops them.
"""

from __future__ import annotations

import importlib
import json
import threading
from typing import Any

import torch

from odc import kernels
from support.triton_driver import StandInDriver, StandInUtils, use

launched: list[tuple[Any, ...]] = []


class Launcher:
    def __init__(self, *_: object) -> None: ...

    def __call__(self, *args: Any) -> None:
        launched.append(args)


class Driver(StandInDriver):
    utils, launcher_cls = StandInUtils(), Launcher


def everything(n: int, offset: int, table: torch.Tensor) -> int:
    """One launch of each launcher, with these numbers; how many there should be."""
    values = torch.empty(n)
    signal = kernels.Signal(offset // 8 * 8, offset, torch.zeros(3, dtype=torch.int32)[1:2])
    kernels.get(values, table, 0, offset)
    kernels.gather([torch.empty(n * table.numel())], [offset], table, first=offset % 3)
    kernels.publish([values], [torch.empty(n)])
    kernels.add([values], [torch.empty(n)])
    kernels.accumulate([values], [n], [offset], table, first=offset % 3)
    kernels.put([values], table, 0, offset, signal=signal)
    kernels.differ([values], [torch.empty(n)], torch.zeros(1, dtype=torch.int32))
    return 7


def prepared() -> bool:
    """Whether a later launch of a plan, which binds no arguments, asks the driver for what one that binds them does."""
    sources, table = [16 * i for i in range(1, 4)], torch.zeros(4, dtype=torch.int64)
    numels, offsets, outs = [40] * 3, [0, 10, 20], [torch.empty(40) for _ in range(3)]
    scatter = kernels.ScatterPlan(numels, [10] * 3, offsets, torch.float32, 4, table.device)
    gather = kernels.GatherPlan(outs, offsets, 4, table.device)
    found = []
    plans: tuple[Any, ...] = scatter, gather
    for plan in plans:
        plan.run([8, 8, 8], table, 0, 1)
        for warps in (None, 4):  # by default as many
            plan.run(sources, table, 1, 3, warps=warps)
            found.append(
                [one.tolist() if isinstance(one, torch.Tensor) else str(one).split(" at ")[0] for one in launched[-1]]
            )
    return found[0] == found[1] and found[2] == found[3] and found[0] != found[2]


def main() -> None:
    """Print variants compiled by kernel, launches that were expected, and those that came."""
    use(Driver())
    expected: list[int] = []

    def work(at: int) -> None:
        for n in (1, 16, 4097):
            for offset in (0, 1, 16, 1 << 40):
                expected.append(everything(n, offset, torch.zeros(4, dtype=torch.int64)[at:]))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = ("get", "gather", "publish", "add", "accumulate", "put", "differ")
    variants = {}
    for name in names:
        module = importlib.import_module(f"odc.kernels.{name}")
        variants[name] = len(getattr(module, f"{name}_kernel").device_caches[0][0])
    came = len(launched)
    print(json.dumps({"variants": variants, "expected": sum(expected), "launched": came, "prepared": prepared()}))


if __name__ == "__main__":
    main()
