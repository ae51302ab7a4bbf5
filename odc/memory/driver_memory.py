"""Device memory that other processes map, made by CUDA's driver, and the tensors over it.

A process makes memory, exports a descriptor of it, and hands that to its peers over a Unix socket; they map the same
memory. As with a memory file, the descriptor and each mapping keep the memory alive, also after the end of the process
that made it. A network card may read and write it (GPUDirect) where the device can do that.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from contextlib import ExitStack
from typing import Any

import torch

from odc.memory.driver_calls import bindings, call
from odc.memory.layout import round_up


def allocate(nbytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """uint8 [nbytes] on `device`, not filled, and a descriptor for other processes, which the caller owns.

    Raises DriverError, whose name is CUDA_ERROR_OUT_OF_MEMORY if the device does not have that much.
    """
    wanted = _properties(device)
    handle = call("cuMemCreate", _size(nbytes, wanted), wanted, 0)
    with ExitStack() as undo:
        undo.callback(call, "cuMemRelease", handle)
        fd = int(call("cuMemExportToShareableHandle", handle, wanted.requestedHandleTypes, 0))
        os.set_inheritable(fd, False)
        undo.pop_all()
    try:
        return _mapped(handle, nbytes, device, writable=True), fd
    except BaseException:
        os.close(fd)
        raise


def map_shared(fd: int, nbytes: int, device: torch.device, *, writable: bool = True) -> torch.Tensor:
    """uint8 [nbytes]: the memory of another process, whose descriptor `fd` stays the caller's, for use by `device`.

    torch takes it for memory of `device`, on whichever device it lies. If not `writable`, as for readers outside the
    job, a kernel or copy that writes to it faults, which ends the use of CUDA in this process. Raises DriverError.
    """
    handle = call("cuMemImportFromShareableHandle", fd, _properties(device).requestedHandleTypes)
    return _mapped(handle, nbytes, device, writable=writable)


def _properties(device: torch.device) -> Any:
    """What memory for peers is like on `device`."""
    driver = bindings()
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device.index
    wanted.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    can = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    wanted.allocFlags.gpuDirectRDMACapable = int(bool(call("cuDeviceGetAttribute", can, device.index)))
    return wanted


def _size(nbytes: int, wanted: Any) -> int:
    """Bytes that the driver makes for `nbytes`."""
    least = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return round_up(nbytes, int(call("cuMemGetAllocationGranularity", wanted, least)))


def _mapped(handle: Any, nbytes: int, device: torch.device, *, writable: bool) -> torch.Tensor:
    """uint8 [nbytes] over the memory of `handle`, which is given up: the mapping keeps the memory."""
    driver, wanted = bindings(), _properties(device)
    size = _size(nbytes, wanted)
    rights = driver.CUmemAccess_flags
    access = driver.CUmemAccessDesc()
    access.location = wanted.location
    access.flags = rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else rights.CU_MEM_ACCESS_FLAGS_PROT_READ
    with ExitStack() as always, ExitStack() as undo:
        always.callback(call, "cuMemRelease", handle)
        address = int(call("cuMemAddressReserve", size, 0, 0, 0))
        undo.callback(call, "cuMemAddressFree", address, size)
        call("cuMemMap", address, size, 0, handle, 0)
        undo.callback(call, "cuMemUnmap", address, size)
        call("cuMemSetAccess", address, size, [access], 1)
        undo.pop_all()
    memory = AtAddress(address, nbytes)
    # The mapping ends with `memory`, but not at interpreter exit: daemonic threads may still use a view then, and the
    # driver unmaps at the process's end.
    weakref.finalize(memory, _unmap, address, size, device, os.getpid()).atexit = False
    tensor = torch.as_tensor(memory, device=device)
    if tensor.data_ptr() != address:
        raise RuntimeError(f"torch {torch.__version__} copies memory of another device instead of viewing it")
    return tensor


class AtAddress:
    """Device memory, as torch takes it: what every tensor over it holds."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }


def _unmap(address: int, size: int, device: torch.device, pid: int) -> None:
    """Give a mapping back once the device is done with it; on any thread, and never raises.

    The thread waits without Python's lock, so the daemon of this process goes on meanwhile: what the device does may
    wait for a peer that waits for it. What cannot be waited for stays mapped until the process ends: a broken device,
    and one of which this thread captures a CUDA graph, which the wait would end.
    """
    if os.getpid() != pid:  # a forked child, in which CUDA does not work
        return
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
            call("cuMemUnmap", address, size)
            call("cuMemAddressFree", address, size)
