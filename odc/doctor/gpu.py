"""Probes of the GPU side, each layer alone from the driver up: driver, torch, memory for peers, Triton, NVSHMEM."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from odc.doctor.examination import Broken, Missing
from odc.doctor.requirements import version_tuple
from odc.provenance import version_of

if TYPE_CHECKING:
    import torch

_WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_BITCODE = r"libnvshmem_device(_sm_\d+)?\.bc$"  # from 3.8 on there is one file for each of several architectures


def driver(library: str = "libcuda.so.1") -> str:
    """NVIDIA's driver, asked without torch."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        raise Missing(f"no NVIDIA driver ({error})") from None
    code = cuda.cuInit(0)
    if code:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise Broken(f"cuInit fails: {(name.value or str(code).encode()).decode()}")
    version, devices = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(devices))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {devices.value} devices"


def torch_cuda() -> str:
    """Whether torch was built for CUDA and sees devices."""
    import torch

    built = torch.version.cuda
    if built is None:
        raise Missing(f"torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise Broken(f"torch is built for CUDA {built} and sees no device")
    names = [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]
    return f"CUDA {built}: " + ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def peer_access() -> str:
    """Whether the devices reach each other's memory, and add to it atomically."""
    import torch

    from odc.memory.device_links import native_atomics

    torch_cuda()
    devices = range(torch.cuda.device_count())
    pairs = [(i, j) for i in devices for j in devices if i != j]
    cut = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if cut:
        raise Broken(f"{len(cut)} of {len(pairs)} pairs cannot ({', '.join(cut[:4])})")
    locked = [f"{i}-{j}" for i, j in pairs if not native_atomics(i, j)]
    how = f"; {len(locked)} without native atomics ({', '.join(locked[:4])}), where sums take locks" if locked else ""
    return f"all {len(pairs)} pairs of devices{how}"


def peer_memory() -> str:
    """Makes memory on each device as odc's CUDA heap has it, and maps it on each, as peers do; whether network cards
    reach it.
    """
    import torch

    from odc.memory import device_links, driver_memory
    from odc.memory.driver_calls import DriverError

    torch_cuda()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    capable, faults = True, dict[str, list[str]]()
    for maker in devices:
        try:
            made, descriptor = driver_memory.allocate(4096, maker)
        except DriverError as error:
            faults.setdefault(str(error), []).append(str(maker))
            continue
        try:
            made.fill_(7)
            torch.cuda.synchronize(maker)
            capable &= device_links.is_gpudirect_capable(made)
            for user in devices:
                fault = _mapping_fault(descriptor, made.numel(), user)
                if fault:
                    faults.setdefault(fault, []).append(f"{maker} mapped by {user}" if maker != user else str(maker))
        finally:
            os.close(descriptor)
    if faults:
        raise Broken("; ".join(f"{', '.join(pairs[:4])}: {fault}" for fault, pairs in faults.items()))
    by = f" on {len(devices)} devices, by all of them" if len(devices) > 1 else ""
    capability = "GPUDirect" if capable else "no GPUDirect: between hosts it goes by the processor"
    return f"made and mapped{by}; {capability}"


def _mapping_fault(descriptor: int, nbytes: int, user: torch.device) -> str:
    """What is wrong with memory of sevens as device `user` maps it; empty if nothing."""
    from odc.memory import driver_memory
    from odc.memory.driver_calls import DriverError

    try:
        mapped = driver_memory.map_shared(descriptor, nbytes, user)
    except DriverError as error:
        return str(error)
    return "" if bool((mapped == 7).all()) else "what was written to memory is not in its mapping"


def triton() -> str:
    """Whether Triton is installed, new enough, and the version that torch asks for."""
    version = version_of("triton")
    if version is None:
        raise Missing("not installed")
    if version_tuple(version) < (3, 6):
        raise Broken(f"{version}, which odc's kernels have never been compiled with")
    pins = [re.match(r"triton\s*==\s*([\w.]+)", line) for line in metadata.requires("torch") or ()]
    pinned = next((pin[1] for pin in pins if pin), version)
    if pinned != version:
        raise Broken(f"{version}, but this torch asks for {pinned}")
    return version


def compiler() -> str:
    """The C compiler and the headers of Python with which Triton builds its driver, at the first launch of a kernel."""
    chosen = os.environ.get("CC")
    found = shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise Missing(f"CC={chosen} is not there" if chosen else "neither gcc nor clang, and CC names no other")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not headers.exists():
        raise Missing(f"{found} is there, {headers} is not")
    return f"{found}, {headers}"


def nvshmem() -> str:
    """NVSHMEM's host library, whether it fits torch, and whether kernels could call it, which the drop-in's do not."""
    name, version = _nvshmem_wheel()
    library = _file(name, r"libnvshmem_host\.so\.\d+$")
    if library is None:
        raise Broken(f"{name} {version} has no host library")
    try:
        numbers = [ctypes.c_int() for _ in range(3)]
        ctypes.CDLL(str(library)).nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    except (OSError, AttributeError) as error:  # it needs libcuda.so.1 and a CUDA runtime
        raise Broken(f"{name} {version} does not load: {error}") from None
    calls = "with" if _file(name, _BITCODE) else "without"
    loaded = ".".join(str(number.value) for number in numbers)
    spins = "over hosts a thread of it spins on a core of each rank"
    return f"{loaded} ({name} {version}), {calls} device bitcode; {spins}"


def nvshmem4py() -> str:
    """The Python API that fits NVSHMEM's wheel."""
    package = _nvshmem_wheel()[0].replace("nvidia-nvshmem", "nvshmem4py")
    version = version_of(package)
    if version is None:
        raise Missing(f"{package} is not installed")
    import nvshmem.core  # noqa: F401

    return version


def _nvshmem_wheel() -> tuple[str, str]:
    """NVSHMEM's wheel for torch's CUDA, and its version."""
    import torch

    found = [(name, version) for name in _WHEELS if (version := version_of(name)) is not None]
    if not found:
        raise Missing("not installed")
    cuda = (torch.version.cuda or "").split(".")[0]
    fitting = [wheel for wheel in found if not cuda or wheel[0].endswith(f"cu{cuda}")]
    if not fitting:
        raise Broken(f"{found[0][0]} {found[0][1]}, but torch is built for CUDA {torch.version.cuda}")
    return fitting[0]


def _file(package: str, pattern: str) -> Path | None:
    paths = (Path(str(file.locate())) for file in metadata.files(package) or () if re.search(pattern, file.name))
    return next((path for path in paths if path.exists()), None)
