from __future__ import annotations

from pathlib import Path

from odc.doctor import State
from odc.doctor.network import network


def nic(root: Path, name: str, state: str, speed: str | None) -> None:
    folder = root / "net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(state + "\n")
    if speed is not None:
        (folder / "speed").write_text(speed + "\n")


def test_nics_and_rdma(tmp_path: Path) -> None:
    nic(tmp_path, "lo", "unknown", None)
    nic(tmp_path, "eth0", "up", "25000")
    nic(tmp_path, "eth1", "down", "1000")
    nic(tmp_path, "eth2", "up", "-1")
    (tmp_path / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "rate").write_text("400 Gb/sec (4X NDR)\n")
    nics, rdma, _ = network(tmp_path)
    assert (nics.state, nics.found) == (State.OK, "eth0 (25 Gbit/s), eth2 (speed unknown)")
    assert (rdma.state, rdma.found) == (State.OK, "mlx5_0 (400 Gb/sec (4X NDR))")


def test_nothing_but_loopback(tmp_path: Path) -> None:
    nic(tmp_path, "lo", "unknown", None)
    nics, rdma, nixl = network(tmp_path)
    assert nics.state is rdma.state is State.ABSENT
    assert {nics.use, rdma.use, nixl.use} == {"network", "rdma"}, "one host needs none of it"


def test_no_sys(tmp_path: Path) -> None:
    assert [one.state for one in network(tmp_path / "none")[:2]] == [State.ABSENT, State.ABSENT]
