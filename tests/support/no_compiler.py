"""Chooses a mover where triton has to build its driver first; prints why it cannot, and which mover it is.

Run as a script by `tests/movers/test_choice.py`, in a process where nothing is interpreted. Memory of the CPU stands
for a device's, and nothing is run: triton's own driver fails before.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton.backends.nvidia import driver as nvidia

from odc.movers import choice
from odc.movers import triton as by_triton
from odc.settings import Settings
from support.triton_driver import StandInDriver, use


class Driver(StandInDriver):
    """What needs triton's driver in C is triton's own."""

    launcher_cls = nvidia.CudaLauncher

    @property
    def utils(self) -> Any:
        return nvidia.CudaUtils()


def main() -> None:
    nvidia.libcuda_dirs = list  # there is none to look for
    use(Driver())
    launch, cpu = by_triton.launch_one, torch.device("cpu")
    by_triton.launch_one = lambda device: launch(cpu)
    device = torch.device("cuda", 0)
    print(json.dumps([choice._failure(device), type(choice.mover_for(Settings(), device)).__name__]))


if __name__ == "__main__":
    main()
