"""Prints, of every row of `bench.one_gpu`'s sweep over kernels, its warps and those of the launches that it measured.

Run as a script by `tests/bench/test_one_gpu.py`, in a process where nothing is interpreted. Kernels are compiled for
sm_90 and never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from bench import one_gpu
from support.triton_driver import StandInDriver, StandInUtils, use

launched: list[int] = []  # warps of each launch


class Launcher:
    def __init__(self, _: object, metadata: Any) -> None:
        self._warps = metadata.num_warps

    def __call__(self, *_: object) -> None:
        launched.append(self._warps)


class Driver(StandInDriver):
    utils, launcher_cls = StandInUtils(), Launcher


def seconds(run: Callable[[], object]) -> float:
    """In place of `Here.seconds`: a launch that is prepared, and one more."""
    run(), run()
    return 1.0


def main() -> None:
    use(Driver())
    one_gpu.TILES, one_gpu.PROGRAMS = (16384,), (16, 32)  # fewer variants to compile
    here: Any = SimpleNamespace(on_gpu=True, device=torch.device("cpu"), nbytes=4096, seconds=seconds)
    rows = []
    for row in one_gpu.kernels(here):
        rows.append({**row, "launched": sorted(set(launched))})
        launched.clear()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
