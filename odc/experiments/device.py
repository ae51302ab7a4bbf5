"""Where a job computes: on this machine's cores, or on its CUDA devices.

Chose one file for all that a job does differently on CUDA (devices, process group, waiting, memory) over branches where
they are met. Ranks may share a device, for a try on one: then there is no NCCL, which refuses that, and so no arm of
torch's collectives.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from odc.arms import ArmName, arm_named
from odc.errors import ConfigError, UnsupportedError
from odc.experiments.config import JobConfig

_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch, read when memory is mapped


def check_device(config: JobConfig, arm: ArmName) -> None:
    """Whether `arm` can run where `config.device` says, on this machine; before ranks start.

    Raises:
        UnsupportedError: there is no CUDA device.
        ConfigError: the arm's collectives, or those of an export, need a device a rank, and there are fewer.
    """
    if config.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise UnsupportedError("device: no CUDA device here (`odc doctor --need cuda` says what is missing)")
    devices = torch.cuda.device_count()
    if config.ranks > devices and config.export is not None:
        raise ConfigError(
            f"export: a whole model is gathered by NCCL, which needs a CUDA device a rank; {config.ranks} ranks share "
            f"{devices} here. Save checkpoints (--output), and export on the CPU (--resume, without --device)"
        )
    if config.ranks > devices and not arm_named(arm).on_demand:
        raise ConfigError(
            f"device: arm {arm} uses NCCL, which needs a CUDA device a rank; {config.ranks} ranks share {devices} "
            f"here. Take --ranks {devices}, or only arms that share devices (odc and all odc-*)"
        )


def backend(config: JobConfig) -> str:
    """The process group's: gloo for what lies in host memory, NCCL for the rest where each rank has its own device."""
    own = config.device == "cuda" and config.ranks <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if own else "gloo"


def take_device(config: JobConfig) -> torch.device:
    """This rank's device, made current; in the environment of `torchrun`, once the process group is there."""
    if config.device == "cpu":
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if config.ranks > devices:
        os.environ[_OVERLAP] = "1"
    local = os.environ.get("LOCAL_RANK")  # torchrun's and torch elastic's
    device = torch.device("cuda", (int(local) if local is not None else dist.get_rank()) % devices)
    torch.cuda.set_device(device)
    return device


def device_names() -> list[str]:
    """What the CUDA devices of this machine are called."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def settle(device: torch.device) -> None:
    """Return once the device has done what compute was asked for: a span that ends now ends with the work in it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def can_time(config: JobConfig, arm: ArmName) -> bool:
    """Whether spans tell where an arm's time went.

    Spans are of the processor. It waits for the device at the end of each microbatch, so what it spends outside is
    waiting; but NCCL's ranks wait for each other on the device, inside a microbatch, where no span sees it.
    """
    return config.device == "cpu" or arm_named(arm).on_demand


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception of a microbatch says that memory ran out, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch has no type of its own there
