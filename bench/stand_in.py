"""What a fetch and a push cost the processor on CUDA, without a device: what they ask for is dropped.

Run as `OMP_NUM_THREADS=1 python -m bench.stand_in --results bench/results`. The runtime, its movers and triton's own
launching are real, and compile for sm_90; in place of the driver stand functions that return at once. So the driver's
own time, and torch's for streams and events, is not in the figures: `bench.one_gpu` takes those on a device.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from odc.bench.alone import OWNERS, SLICE, SLICES, Members, host_times
from odc.bench.report import store
from odc.memory import HostLanes
from odc.movers import driver as copies
from odc.provenance import begin
from odc.settings import Settings

CPU = torch.device("cpu")


class LanesOfNothing(HostLanes):
    """Lanes of a device whose work is over as soon as it was asked for."""

    asynchronous = True


class _Utils:
    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 0, 0, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}


class _Launcher:
    def __init__(self, *_: object) -> None: ...

    def __call__(self, *args: Any) -> None:
        return


class _Driver:
    """Triton's driver, for a Hopper that is not there."""

    utils, launcher_cls = _Utils(), _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _batch(*_: object) -> int:
    return 0


@contextmanager
def no_driver() -> Iterator[None]:
    """Let kernels and copies on memory of the CPU be asked for inside the block; nothing happens to the memory."""
    from triton.runtime import driver

    launch = importlib.import_module("odc.kernels.launch")
    stream = SimpleNamespace(cuda_stream=5, query=lambda: True)
    kept = launch.refuse_compiled, torch.cuda.device, torch.cuda.current_stream, copies._batch_function
    driver.set_active(_Driver())
    launch.refuse_compiled = lambda: None
    torch.cuda.device = lambda _: nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    copies._batch_function = lambda: _batch  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        launch.refuse_compiled, torch.cuda.device, torch.cuda.current_stream, copies._batch_function = kept


def row(copy_engine: bool, rounds: int) -> dict[str, Any]:
    """One way to move a unit: what its fetch and push take, and are asked for."""
    from odc.movers.compiled import CompiledMover

    members = Members(CPU, LanesOfNothing(), Settings(), OWNERS, SLICES, SLICE)
    for number, layout in enumerate(members.layouts):
        layout.mover = CompiledMover(number, 1 if copy_engine else 1 << 62)
    took = host_times(members, CPU, rounds)
    members.close()
    return {
        "pieces of peers": "copy engine, one batch" if copy_engine else "kernel",
        "fetch, us": took["fetch"][0],
        "fastest fetch": took["fetch"][1],
        "push, us": took["push"][0],
        "fastest push": took["push"][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    begun = begin()
    with no_driver():
        rows = [row(copy_engine, options.rounds) for copy_engine in (False, True)]
    title = "Processor time of a fetch and a push of one unit on CUDA, with a stand-in for the driver"
    shape = f"{SLICES} slices, {OWNERS} owners; medians of {options.rounds} rounds"
    store(options.results, "stand_in", title, rows, begun=begun, unit=shape)


if __name__ == "__main__":
    main()
