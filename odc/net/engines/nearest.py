"""Which RDMA devices a rank uses: those that are nearest to its GPU in the host's tree of PCI devices.

Without a choice UCX takes the same device for every rank of a host, and eight GPUs share the speed of one. On a host
with an RDMA device behind each GPU's PCIe switch each rank gets its own; where several GPUs are as near to several
devices, as in a virtual machine that shows no tree, they share them out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor, and class, of a GPU
_SYSTEM = Path("/sys")


def rdma_devices(system: Path = _SYSTEM) -> list[str]:
    """Names of this host's InfiniBand, RoCE and EFA devices."""
    return sorted(path.name for path in (system / "class/infiniband").glob("*"))


def nearest_devices(gpu: str, system: Path = _SYSTEM) -> list[str]:
    """Names of the RDMA devices for the GPU at PCI address `gpu` ("0000:18:00.0"), as sysfs under `system` has them.

    Of devices that are as near to other GPUs too each gets its share, at least one. Every process of the host finds
    the same. All devices where `system` does not know the GPU; empty where there are none.
    """
    devices = {name: _path(system / "class/infiniband" / name / "device") for name in rdma_devices(system)}
    gpus = {one: _nearest(_path(system / "bus/pci/devices" / one), devices) for one in _gpus(system)}
    if not devices or gpu not in gpus:
        return list(devices)
    near = gpus[gpu]
    sharing = [one for one, theirs in gpus.items() if theirs == near]
    place = sharing.index(gpu)
    return near[place :: len(sharing)] or [near[place % len(near)]]


def address_of(device: int) -> str:
    """The PCI address of CUDA device `device` of this process."""
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _gpus(system: Path) -> list[str]:
    """The PCI addresses of the host's GPUs, also of those that this process may not use."""
    folders = sorted((system / "bus/pci/devices").glob("*"))
    return [one.name for one in folders if _reads(one / "vendor", _NVIDIA) and _reads(one / "class", _DISPLAY)]


def _reads(file: Path, begin: str) -> bool:
    return file.is_file() and file.read_text().startswith(begin)


def _path(folder: Path) -> tuple[str, ...]:
    """The way to a device from the root of the tree: host bridge, switches, the device itself."""
    return folder.resolve().parts


def _nearest(gpu: tuple[str, ...], devices: dict[str, tuple[str, ...]]) -> list[str]:
    """Those that share the longest way with the GPU."""
    shared = {name: sum(_common(gpu, path)) for name, path in devices.items()}
    return [name for name, length in shared.items() if length == max(shared.values())]


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> list[bool]:
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal[: equal.index(False)] if False in equal else equal
