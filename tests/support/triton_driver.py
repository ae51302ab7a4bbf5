"""Triton's own way to compile and launch, without a GPU: its driver is a stand-in, and kernels are compiled for sm_90.

For scripts that `support.uninterpreted` runs. Memory of the CPU stands for a device's, and nothing runs.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class StandInUtils:
    """What triton's driver in C does with the device."""

    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 0, 0, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}


class StandInDriver:
    """Of a Hopper. A script gives it `utils` and the class of launchers."""

    utils: Any
    launcher_cls: Any

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def use(made: StandInDriver) -> None:
    """Compile and launch by this driver from now on, for tensors of the CPU."""
    driver.set_active(made)
    launch = importlib.import_module("odc.kernels.launch")
    launch.refuse_compiled = lambda: None
    torch.cuda.device = lambda _: nullcontext()  # type: ignore[assignment,misc]
