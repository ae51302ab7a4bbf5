"""Twin of odc/runtime/linking.py and odc/net/tcp.py."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.net import JobStore, announce_failure, announce_process
from odc.net.tcp import own_address
from odc.protocol import RankGrid
from odc.runtime.linking import locate


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
    with pytest.raises(UnsupportedError, match=r"3 hosts \(ranks 0; ranks 1, 3; ranks 2\); every host"):
        locate(one, RankGrid((0, 1, 2, 3), 4, 0))
    assert locate(one, RankGrid((0, 1), 2, 0)).hosts == (0, 1)
    assert locate(one, RankGrid((1, 0), 2, 1)).hosts == (0, 1)


def test_a_rank_that_does_not_come_up_is_named() -> None:
    one = store(0.05)
    with pytest.raises(WaitTimeoutError, match="rank 0, waiting for rank 1 to come up: it has not called fully_shard"):
        locate(one, RankGrid((0, 1), 2, 0))
    announce_failure(one, "ValueError: no tokenizer", 1)
    with pytest.raises(PeerLostError, match="aborted by rank 1: ValueError: no tokenizer"):
        locate(one, RankGrid((0, 1), 2, 0))


def test_the_address_is_of_the_interface_that_the_store_is_reached_by() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tcp = SimpleNamespace(host="127.0.0.1", port=listener.getsockname()[1])
        assert own_address(SimpleNamespace(underlying_store=tcp)) == "127.0.0.1"
    assert own_address(None, "10.1.2.3") == "10.1.2.3"
    with pytest.raises(UnsupportedError, match=r"HashStore; set Settings\(address="):
        own_address(dist.HashStore())
