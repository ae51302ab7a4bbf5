"""`odc doctor --reach`: hosts that reach each other, one that another does not reach, and hosts that could be one."""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

import pytest
from support.hosts import Hosts, PerHost, need_hosts, places_of

from odc.cli import main
from odc.doctor.reach import Host, _echo, _ways, look, parted
from odc.errors import ConfigError, PeerLostError
from odc.settings import Settings
from odc.worker import in_background

COMMAND = (sys.executable, "-m", "odc.cli", "doctor", "--reach")


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(3) as hosts:
        yield hosts


_runs = itertools.count()


def run(hosts: Hosts, per_host: PerHost = 1) -> list[tuple[int, str]]:
    """Exit code and output of every process, as a launcher with an agent's store starts them."""
    variables = [hosts.rank_environment(rank, per_host) for rank in range(len(places_of(per_host, len(hosts))))]
    return started(hosts, [host for host, _ in places_of(per_host, len(hosts))], variables)


def started(hosts: Hosts, on: Sequence[int], variables: Sequence[Mapping[str, str]]) -> list[tuple[int, str]]:
    """Exit code and output of the command, on each of these hosts with these variables, all at once."""
    more = {"TORCHELASTIC_RESTART_COUNT": str(next(_runs)), "COLUMNS": "250"}
    processes = [hosts[host].command(*COMMAND, env={**one, **more}) for host, one in zip(on, variables, strict=True)]
    texts = [process.communicate()[0] for process in processes]
    lines = ["".join(line for line in text.splitlines(True) if "[c10d]" not in line) for text in texts]
    return [(process.returncode, text) for process, text in zip(processes, lines, strict=True)]


def test_hosts_that_reach_each_other(three: Hosts) -> None:
    (code, text), *others = run(three, (2, 1, 1))
    assert code == 0, text
    assert all(other == (0, "") for other in others), "one process speaks for all"
    for number, rank in enumerate((0, 2, 3)):
        assert f"│ {number}    │ {rank}    │ host{number} │ {three[number].address}" in text
    assert text.count("│ ok") == 6 and "eth0" in text and "1500" in text
    assert "Hosts 0, 1, 2 are containers of one machine that do not share its PID and network namespaces" in text


def test_a_host_that_one_does_not_reach_is_named_with_the_way(three: Hosts) -> None:
    route = ("unreachable", three[2].address)
    assert three[1].command("ip", "route", "add", *route).communicate()[0] == ""
    try:
        (code, text), *_ = run(three)
    finally:
        three[1].command("ip", "route", "del", *route).communicate()
    assert code == 1, text
    failed = [line.split("│") for line in text.splitlines() if "connecting to rank" in line]
    assert [way[1:3] for way in failed] in ([[" 1    ", " 2  "]], [[" 1    ", " 2  "], [" 2    ", " 1  "]]), text
    assert text.count("│ ok") == 6 - len(failed)


def test_a_path_that_loses_large_packets_is_no_path(three: Hosts) -> None:
    """As where a switch on the way has a smaller MTU; here packets above 1000 bytes do not leave host 2."""
    small = ("replace", "dev", "eth0", "root", "tbf", "rate", "1gbit", "burst", "1000", "latency", "50ms")
    assert three[2].command("tc", "qdisc", *small).communicate()[0] == ""
    try:
        (code, text), *_ = run(three)
    finally:
        three[2].command("tc", "qdisc", "del", "dev", "eth0", "root").communicate()
    assert code == 1, text
    lost = [line.split("│") for line in text.splitlines() if "single bytes come back, 256 KiB do not" in line]
    assert {2} <= {int(end) for way in lost for end in way[1:3]} and len(lost) == 4, text
    assert text.count("│ ok") == 2


def test_ways_are_tried_at_once_as_one_that_is_dropped_takes_long() -> None:
    hosts = [Host(n, n, f"host{n}", "10.0.0.1", "eth0", 1500, ("", "", "")) for n in range(8)]
    tried = threading.Barrier(7)

    def dial(rank: int, purpose: str) -> socket.socket:
        if rank == 3:
            ours, theirs = socket.socketpair()
            in_background("odc-echo", lambda: _echo(theirs))
            tried.wait(120.0)
            return ours
        tried.wait(120.0)  # raises, which no way does, if the others are tried only afterwards
        raise PeerLostError(f"rank 0, connecting to rank {rank}: timed out", culprit=rank)

    ways = _ways(SimpleNamespace(dial=dial), hosts[0], hosts[1:])  # type: ignore[arg-type]
    assert [(way.source, way.target) for way in ways] == [(0, n) for n in range(1, 8)]
    assert [way.target for way in ways if not way.wrong] == [3] and ways[2].rate > 0
    assert "connecting to rank 7: timed out" in ways[-1].wrong


def test_a_message_comes_back_once_it_is_there_as_a_whole() -> None:
    """Else the rate would be nearly that of both directions together."""
    ours, theirs = socket.socketpair()
    in_background("odc-echo", lambda: _echo(theirs))
    message = bytes(range(256)) * 1024
    ours.sendall(struct.pack("!I", len(message)) + message[:-1])
    ours.settimeout(0.2)
    with pytest.raises(TimeoutError):
        ours.recv(1)
    ours.setblocking(True)
    ours.sendall(message[-1:])
    same = ours.recv(len(message), socket.MSG_WAITALL) == message
    ours.close()
    assert same


def test_without_a_launcher_or_on_one_host_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="start it on every host, by the launcher of the job"):
        look(Settings())
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--reach"])
    assert ended.value.code == 2
    assert "start it on every host" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["PyTorchJob", "TrainJob"])
def test_hosts_are_what_they_are_to_ranks_and_not_what_the_launcher_counts(three: Hosts, launcher: str) -> None:
    """Pods of a rank each, with no variable for the ranks of a host; and pods of eight ranks, a process each."""
    if launcher == "PyTorchJob":
        job = {"WORLD_SIZE": "3", "MASTER_ADDR": three[0].address, "MASTER_PORT": "29517"}
        variables = [job | {"RANK": str(rank)} for rank in range(3)]
    else:
        job = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": three[0].address}
        variables = [job | {"PET_NODE_RANK": str(host), "PET_MASTER_PORT": "29518"} for host in range(3)]
    (code, text), *others = started(three, range(3), variables)
    assert code == 0, text
    assert all(other == (0, "") for other in others) and text.count("│ ok") == 6, text


def test_containers_that_share_their_namespaces_are_one_host() -> None:
    """As with hostPID and hostNetwork: nothing between hosts is left to look at."""
    need_hosts()
    with Hosts(2, "-n -p") as pods:
        (code, text), other = run(pods)
    assert code == 2 and "odc: reach: all 2 processes are on one host" in text, text
    assert other == (0, "")


def test_what_parts_the_containers_of_a_machine_is_named_with_its_remedy() -> None:
    places = ["a 1 1", "a 2 1", "b 1 1", "b 1 2", "b 1 3", "c 1 1"]
    hosts = [Host(n, n, "name", "10.0.0.1", "eth0", 1500, place.split()) for n, place in enumerate(places)]
    pids, networks = parted([*hosts, *(Host(n, n, "name", "10.0.0.1", "", 0, ("", "", "")) for n in (6, 7))])
    assert pids.startswith("Hosts 0, 1 are containers of one machine that do not share its PID namespace, so")
    assert networks.startswith(
        "Hosts 2, 3, 4 are containers of one machine that do not share its network namespace, so"
    )
    assert "shareProcessNamespace" in pids and "hostNetwork" not in pids
    assert "hostNetwork" in networks and "hostPID" not in networks
