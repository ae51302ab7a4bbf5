"""Probes of the GPU side, each layer alone from the driver up: driver, torch, Triton, symmetric memory, NVSHMEM."""

from __future__ import annotations

import ctypes
import re
from importlib import metadata
from pathlib import Path

from odc.doctor.finding import Finding, absent, broken, ok, version_of, version_tuple

_WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_BITCODE = "libnvshmem_device.bc"
#: NVSHMEM 3.8 and newer ship bitcode for each architecture only, which neither torch's finder nor ours accepts.
_PLAIN_BITCODE_BEFORE = (3, 8)


def driver(library: str = "libcuda.so.1") -> list[Finding]:
    """NVIDIA's driver, asked without torch."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        return [absent("driver", f"no NVIDIA driver ({error})", "for CUDA: install NVIDIA's driver", "cuda")]
    code = cuda.cuInit(0)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        name = (text.value or str(code).encode()).decode()
        do = _DRIVER_CURES.get(name, "see `nvidia-smi` and dmesg")
        return [broken("driver", f"cuInit fails: {name}", do, "cuda")]
    number, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    said = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}, {count.value} devices"
    if not count.value:
        return [broken("driver", said, "make a device visible (CUDA_VISIBLE_DEVICES, docker run --gpus all)", "cuda")]
    return [ok("driver", said, "cuda")]


_DRIVER_CURES = {
    "CUDA_ERROR_NO_DEVICE": "make a device visible (CUDA_VISIBLE_DEVICES, docker run --gpus all)",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kernel module and driver library differ: reboot, or install them alike",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove the forward-compatibility package, this device needs none",
}


def torch_cuda() -> list[Finding]:
    """Whether torch was built for CUDA, sees devices, and they reach each other's memory."""
    import torch

    built = torch.version.cuda
    if built is None:
        said = f"torch {torch.__version__} is built without CUDA"
        return [absent("torch on CUDA", said, "install torch from an index with CUDA builds (TORCH_INDEX)", "cuda")]
    if not torch.cuda.is_available():
        do = f"a driver for CUDA {built} or newer, and a visible device (see driver above)"
        return [broken("torch on CUDA", f"torch is built for CUDA {built} and sees no device", do, "cuda")]
    names = [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]
    said = f"CUDA {built}: " + ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    pairs = [(i, j) for i in range(len(names)) for j in range(len(names)) if i != j]
    cut = [(i, j) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    found = [ok("torch on CUDA", said, "cuda")]
    if cut:
        listed = ", ".join(f"{i}-{j}" for i, j in cut[:4])
        do = "ranks on them need NVSHMEM, or run on devices joined by NVLink or one PCIe root"
        found.append(broken("peer access", f"{len(cut)} of {len(pairs)} pairs cannot ({listed})", do, "cuda"))
    return [*found, _symmetric()]


def _symmetric() -> Finding:
    """Allocates by torch's symmetric memory, which holds odc's CUDA heap."""
    from odc.memory._torch_symmetric import allocate

    import torch  # isort: skip

    try:
        tensor = allocate(4096, torch.device("cuda", 0))
        tensor.zero_()
        torch.cuda.synchronize()
    except (RuntimeError, ImportError) as error:
        said = str(error).splitlines()[0]
        return broken("symmetric memory", said, "a driver and device with CUDA's virtual memory management", "cuda")
    return ok("symmetric memory", "allocates", "cuda")


def triton() -> list[Finding]:
    """Whether Triton is installed, new enough, and the version that torch asks for."""
    version = version_of("triton")
    if version is None:
        do = "for odc's own kernels: pip install triton (the version that torch pins)"
        return [absent("Triton", "not installed", do, "kernels")]
    pinned = _pinned("torch", "triton")
    if version_tuple(version) < (3, 6):
        said = f"{version}, which odc's kernels have never been compiled with"
        return [broken("Triton", said, "triton 3.6 or newer, as torch 2.11 and newer bring along", "kernels")]
    if pinned and pinned != version:
        said = f"{version}, but this torch asks for {pinned}"
        return [broken("Triton", said, f"pip install triton=={pinned}", "kernels")]
    return [ok("Triton", version, "kernels")]


def nvshmem() -> list[Finding]:
    """NVSHMEM's host library, device bitcode and Python API, and whether their versions fit torch and each other."""
    import torch

    found = [(name, version) for name in _WHEELS if (version := version_of(name)) is not None]
    cuda = (torch.version.cuda or "").split(".")[0]
    if not found:
        cuda = cuda or "13"
        do = f"for ranks beyond one host's NVLink: pip install 'nvidia-nvshmem-cu{cuda}<3.8' nvshmem4py-cu{cuda}"
        return [absent("NVSHMEM", "not installed", do, "nvshmem")]
    fitting = [pair for pair in found if not cuda or pair[0].endswith(f"cu{cuda}")]
    if not fitting:
        said = f"{found[0][0]} {found[0][1]}, but torch is built for CUDA {torch.version.cuda}"
        return [broken("NVSHMEM", said, f"pip install 'nvidia-nvshmem-cu{cuda}<3.8'", "nvshmem")]
    name, version = fitting[0]
    return [_library(name, version), _bitcode(name, version), _python_api(name)]


def _library(name: str, version: str) -> Finding:
    path = _file(name, r"libnvshmem_host\.so\.\d+$")
    if path is None:
        return broken("NVSHMEM library", f"{name} {version} has none", f"reinstall {name}", "nvshmem")
    try:
        library = ctypes.CDLL(str(path))
        numbers = [ctypes.c_int() for _ in range(3)]
        library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    except (OSError, AttributeError) as error:
        return broken("NVSHMEM library", f"{name} {version} does not load: {error}", _CUDA_RUNTIME, "nvshmem")
    said = ".".join(str(number.value) for number in numbers)
    return ok("NVSHMEM library", f"{said} ({name} {version})", "nvshmem")


_CUDA_RUNTIME = "it needs NVIDIA's driver (libcuda.so.1) and CUDA runtime: a torch with CUDA brings the latter"


def _bitcode(name: str, version: str) -> Finding:
    if _file(name, re.escape(_BITCODE) + "$") is not None:
        return ok("NVSHMEM bitcode", f"{_BITCODE} of {version}", "nvshmem")
    said = f"{name} {version} has no {_BITCODE}"
    if version_tuple(version) >= _PLAIN_BITCODE_BEFORE:
        said += " (from 3.8 on there is one file for each architecture)"
    return broken("NVSHMEM bitcode", said, f"pip install '{name}<3.8'", "nvshmem")


def _python_api(name: str) -> Finding:
    package = name.replace("nvidia-nvshmem", "nvshmem4py")
    version = version_of(package)
    if version is None:
        return absent("nvshmem4py", "not installed", f"pip install {package}", "nvshmem")
    try:
        import nvshmem.core  # noqa: F401
    except Exception as error:
        said = f"{version} does not import: {type(error).__name__}: {error}"
        return broken("nvshmem4py", said, f"pip install --upgrade {package}", "nvshmem")
    return ok("nvshmem4py", version, "nvshmem")


def _pinned(package: str, needed: str) -> str | None:
    """The exact version of `needed` that `package` asks for."""
    pattern = rf"{re.escape(needed)}\s*==\s*([\w.]+)"
    return next((match[1] for one in metadata.requires(package) or () if (match := re.match(pattern, one))), None)


def _file(package: str, pattern: str) -> Path | None:
    paths = (Path(str(file.locate())) for file in metadata.files(package) or () if re.search(pattern, file.name))
    return next((path for path in paths if path.exists()), None)
