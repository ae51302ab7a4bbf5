from __future__ import annotations

from pathlib import Path

import pytest

from odc.doctor import State, network
from odc.errors import UnsupportedError

UCX = "nixl_cu13.libs/ucx/libuct_{}.so.0.0.0"


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    return tmp_path / "sys"


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "dev" / "infiniband").mkdir(parents=True)
    (tmp_path / "dev" / "infiniband" / "uverbs0").touch()
    return tmp_path / "dev"


def nic(root: Path, name: str, state: str, speed: str | None) -> None:
    folder = root / "net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(state + "\n")
    if speed is not None:
        (folder / "speed").write_text(speed + "\n")


def adapter(root: Path, state: str = "4: ACTIVE") -> None:
    port = root / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text(state + "\n")


def test_nics_and_rdma(sys: Path, dev: Path) -> None:
    nic(sys, "lo", "unknown", None)
    nic(sys, "eth0", "up", "25000")
    nic(sys, "eth1", "down", "1000")
    nic(sys, "eth2", "up", "-1")
    adapter(sys)
    nics, rdma, *_ = network.network(sys, dev)
    assert (nics.state, nics.found) == (State.OK, "eth0 (25 Gbit/s), eth2 (speed unknown)")
    assert (rdma.state, rdma.found) == (State.OK, "mlx5_0 (400 Gb/sec (4X NDR))")


def test_rdma_that_cannot_be_used(sys: Path, dev: Path, tmp_path: Path) -> None:
    adapter(sys, "1: DOWN")
    rdma = network.network(sys, dev)[1]
    assert rdma.state is State.BROKEN and "mlx5_0 is not active" in rdma.found
    adapter(tmp_path / "up")
    rdma = network.network(tmp_path / "up", tmp_path / "nothing")[1]
    assert rdma.state is State.BROKEN and "uverbs" in rdma.found and "/dev/infiniband" in rdma.do


def test_nothing_but_loopback(sys: Path, dev: Path) -> None:
    nic(sys, "lo", "unknown", None)
    nics, rdma, nixl, engine = network.network(sys, dev)
    assert nics.state is rdma.state is State.ABSENT
    assert {nics.use, rdma.use, nixl.use, engine.use} == {"network", "rdma"}, "one host needs none of it"


def test_no_sys(sys: Path, dev: Path) -> None:
    assert [one.state for one in network.network(sys / "none", dev)[:2]] == [State.ABSENT, State.ABSENT]


def test_wheels_and_what_their_ucx_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "version_of", lambda name: None)
    found = network.nixl()
    assert found.state is State.ABSENT and "odc-fsdp[nixl]" in found.do

    files = [UCX.format(name) for name in ("cma", "ib", "ib_mlx5", "ib_efa", "cuda")]
    monkeypatch.setattr(network, "version_of", lambda name: "1.5.1" if name == "nixl-cu13" else None)
    monkeypatch.setattr(network.metadata, "files", lambda name: files)
    monkeypatch.setattr(network, "_load", lambda name: None)
    found = network.nixl()
    assert found.state is State.OK
    assert found.found == "nixl-cu13 1.5.1, UCX for TCP, InfiniBand and RoCE, mlx5, EFA, device memory"

    def refuse(name: str) -> None:
        raise ImportError("libcore.so: no such file")

    monkeypatch.setattr(network, "_load", refuse)
    assert network.nixl().state is State.BROKEN and "libcore.so" in network.nixl().found
    del files[1]
    assert network.nixl().state is State.BROKEN and "PyPI" in network.nixl().do


def test_the_engine_that_is_chosen_is_said(monkeypatch: pytest.MonkeyPatch, sys: Path, dev: Path) -> None:
    for name, said in (("sockets", "plain TCP"), ("nixl", "RDMA")):
        monkeypatch.setattr(network, "choose_engine", lambda wanted, name=name: name)
        engine = network.network(sys, dev)[3]
        assert engine.state is State.OK and engine.found.startswith(name) and said in engine.found

    def refuse(wanted: str) -> str:
        raise UnsupportedError("it does not work")

    monkeypatch.setattr(network, "choose_engine", refuse)
    assert network.network(sys, dev)[3].state is State.BROKEN
