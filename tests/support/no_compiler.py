"""Chooses a mover where triton has to build its driver first; prints why it cannot, and which mover it is.

Run as a script by `tests/movers/test_cuda.py`, in a process where nothing is interpreted. Memory of the CPU stands for
a device's, and nothing is run: triton's own driver fails before.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from odc.movers import choice
from odc.movers import triton as by_triton
from odc.settings import Settings


class Driver:
    """Of a Hopper; what needs triton's driver in C is triton's own."""

    launcher_cls = nvidia.CudaLauncher

    @property
    def utils(self) -> Any:
        return nvidia.CudaUtils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    nvidia.libcuda_dirs = list  # there is none to look for
    driver.set_active(Driver())
    torch.cuda.device = lambda _: nullcontext()  # type: ignore[assignment,misc]
    launch, cpu = by_triton.launch_one, torch.device("cpu")
    by_triton.launch_one = lambda device: launch(cpu)
    vars(__import__("odc.kernels.launch", fromlist=["launch"]))["refuse_compiled"] = lambda: None
    device = torch.device("cuda", 0)
    print(json.dumps([choice._failure(device), type(choice.mover_for(Settings(), device)).__name__]))


if __name__ == "__main__":
    main()
