"""Loads the emulated operators at the end of every `import torch`, and lets odc's kernels run interpreted.

torch's entry point for backends loads it in every process that imports torch, by the metadata of a distribution beside
this file.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

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
    if os.environ.get("EMULATED_RECORD"):
        cuda = library()
        assert cuda is not None
        from recorded.hooks import install

        install(cuda)
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
        run, cuda = spec.loader.exec_module, library()
        assert cuda is not None

        def exec_module(module: ModuleType) -> None:
            run(module)
            from emulated_launches import LateLaunches

            vars(module)["launch"] = LateLaunches(cuda, vars(module)["launch"])

        vars(spec.loader)["exec_module"] = exec_module
        return spec
