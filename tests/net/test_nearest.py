"""Which RDMA devices a rank uses, in trees of PCI devices as hosts have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from odc.net.engines import nearest, nixl
from odc.net.engines.nearest import address_of, nearest_devices

#: As `nvidia-smi topo -m` and lspci have it on a DGX H100: a switch joins each GPU to one adapter. The two adapters
#: for storage are behind other ports of the processors, and sort before and among the others.
SWITCHES = {
    "pci0000:15": ("0000:1b:00.0", "mlx5_0", "0000:18:00.0"),
    "pci0000:37": ("0000:43:00.0", "mlx5_3", "0000:40:00.0"),
    "pci0000:48": ("0000:52:00.0", "mlx5_4", "0000:4f:00.0"),
    "pci0000:59": ("0000:61:00.0", "mlx5_5", "0000:5e:00.0"),
    "pci0000:97": ("0000:9d:00.0", "mlx5_6", "0000:9a:00.0"),
    "pci0000:b7": ("0000:c3:00.0", "mlx5_9", "0000:c0:00.0"),
    "pci0000:c7": ("0000:d1:00.0", "mlx5_10", "0000:ce:00.0"),
    "pci0000:d7": ("0000:df:00.0", "mlx5_11", "0000:dc:00.0"),
}
STORAGE = {"mlx5_1": ("pci0000:26", "0000:29:00.0"), "mlx5_7": ("pci0000:a7", "0000:aa:00.0")}


class System:
    """A folder as /sys has it: devices, and the links to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "class/infiniband").mkdir(parents=True)
        (folder / "bus/pci/devices").mkdir(parents=True)

    def add(self, way: str, address: str, vendor: str, kind: str) -> Path:
        device = self.folder / "devices" / way / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n")
        (device / "class").write_text(kind + "\n")
        (self.folder / "bus/pci/devices" / address).symlink_to(device)
        return device

    def gpu(self, way: str, address: str) -> None:
        self.add(way, address, "0x10de", "0x030200")

    def adapter(self, way: str, name: str, address: str) -> None:
        device = self.add(way, address, "0x15b3", "0x020700")
        (device / "infiniband" / name).mkdir(parents=True)
        (device / "infiniband" / name / "device").symlink_to(device)
        (self.folder / "class/infiniband" / name).symlink_to(device / "infiniband" / name)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path / "sys")


@pytest.fixture
def hgx(system: System) -> System:
    for bridge, (gpu, name, address) in SWITCHES.items():
        switch = f"{bridge}/{bridge[3:]}:01.0/upstream"
        system.adapter(f"{switch}/to the adapter", name, address)
        system.gpu(f"{switch}/to the GPU", gpu)
        system.add(f"{switch}/to a disk", f"{bridge[3:]}:00.0 disk", "0x144d", "0x010802")
    for name, (bridge, address) in STORAGE.items():
        system.adapter(f"{bridge}/{bridge[3:]}:01.0", name, address)
    return system


def test_each_gpu_of_an_hgx_has_the_adapter_of_its_switch(hgx: System) -> None:
    for gpu, name, _ in SWITCHES.values():
        assert nearest_devices(gpu, hgx.folder) == [name]


def test_four_adapters_of_a_gpu_are_all_used(system: System) -> None:
    """As on AWS's p5, whose GPUs have four EFA devices each."""
    for i in range(2):
        system.gpu(f"pci{i}/switch", f"0000:{i}0:00.0")
        for j in range(4):
            system.adapter(f"pci{i}/switch/{j}", f"rdma{i}{j}", f"0000:{i}{j + 1}:00.0")
    assert nearest_devices("0000:00:00.0", system.folder) == ["rdma00", "rdma01", "rdma02", "rdma03"]
    assert nearest_devices("0000:10:00.0", system.folder) == ["rdma10", "rdma11", "rdma12", "rdma13"]


@pytest.mark.parametrize(
    ("gpus", "adapters", "found"),
    [
        (2, 1, [["a0"], ["a0"]]),
        (2, 2, [["a0"], ["a1"]]),
        (4, 2, [["a0"], ["a1"], ["a0"], ["a1"]]),
        (2, 3, [["a0", "a2"], ["a1"]]),
        (2, 0, [[], []]),
    ],
)
def test_gpus_that_are_as_near_share_adapters_out(
    system: System, gpus: int, adapters: int, found: list[list[str]]
) -> None:
    """As in a virtual machine without a tree."""
    for i in range(gpus):
        system.gpu("pci0000:00", f"0000:00:{i:02x}.0")
    for i in range(adapters):
        system.adapter("pci0000:00", f"a{i}", f"0000:00:{16 + i:02x}.0")
    assert [nearest_devices(f"0000:00:{i:02x}.0", system.folder) for i in range(gpus)] == found


def test_a_gpu_that_the_system_does_not_show_may_use_all(hgx: System) -> None:
    assert len(nearest_devices("0000:77:00.0", hgx.folder)) == len(SWITCHES) + len(STORAGE)


def test_ucx_opens_the_adapters_of_the_current_gpu(
    hgx: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0xC3, 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {5: Properties}.__getitem__)
    monkeypatch.setattr(nixl, "nearest_devices", lambda gpu: nearest_devices(gpu, hgx.folder))
    monkeypatch.setattr(nixl, "_TCP_SETTINGS", {})
    monkeypatch.setenv("NIXL_LOG_LEVEL", "WARN")
    monkeypatch.setenv("UCX_NET_DEVICES", "mine")
    nixl.set_for_ucx("127.0.0.1")
    assert os.environ["UCX_NET_DEVICES"] == "mine"
    monkeypatch.delenv("UCX_NET_DEVICES")
    assert address_of(5) == "0000:c3:00.0"
    nixl.set_for_ucx("127.0.0.1")
    assert os.environ["UCX_NET_DEVICES"] == "mlx5_9:1,lo"
    monkeypatch.delenv("UCX_NET_DEVICES")
    nixl.set_for_ucx("192.0.2.77")
    assert "UCX_NET_DEVICES" not in os.environ and "no interface has 192.0.2.77" in caplog.text
    assert nearest.rdma_devices(hgx.folder)[:2] == ["mlx5_0", "mlx5_1"]
