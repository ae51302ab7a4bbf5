"""Hosts on one machine (`support.hosts`): what their namespaces separate, what the network does, and what is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import hosts as support_hosts
from support.host_ranks import HostPool, spawn_on_hosts
from support.hosts import DEVICE, Hosts, need_hosts, unavailable
from support.rank_worker import report


@pytest.fixture
def two() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(2) as hosts:
        yield hosts


def look_around(rank: int, world: int) -> dict[str, object]:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    seen = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "shared": os.listdir("/dev/shm"),
        "devices": sorted(os.listdir("/sys/class/net")),
        "spaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "ipc", "pid", "uts", "mnt")],
        "local": int(os.environ["LOCAL_RANK"]),
        "folder": os.getcwd(),
        "total": total.item(),
    }
    dist.barrier()
    Path(f"/dev/shm/of-{rank}").touch()
    dist.barrier()
    seen["marks"] = sorted(os.listdir("/dev/shm"))
    dist.barrier()
    os.unlink(f"/dev/shm/of-{rank}")
    return seen


def reach(rank: int, world: int) -> list[bool]:
    """Whether each rank's abstract socket can be reached from here."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0of-{rank}")
        listener.listen()
        dist.barrier()
        found = []
        for other in range(world):
            with socket.socket(socket.AF_UNIX) as caller:
                found.append(caller.connect_ex(f"\0of-{other}") == 0)
        dist.barrier()
    return found


def wait_forever(rank: int, world: int) -> None:
    report(os.getpid())
    time.sleep(600)


def joined(hosts: Hosts) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection from host 1 to host 0, which probe each other when nothing is sent."""
    listener = hosts[0].within(lambda: socket.create_server((hosts[0].address, 0)))
    with listener:
        client = hosts[1].within(lambda: socket.create_connection(listener.getsockname(), 60.0))
        accepted, _ = listener.accept()
    for one in (client, accepted):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 1),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", 1),
            ("TCP_USER_TIMEOUT", 1500),
        ):
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        one.settimeout(60.0)
    return client, accepted


def round_trip_s(client: socket.socket, server: socket.socket) -> float:
    begin = time.monotonic()
    client.sendall(b"x")
    server.sendall(server.recv(1))
    client.recv(1)
    return time.monotonic() - begin


def carry(sender: socket.socket, receiver: socket.socket, count: int) -> float:
    """Seconds until `count` bytes have arrived."""
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(sender.sendall, bytes(count))
        left = count
        while left:
            left -= len(receiver.recv(left))
        sent.result()
    return time.monotonic() - begin


def test_hosts_share_nothing_but_the_network(host_ranks: Callable[[int, int], HostPool]) -> None:
    seen = host_ranks(2, 2).run(look_around)
    assert [one["host"] for one in seen] == ["host0", "host0", "host1", "host1"]
    assert [one["local"] for one in seen] == [0, 1, 0, 1]
    assert {one["total"] for one in seen} == {6.0}
    assert all(one["pid"] < 20 for one in seen), "numbers begin anew on each host, as on real ones"
    assert all(one["shared"] == [] and one["devices"] == [DEVICE, "lo"] for one in seen)
    assert [one["marks"] for one in seen] == [["of-0", "of-1"]] * 2 + [["of-2", "of-3"]] * 2
    assert {one["folder"] for one in seen} == {os.getcwd()}
    own = [set(one["spaces"]) for one in seen]
    assert own[0] == own[1] and own[2] == own[3]
    outside = {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "ipc", "pid", "uts", "mnt")}
    assert not own[0] & own[2] and not outside & (own[0] | own[2])
    assert host_ranks(2, 2).run(reach) == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


def test_the_device_counts_what_crosses(two: Hosts) -> None:
    client, server = joined(two)
    with client, server:
        before = [host.counted() for host in two]
        carry(client, server, 1_000_000)
        (sent0, received0), (sent1, received1) = (
            (now[0] - then[0], now[1] - then[1]) for now, then in zip((h.counted() for h in two), before, strict=True)
        )
    # The two ends are read one after the other, so a packet of the kernel's own may stand between them.
    assert 1_000_000 < sent1 < 1_050_000 and 1_000_000 < received0 < 1_050_000
    assert 0 < sent0 < 50_000 and 0 < received1 < 50_000


def test_a_limit_holds_both_ways_and_a_delay_is_added(two: Hosts) -> None:
    """Lower bounds, which a busy machine cannot break."""
    client, server = joined(two)
    with client, server:
        two.shape("80mbit", burst="64kb")  # 10 MB/s
        for ends in ((client, server), (server, client)):
            assert carry(*ends, 1_000_000) > 0.08
        two.unshape()
        two.delay(20_000)
        assert round_trip_s(client, server) > 0.04
        carry(client, server, 1_000_000)  # segments larger than the network's frames come through
        two.undelay()
        round_trip_s(client, server)


def test_a_drop_in_the_switch_breaks_a_connection_that_keeps_itself_alive(two: Hosts) -> None:
    client, server = joined(two)
    with client, server:
        two.drop(1)
        for one in (client, server):
            with pytest.raises(TimeoutError, match="Connection timed out"):  # the kernel's; Python's is "timed out"
                one.recv(1)
        two.undrop(1)
        for one in joined(two):
            one.close()


def test_a_rank_may_be_killed_and_nothing_is_left() -> None:
    need_hosts()
    links = sorted(os.listdir("/sys/class/net"))
    with Hosts(2) as hosts:
        with spawn_on_hosts(hosts, 1, wait_forever) as job:
            job.until_reported(1)
            pids = job.pids
            assert [host.processes() for host in hosts] == [[pid] for pid in pids]
            job.signal(0, signal.SIGSTOP)
            job.kill(1)
            while job.outcomes[1].exit_code is None:
                job.receive(0.05)
            assert job.outcomes[1].exit_code == -signal.SIGKILL
            assert job.outcomes[0].exit_code is None
        holders = [host.pid for host in hosts]
    assert not [pid for pid in [*pids, *holders] if os.path.exists(f"/proc/{pid}")]
    assert sorted(os.listdir("/sys/class/net")) == links


def test_hosts_end_with_the_process_that_made_them() -> None:
    need_hosts()
    program = """
from support.hosts import Hosts
hosts = Hosts(2)
child = hosts[1].command("sleep", "600", stdout=None)
print(*(host.pid for host in hosts), child.pid, flush=True)
import time; time.sleep(600)
"""
    path = os.pathsep.join(one for one in sys.path if one)
    command = [sys.executable, "-W", "ignore", "-c", program]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        pids = [int(word) for word in maker.stdout.readline().split()]
        maker.kill()
    assert len(pids) == 3
    deadline = time.monotonic() + 60.0
    while [pid for pid in pids if alive(pid)] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/bin/{tool}")
    assert unavailable() == "hosts need ip, tc: apt-get install iproute2"
    monkeypatch.setattr(support_hosts, "_NEEDED_CAPABILITIES", {})
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    assert unavailable() is None
    monkeypatch.setattr(support_hosts, "_NEEDED_CAPABILITIES", {62: "NO_SUCH"})
    assert "NO_SUCH" in str(unavailable())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(unavailable())
