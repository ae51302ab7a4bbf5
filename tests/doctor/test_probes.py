"""What the probes report of machines and installations that are not here."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.heaps import MemoryFiles
from support.waiting import until

from odc.doctor import gpu, host, network, packages
from odc.doctor.examination import Broken, Missing
from odc.doctor.requirements import by_extra, names_of_extras, version_tuple
from odc.memory import FreeMemory, device_links, driver_memory, plain_x86_64
from odc.memory.driver_calls import DriverError

EXTRAS = [
    "torch<2.14,>=2.11",
    'typer>=0.15; extra == "cli"',
    'rich>=13 ; extra == "cli"',
    'odc-fsdp[cli,plot]; extra == "train"',
    'transformers>=5.0; extra == "train"',
    "matplotlib>=3.9; extra == 'plot'",
    'ruff>=0.15; extra == "lint"',
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`installed(triton="3.7.1", ...)`: these packages are, and no others (underscores stand for dashes)."""

    def install(requires: list[str] | None = None, **versions: str) -> None:
        known = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(package: str) -> str:
            if package not in known:
                raise metadata.PackageNotFoundError(package)
            return known[package]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", lambda _: requires)
        monkeypatch.setattr(metadata, "files", lambda _: [])

    return install


def found_by(probe: Callable[..., str], *arguments: Any) -> str:
    """What a probe finds, with "missing" or "broken" before it where it raises."""
    try:
        return probe(*arguments)
    except Missing as error:
        return f"missing: {error}"
    except Broken as error:
        return f"broken: {error}"


class FakeDriver:
    """libcuda as ctypes sees it."""

    def __init__(self, code: int, name: bytes = b"") -> None:
        self._code, self._name = code, name

    def cuInit(self, flags: int) -> int:
        return self._code

    def cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = self._name

    def cuDriverGetVersion(self, number: Any) -> None:
        number._obj.value = 13010

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = 8


def test_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by(gpu.driver, "libcuda-that-is-nowhere.so.1").startswith(
        "missing: no NVIDIA driver (libcuda-that-is-"
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(0))
    assert gpu.driver() == "CUDA 13.1, 8 devices"
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeDriver(803, b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"))
    assert found_by(gpu.driver) == "broken: cuInit fails: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"


def test_torch_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found_by(gpu.torch_cuda).startswith("missing: torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found_by(gpu.peer_access) == "broken: torch is built for CUDA 13.0 and sees no device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H200"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: 2 not in (i, j))
    assert gpu.torch_cuda() == "CUDA 13.0: 3 x H200"
    assert found_by(gpu.peer_access) == "broken: 4 of 6 pairs cannot (0-2, 1-2, 2-0, 2-1)"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: True)
    monkeypatch.setattr(device_links, "native_atomics", lambda i, j: 2 not in (i, j))
    assert gpu.peer_access() == (
        "all 6 pairs of devices; 4 without native atomics (0-2, 1-2, 2-0, 2-1), where sums take locks"
    )
    monkeypatch.setattr(device_links, "native_atomics", lambda i, j: True)
    assert gpu.peer_access() == "all 6 pairs of devices"


def test_memory_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory files stand for the device's memory."""

    class Refusal(int):
        name = "CUDA_ERROR_NOT_SUPPORTED"

    def refuse(*_: object) -> None:
        raise DriverError("cuMemImportFromShareableHandle", Refusal(801))

    files = MemoryFiles()
    monkeypatch.setattr(gpu, "torch_cuda", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(driver_memory, "allocate", files.allocate)
    monkeypatch.setattr(driver_memory, "map_shared", files.map_shared)
    for capable, found in ((True, "; GPUDirect"), (False, "; no GPUDirect: between hosts it goes by the processor")):
        monkeypatch.setattr(device_links, "is_gpudirect_capable", lambda memory, capable=capable: capable)
        assert gpu.peer_memory() == f"made and mapped{found}"
    monkeypatch.setattr(driver_memory, "map_shared", lambda fd, nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
    assert found_by(gpu.peer_memory) == "broken: cuda:0: what was written to memory is not in its mapping"
    monkeypatch.setattr(driver_memory, "map_shared", refuse)
    gc.collect()
    open_before = len(os.listdir("/proc/self/fd"))
    refusal = "cuMemImportFromShareableHandle: CUDA error 801 (CUDA_ERROR_NOT_SUPPORTED)"
    assert found_by(gpu.peer_memory) == f"broken: cuda:0: {refusal}"
    until(lambda: len(os.listdir("/proc/self/fd")) <= open_before)

    def between(fd: int, nbytes: int, device: torch.device) -> torch.Tensor:
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:device0") and device.index == 2:
            refuse()
        return files.map_shared(fd, nbytes, device)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(driver_memory, "map_shared", between)
    assert found_by(gpu.peer_memory) == f"broken: cuda:0 mapped by cuda:2: {refusal}"
    monkeypatch.setattr(driver_memory, "map_shared", files.map_shared)
    assert gpu.peer_memory().startswith("made and mapped on 3 devices, by all of them; ")


def test_triton(installed: Callable[..., None]) -> None:
    pins = ["filelock", 'triton==3.7.1; platform_system == "Linux"', "tritonx==1.0"]
    installed(pins)
    assert found_by(gpu.triton) == "missing: not installed"
    for requires, version, found in (
        (pins, "3.7.1", "3.7.1"),
        ([], "3.6.0", "3.6.0"),
        (pins, "3.9.0", "broken: 3.9.0, but this torch asks for 3.7.1"),
        (pins, "3.5.1", "broken: 3.5.1, which odc's kernels have never been compiled with"),
    ):
        installed(requires, triton=version)
        assert found_by(gpu.triton) == found


def test_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found_by(gpu.compiler) == "missing: neither gcc nor clang, and CC names no other"
    monkeypatch.setenv("CC", "cc-of-mine")
    assert found_by(gpu.compiler) == "missing: CC=cc-of-mine is not there"
    (tmp_path / "cc-of-mine").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert found_by(gpu.compiler).endswith(f"is there, {tmp_path}/Python.h is not")
    (tmp_path / "Python.h").touch()
    assert gpu.compiler() == f"{tmp_path}/cc-of-mine, {tmp_path}/Python.h"


def test_nvshmem(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    installed()
    assert found_by(gpu.nvshmem) == found_by(gpu.nvshmem4py) == "missing: not installed"
    installed(nvidia_nvshmem_cu12="3.4.5")
    assert found_by(gpu.nvshmem) == "broken: nvidia-nvshmem-cu12 3.4.5, but torch is built for CUDA 13.0"
    installed(nvidia_nvshmem_cu12="3.4.5", nvidia_nvshmem_cu13="3.8.0")
    assert found_by(gpu.nvshmem) == "broken: nvidia-nvshmem-cu13 3.8.0 has no host library"
    assert found_by(gpu.nvshmem4py) == "missing: nvshmem4py-cu13 is not installed"
    (tmp_path / "libnvshmem_host.so.3").write_bytes(b"not a library")
    file = SimpleNamespace(name="libnvshmem_host.so.3", locate=lambda: tmp_path / "libnvshmem_host.so.3")
    monkeypatch.setattr(metadata, "files", lambda _: [file])
    assert found_by(gpu.nvshmem).startswith("broken: nvidia-nvshmem-cu13 3.8.0 does not load")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(nvshmemx_vendor_get_version_info=lambda *_: None))
    assert found_by(gpu.nvshmem).startswith("0.0.0 (nvidia-nvshmem-cu13 3.8.0), without device bitcode; over hosts")
    (tmp_path / "bitcode").touch()
    bitcode = SimpleNamespace(name="libnvshmem_device_sm_90.bc", locate=lambda: tmp_path / "bitcode")
    monkeypatch.setattr(metadata, "files", lambda _: [file, bitcode])
    assert ", with device bitcode; over hosts a thread of it spins on a core of each rank" in found_by(gpu.nvshmem)


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "free_memory", lambda: FreeMemory(64 << 20, "control group /x"))
    assert found_by(host.memory) == "broken: memory file made and mapped; 0.1 GiB free (control group /x)"
    assert found_by(host.dev_shm, tmp_path / "none").startswith("missing")
    for free_mib, well in ((64, False), (65, True)):
        monkeypatch.setattr(os, "statvfs", lambda _, mib=free_mib: SimpleNamespace(f_bavail=mib << 8, f_frsize=4096))
        assert found_by(host.dev_shm).startswith(f"{free_mib} MiB free") is well


def test_without_libatomic_only_the_queue_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "default_atomics", plain_x86_64)
    assert "loads and stores" in host.atomics()
    assert found_by(host.libatomic).startswith("missing") and "libatomic1" in found_by(host.libatomic)


def test_a_mutex_that_forgets_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where robust mutexes are accepted and do nothing: acquired as if the holder had released it."""
    monkeypatch.setattr(host.RobustMutex, "acquire", lambda *_: None)
    assert found_by(host.mutex) == "broken: a holder died and the next one did not learn of it"


def test_sockets_that_pass_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.socket, "recv_fds", lambda *_: (b"x", [], 0, None))
    assert found_by(host.peers) == "broken: no descriptor comes through a unix socket"


def test_interfaces(tmp_path: Path) -> None:
    assert found_by(network.interfaces, tmp_path) == "missing: no interface but loopback is up"
    for name, state, speed in (("lo", "up", ""), ("eth0", "up", "25000"), ("eth1", "down", ""), ("eth2", "up", "-1")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(state + "\n")
        (tmp_path / "net" / name / "speed").write_text(speed + "\n")
    assert network.interfaces(tmp_path) == "eth0 (25 Gbit/s), eth2 (speed unknown)"


def test_rdma(tmp_path: Path) -> None:
    dev = tmp_path / "dev"
    assert found_by(network.rdma, tmp_path, dev) == "missing: no InfiniBand or RoCE device"
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("1: DOWN\n")
    assert found_by(network.rdma, tmp_path, dev).endswith("the port of mlx5_0 is not active")
    (port / "state").write_text("4: ACTIVE\n")
    assert found_by(network.rdma, tmp_path, dev).endswith("infiniband has no uverbs")
    (dev / "infiniband").mkdir(parents=True)
    (dev / "infiniband" / "uverbs0").touch()
    assert network.rdma(tmp_path, dev) == "mlx5_0 (400 Gb/sec (4X NDR))"


def test_nixl(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    assert found_by(network.nixl) == "missing: not installed"
    installed(nixl_cu13="1.5.1")
    files = [f"ucx/libuct_{name}.so.0" for name in ("cma", "ib_mlx5", "cuda", "ib")]
    monkeypatch.setattr(metadata, "files", lambda _: files)
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", SimpleNamespace())
    assert network.nixl() == "nixl-cu13 1.5.1, UCX for TCP, InfiniBand and RoCE, mlx5, device memory"
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", None)
    assert "it does not load" in found_by(network.nixl)
    files.pop()
    assert found_by(network.nixl).endswith("not for InfiniBand, as PyPI's wheels are")


def test_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, why in (("sockets", "plain TCP"), ("nixl", "RDMA")):
        monkeypatch.setattr(network, "choose_engine", lambda wanted, name=name: name)
        assert network.engine().startswith(name) and why in network.engine()


@pytest.mark.parametrize(
    ("name", "release", "well"), [("Linux", "6.1.0-13", True), ("Linux", "4.19.1", False), ("Darwin", "24.1.0", False)]
)
def test_system(name: str, release: str, well: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.platform, "system", lambda: name)
    monkeypatch.setattr(packages.platform, "release", lambda: release)
    assert found_by(packages.system).startswith(name) is well


def test_a_torch_that_odc_does_not_know_is_named() -> None:
    program = """
import torch
del torch.autograd._unsafe_preserve_version_counter
from odc.doctor.packages import torch_itself
torch_itself()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Broken: odc supports torch" in done.stderr
    assert "_unsafe_preserve_version_counter" in done.stderr


def test_extras(installed: Callable[..., None]) -> None:
    assert by_extra(EXTRAS) == {
        "cli": [("typer", ">=0.15"), ("rich", ">=13")],
        "train": [("typer", ">=0.15"), ("rich", ">=13"), ("matplotlib", ">=3.9"), ("transformers", ">=5.0")],
        "plot": [("matplotlib", ">=3.9")],
        "lint": [("ruff", ">=0.15")],
    }
    installed(EXTRAS, typer="0.15.1", rich="12.9", matplotlib="3.10")
    assert names_of_extras() == ["cli", "train", "plot"], "developers' extras are not the user's"
    assert packages.extra("plot") == "matplotlib"
    assert found_by(packages.extra, "train") == "missing: rich 12.9 is older than 13, transformers is not installed"


def entry(value: str, error: Exception | None = None) -> Any:
    def load() -> Any:
        if error:
            raise error
        return SimpleNamespace(TESTED="0.9", kinds=lambda: ["actor", "critic"])

    return SimpleNamespace(value=value, load=load)


def test_verl_plugin(installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    installed()
    assert found_by(packages.verl_plugin) == "missing: verl is not installed"
    other, plugin = entry("other.plugin"), entry("odc.integrations.verl.plugin")
    for verl, entries, found in (
        ("0.9.3", [other], "missing: verl 0.9.3 is there, odc's plugin is not registered"),
        ("0.9.3", [other, plugin], "verl 0.9.3: strategy odc for actor and critic"),
        ("0.10.1", [plugin], "verl 0.10.1 (tested with 0.9 only): strategy odc for actor and critic"),
        ("0.9.3", [entry("odc.x", ImportError("no"))], "broken: odc.x does not load: ImportError: no (verl 0.9.3)"),
    ):
        installed(verl=verl)
        monkeypatch.setattr(metadata, "entry_points", lambda group, entries=entries: entries)
        assert found_by(packages.verl_plugin) == found


def test_versions() -> None:
    texts = ("2.13.0+cpu", "3.7.1", "6.1.0-13-amd64", "2.4rc1")
    assert [version_tuple(text)[:3] for text in texts] == [(2, 13, 0), (3, 7, 1), (6, 1, 0), (2, 4)]
