"""What CUDA's driver says of the links of this host's devices, to each other and to network cards."""

from __future__ import annotations

from functools import cache

import torch

from odc.errors import UnsupportedError
from odc.memory.driver_calls import DriverError, bindings, call


def native_atomics(number: int, other: int) -> bool:
    """Whether atomic operations of a device on another's memory are atomic: over NVLink they are, over PCIe not.

    Devices by their numbers in this process. Where the driver does not answer, they count as not atomic.
    """
    try:
        attribute = bindings().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(call("cuDeviceGetP2PAttribute", attribute, number, other))
    except (DriverError, UnsupportedError):
        return False


def atomic_peers(device: torch.device) -> list[str]:
    """UUIDs of the devices to whose memory `device` adds atomically, itself among them.

    A device that this process does not see cannot be asked about: to that no kernel adds atomically.
    """
    here = device.index
    numbers = range(torch.cuda.device_count())
    return [device_uuid(number) for number in numbers if number == here or native_atomics(here, number)]


def is_gpudirect_capable(memory: torch.Tensor) -> bool:
    """Whether a network card may be given this memory; RDMA libraries fail to register it otherwise."""
    attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
    return bool(call("cuPointerGetAttribute", attribute, memory.data_ptr()))


@cache
def flushes_writes(device: torch.device) -> bool:
    """Whether what a network card has written to the memory of `device` must be flushed before devices of this host
    see it: `flush_writes`. Raises UnsupportedError where the device needs that and cannot.
    """
    names, number = bindings(), device.index or 0
    attributes = names.CUdevice_attribute
    order = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, number)
    if order >= names.CUGPUDirectRDMAWritesOrdering.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES:
        return False
    options = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, number)
    if options & names.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST:
        return True
    raise UnsupportedError(
        f"{device} neither orders what network cards write to its memory nor flushes it: read from other hosts with "
        "Settings(engine='sockets')"
    )


def flush_writes(device: torch.device) -> None:
    """Return when every device of this host sees what network cards have written to the memory of `device`."""
    target = bindings().CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
    scope = bindings().CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
    with torch.cuda.device(device):
        call("cuFlushGPUDirectRDMAWrites", target, scope)


def device_uuid(number: int) -> str:
    """The UUID of a device of this process."""
    return str(torch.cuda.get_device_properties(number).uuid)
