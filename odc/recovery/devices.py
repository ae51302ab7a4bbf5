"""What recovery asks of GPUs: which models it takes, which errors end a process, and which may hold a heap."""

from __future__ import annotations

import traceback

import torch
from torch import nn

from odc.errors import UnsupportedError
from odc.memory.driver_calls import DriverError


def refuse_devices(model: nn.Module, device: torch.device | None, *, fewer: bool = False) -> None:
    """UnsupportedError if a model is neither on the CPU nor on `device`, the GPU that the process group is for.

    Where ranks may become `fewer`, it has to be on the CPU.
    """
    for name, parameter in model.named_parameters():
        if fewer and parameter.device.type != "cpu":
            raise UnsupportedError(f"fewest=... is for models on the CPU so far, and {name} is on {parameter.device}")
        if parameter.device.type != "cpu" and parameter.device != device:
            raise UnsupportedError(
                f"{name} is on {parameter.device}, and odc.Recovery() was called when "
                f"{'no GPU was in use' if device is None else f'{device} was current'}: call "
                "torch.cuda.set_device(LOCAL_RANK) before it, and have the model there, or on the CPU"
            )


def is_of_device(error: BaseException) -> bool:
    """Whether an error, or one behind it, is CUDA's, as torch, Triton or odc raises it: after most of these the process
    cannot use its GPU any more.

    So none is taken for the end of another rank, even if one has ended: a new process can go on, this one could not.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DriverError):
            return seen.name != "CUDA_ERROR_OUT_OF_MEMORY"  # a device that lacks memory can be used
        if isinstance(seen, torch.AcceleratorError) or str(seen).startswith(("CUDA error", "Triton Error [CUDA]")):
            return True
        seen = seen.__cause__
    return False


def forget_frames(error: BaseException | None) -> None:
    """They hold the root, and it the heap, which must be gone before the next one is made."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        entry = error.__traceback__
        while entry is not None:  # a frame keeps its function even so, and that all that it is a closure over
            entry.tb_next, entry = None, entry.tb_next
        error = error.__cause__ or error.__context__
