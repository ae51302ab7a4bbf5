"""Loads the emulated operators at the end of every `import torch`, and lets odc's kernels run interpreted.

torch's entry point for backends loads it in every process that imports torch, by the metadata of a distribution beside
this file. The interpreter reads and writes device memory from the launching thread, so a launch waits for its stream
before and lets that thread touch device memory meanwhile: kernels that run late, or beside other work, are not
emulated.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_CUDA = "libemulated_cuda.so"
_LAUNCHES = "odc.kernels.launch"


def library() -> ctypes.CDLL | None:
    """The emulated CUDA of this process; None in one that was started without (by `run.sh` it is preloaded)."""
    for path in os.environ.get("LD_PRELOAD", "").split(":"):
        if Path(path).name == _CUDA:
            return ctypes.CDLL(path)
    return None


def load() -> None:
    """Replace torch's CUDA kernels; called by torch."""
    if library() is None:
        return
    import torch

    (preloaded,) = (path for path in os.environ["LD_PRELOAD"].split(":") if Path(path).name == _CUDA)
    torch.ops.load_library(str(Path(preloaded).with_name("libemulated_operators.so")))
    torch.backends.cuda.enable_flash_sdp(False)  # CUDA kernels without a CPU kernel of the same name
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.meta_path.insert(0, _InterpretedLaunches())


class _InterpretedLaunches(importlib.abc.MetaPathFinder):
    """Changes one function of one module of odc when that is imported: other modules take it from there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _LAUNCHES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            vars(module)["launch"] = _over_device_memory(vars(module)["launch"])

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def _over_device_memory(launch: Callable[..., None]) -> Callable[..., None]:
    """The `launch` of odc, which takes device memory for the host's."""
    import torch

    cuda = library()
    assert cuda is not None

    def launch_interpreted(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        # The interpreter would copy tensors by their storages, which holds Python's lock while it waits for a stream,
        # whose thread may need that lock to let a tensor go.
        tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_cuda}
        before = {i: tensor.cpu() for i, tensor in tensors.items()}
        after = {i: tensor.clone() for i, tensor in before.items()}
        cuda.emulated_allow(1)
        try:
            launch(kernel, grid, torch.device("cpu"), *(after.get(i, arg) for i, arg in enumerate(args)), **constants)
        finally:
            cuda.emulated_allow(0)
        for i, tensor in tensors.items():
            if not torch.equal(before[i], after[i]):
                tensor.copy_(after[i])

    return launch_interpreted
