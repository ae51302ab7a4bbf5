"""What `odc doctor` checks: for each line of its report a name, what needs it, a probe, and the advice if it fails."""

from __future__ import annotations

from dataclasses import dataclass

from odc.doctor.requirements import names_of_extras
from odc.errors import install

#: What a check may be needed for, and what that means. The name of an extra is one as well.
USES = {
    "run": "odc on this host's processors",
    "cuda": "odc on GPUs of one host",
    "nvshmem": "GPUs beyond one host's NVLink",
    "kernels": "odc's own Triton kernels",
    "launcher": "ranks that srun, Kubernetes, torchrun or the like have started",
    "network": "ranks on several hosts",
    "rdma": "InfiniBand, RoCE, EFA or device memory between hosts",
    "queue": "queue_bytes: one queue of microbatches for all ranks",
    "loaders": "data loaders with workers",
    "verl": "reinforcement learning with verl",
}

#: Uses that the report shows together; extras, which are all other uses, come last.
GROUPS = {
    "Run here": ("run", "loaders", "queue"),
    "On GPUs": ("cuda", "nvshmem"),
    "More speed": ("kernels",),
    "On several hosts": ("launcher", "network", "rdma"),
}


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    what: str
    use: str  # what needs it
    probe: str  # "module:function"; what follows a further colon is its argument
    advice: str  # what to install or change where the probe fails, hangs or ends its process
    deadline_s: float = 120.0  # after which the probe counts as hanging


_HOST, _GPU, _NETWORK, _PACKAGES, _LAUNCHER = (
    f"odc.doctor.{name}" for name in ("host", "gpu", "network", "packages", "launcher")
)
_TORCH = "pip install 'torch>=2.11,<2.16', built with gloo, as wheels are"
_SANDBOX = "allow memfd_create and mmap in this container or sandbox (seccomp profile), and 256 MiB of memory"
_MUTEX = "a C library with robust process-shared mutexes (glibc; musl 1.2 or newer), in a sandbox that allows them"
_PEERS = (
    "allow pidfd_open or mount /proc, and allow abstract unix sockets with SCM_RIGHTS; "
    "containers of one machine share its network and PID namespaces, or count as hosts"
)
_DRIVER = (
    "install NVIDIA's driver and make a device visible (CUDA_VISIBLE_DEVICES, docker run --gpus all); "
    "SYSTEM_DRIVER_MISMATCH: reboot; COMPAT_NOT_SUPPORTED: remove the forward-compatibility package; "
    "else see `nvidia-smi` and dmesg"
)
_TORCH_CUDA = "install torch from an index with CUDA builds (TORCH_INDEX) that the driver above is new enough for"
_PEER_ACCESS = "ranks of one host need devices that are joined by NVLink or one PCIe root"
_COMPILER = (
    "install gcc and Python's headers (Debian: gcc, python3-dev); without them odc copies and adds by torch's kernels"
)
_NVSHMEM = "for Settings(memory='nvshmem'): pip install nvidia-nvshmem-cu13 (cu12 for CUDA 12)"
_RDMA = (
    "nothing on one host; across hosts TCP is used, which is slow: see that /dev/infiniband is in the container "
    "(docker run --device=/dev/infiniband) and that `ibstat` shows an active port"
)
_PEER_MEMORY = (
    "a driver and device with CUDA's virtual memory management and POSIX descriptors (`nvidia-smi` names both), and "
    "cuda-bindings, which a torch that is built for CUDA brings along"
)
_NIXL = (
    f"for InfiniBand, RoCE, EFA or device memory between hosts: {install('nixl')}, which works without CUDA; "
    "plain TCP needs nothing"
)
_VERL = "for reinforcement learning: a version of verl that this odc knows, and `pip install -e .` in odc's checkout"

_CHECKS = (
    Check("system", "run", f"{_PACKAGES}:system", "odc needs Linux 5.3 or newer (memfd, pidfd_open, abstract sockets)"),
    Check("torch", "run", f"{_PACKAGES}:torch_itself", _TORCH),
    Check("shared memory", "run", f"{_HOST}:memory", _SANDBOX),
    Check("/dev/shm", "loaders", f"{_HOST}:dev_shm", "docker run --ipc=host or --shm-size=8g, or num_workers=0"),
    Check("atomics", "run", f"{_HOST}:atomics", "install libatomic (Debian: libatomic1)"),
    Check("libatomic", "queue", f"{_HOST}:libatomic", "odc runs without it, but not its queue: install libatomic1"),
    Check("robust mutex", "run", f"{_HOST}:mutex", _MUTEX),
    Check("peers", "run", f"{_HOST}:peers", _PEERS),
    Check("driver", "cuda", f"{_GPU}:driver", _DRIVER),
    Check("torch on CUDA", "cuda", f"{_GPU}:torch_cuda", _TORCH_CUDA),
    Check("peer access", "cuda", f"{_GPU}:peer_access", _PEER_ACCESS),
    Check("peer memory", "cuda", f"{_GPU}:peer_memory", _PEER_MEMORY),
    Check("Triton", "kernels", f"{_GPU}:triton", "pip install the version of triton that torch pins, 3.6 or newer"),
    Check("C compiler", "kernels", f"{_GPU}:compiler", _COMPILER),
    Check("NVSHMEM", "nvshmem", f"{_GPU}:nvshmem", _NVSHMEM),
    Check("nvshmem4py", "nvshmem", f"{_GPU}:nvshmem4py", "pip install nvshmem4py-cu13 (cu12 for CUDA 12)"),
    Check("launcher", "launcher", f"{_LAUNCHER}:launcher", "docs/clusters.md has what each launcher needs"),
    Check("network", "network", f"{_NETWORK}:interfaces", "nothing on one host; else bring an interface up"),
    Check("RDMA", "rdma", f"{_NETWORK}:rdma", _RDMA),
    Check("NIXL", "rdma", f"{_NETWORK}:nixl", _NIXL),
    Check("engine", "network", f"{_NETWORK}:engine", f"{install('nixl')}, which works without CUDA"),
)


def all_checks() -> list[Check]:
    """Every check, with one for each extra of the installed odc."""
    extras = [Check(f"extra {name}", name, f"{_PACKAGES}:extra:{name}", install(name)) for name in names_of_extras()]
    return [*_CHECKS, *extras, Check("verl plugin", "verl", f"{_PACKAGES}:verl_plugin", _VERL, 240.0)]


def known_uses() -> set[str]:
    """The uses that checks may be needed for."""
    return {*USES, *names_of_extras()}
