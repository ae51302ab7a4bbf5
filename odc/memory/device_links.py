"""What CUDA's driver says of the links between this host's devices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def native_atomics(number: int, other: int, library: str = "libcuda.so.1") -> bool:
    """Whether atomic operations of a device on another's memory are atomic: over NVLink they are, over PCIe not.

    Devices by their numbers in this process. Where the driver does not answer, they count as not atomic.
    """
    value = ctypes.c_int()
    try:
        ask = ctypes.CDLL(library).cuDeviceGetP2PAttribute
    except (OSError, AttributeError):
        return False
    return ask(ctypes.byref(value), _NATIVE_ATOMICS, number, other) == 0 and value.value != 0


def adds_atomically(device: torch.device, others: Sequence[str]) -> bool:
    """Whether `device` adds atomically to the memory of the devices with these UUIDs; itself may be among them.

    A device that this process does not see cannot be asked about: to that no kernel adds atomically.
    """
    numbers = {device_uuid(number): number for number in range(torch.cuda.device_count())}
    here = device.index
    return all(
        other in numbers and (numbers[other] == here or native_atomics(here, numbers[other])) for other in others
    )


def device_uuid(number: int) -> str:
    """The UUID of a device of this process, empty where torch does not have it."""
    return str(getattr(torch.cuda.get_device_properties(number), "uuid", ""))
