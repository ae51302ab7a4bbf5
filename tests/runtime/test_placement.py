"""Twin of odc/runtime/linking.py and odc/net/tcp.py."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from support.silent import silent_once_a_rank_is_lost

from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.net import JobStore, announce_failure, announce_process, tcp
from odc.net.tcp import own_address
from odc.protocol import RankGrid
from odc.runtime import daemon
from odc.runtime.linking import locate, parts_of
from odc.settings import Settings


def store(timeout_s: float = 30.0) -> JobStore:
    return JobStore(dist.HashStore(), timeout_s, 0)


def pretend(store: JobStore, rank: int, host: str) -> None:
    """Have `rank` say that it runs on `host`."""
    store.set(f"odc/process/{rank}", json.dumps([5, "elsewhere", host]))


def test_ranks_of_one_host_keep_their_grid() -> None:
    one, grid = store(), RankGrid((0, 1), 2, 0)
    announce_process(one, 1)
    assert locate(one, grid) is grid


def test_hosts_are_numbered_alike_by_every_rank() -> None:
    one = store()
    announce_process(one, 0)
    for rank, host in enumerate(["b", "a", "b"], start=1):
        pretend(one, rank, host)
    assert locate(one, RankGrid((0, 1), 2, 0)).hosts == (0, 1)
    assert locate(one, RankGrid((1, 0), 2, 1)).hosts == (0, 1)


def test_the_hosts_of_many_ranks_are_found_in_few_calls_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's store serves all ranks from one thread, and each root and arena of each rank asks for the hosts."""
    one, calls, ranks = store(), list[str](), tuple(range(512))
    for rank in ranks[1:]:
        pretend(one, rank, f"host {rank // 8}")
    call = JobStore._call

    def counted(self: JobStore, name: str, *arguments: object) -> object:
        calls.append(name)
        return call(self, name, *arguments)

    monkeypatch.setattr(JobStore, "_call", counted)
    found = locate(one, RankGrid(ranks, 512, 0))
    assert len(calls) < 15
    assert (one.hosts[1], one.hosts[511]) == ("host 0", "host 63")
    calls.clear()
    assert locate(one.within(5.0), RankGrid(ranks, 512, 0)) == found
    assert not calls


@pytest.mark.parametrize(
    ("hosts", "parts"),
    [
        ("aaab", (0, 1, 2, 3)),  # 3 and 1: no part has more than one rank
        ("baab", (0, 1, 1, 0)),  # 2 and 2: hosts are not divided
        ("aaaabb", (0, 0, 1, 1, 2, 2)),
        ("babbabbb", (0, 1, 0, 2, 1, 2, 3, 3)),  # 6 and 2, out of sequence
        ("aaaaaabbbbbbbbb", (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4)),  # 6 and 9
    ],
)
def test_hosts_with_unequally_many_ranks_are_divided(hosts: str, parts: tuple[int, ...]) -> None:
    assert parts_of(hosts) == parts
    RankGrid(tuple(range(len(hosts))), len(hosts), 0, parts)  # it takes them


def test_a_rank_that_does_not_come_up_is_named() -> None:
    one = store(0.05)
    with pytest.raises(WaitTimeoutError, match="rank 0, waiting for rank 1 to come up: it has not called fully_shard"):
        locate(one, RankGrid((0, 1), 2, 0))
    announce_failure(one, "ValueError: no tokenizer", 1)
    with pytest.raises(PeerLostError, match="aborted by rank 1: ValueError: no tokenizer"):
        locate(one, RankGrid((0, 1), 2, 0))


def test_a_loss_ends_the_wait_for_a_silent_store_to_listen_by() -> None:
    expected = "^rank 3, beginning to listen for other hosts: the job was aborted by rank 1: rank 1 died$"
    with silent_once_a_rank_is_lost(3) as silent, pytest.raises(PeerLostError, match=expected):
        daemon(3).listening(silent, Settings(address="127.0.0.1"))


def test_the_address_is_of_the_interface_that_the_store_is_reached_by() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hosted = SimpleNamespace(host="127.0.0.1", port=listener.getsockname()[1])
        assert own_address(SimpleNamespace(underlying_store=hosted)) == "127.0.0.1"
    assert own_address(None, "10.1.2.3") == "10.1.2.3"
    with pytest.raises(UnsupportedError, match=r"HashStore; set Settings\(address="):
        own_address(dist.HashStore())


def test_a_name_that_means_loopback_on_its_own_host_is_none_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes `127.0.1.1 node1` into /etc/hosts of node1, and srun's first node is called so."""
    node = SimpleNamespace(underlying_store=SimpleNamespace(host="node1", port=29500))
    monkeypatch.setattr(tcp, "_ELSEWHERE", ("elsewhere", 9))
    routes = {"node1": "127.0.1.1", "127.0.1.1": "127.0.1.1", "elsewhere": "10.0.0.7"}
    monkeypatch.setattr(tcp, "_interface_towards", lambda host, port: routes[host])
    assert own_address(node) == "10.0.0.7"
    local = SimpleNamespace(underlying_store=SimpleNamespace(host="127.0.1.1", port=29500))
    assert own_address(local) == "127.0.1.1", "who names loopback means it"

    def no_route(host: str, port: int) -> str:
        if host == "elsewhere":
            raise OSError(101, "Network is unreachable")
        return "127.0.1.1"

    monkeypatch.setattr(tcp, "_interface_towards", no_route)
    with pytest.raises(UnsupportedError, match=r"node1 is 127.0.1.1 here.*no default route.*Settings\(address="):
        own_address(node)
