"""What all models of a rank share over hosts follows the first settings that one was given, in any order of runs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.waiting import until

from odc.errors import UnsupportedError
from odc.runtime import Daemon
from odc.settings import Settings

FIRST = Settings(lost_after_s=45.0, timeout_s=77.0, engine="sockets")


@pytest.fixture
def hosted() -> Any:
    """A store by which this host's address is known, without `Settings(address=...)`."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Daemon]]:
    """Daemons of two ranks, each on a host of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    made = [Daemon(0), Daemon(1)]
    yield made
    for one in made:
        one.close()


def limits(one: Daemon) -> set[int]:
    """Milliseconds of silence after which the kernel ends its connections to neighbours."""
    assert one._host_watch is not None
    option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    return {neighbour._connection.getsockopt(*option) for neighbour in one._host_watch._connected}


def test_a_second_model_leaves_the_limit_of_the_ring_as_it_is(two: list[Daemon], hosted: Any) -> None:
    for one in two:
        one.watch_hosts(hosted, None, 2)  # by a block that was given no settings
    until(lambda: all(limits(one) == {2_300} for one in two), "connections between the two")
    two[0].watch_hosts(hosted, FIRST, 2)
    assert limits(two[0]) == {45_000}
    two[0].watch_hosts(hosted, Settings(prefetch=2), 2)
    two[0].watch_hosts(hosted, Settings(lost_after_s=20.0), 2)
    assert limits(two[0]) == {45_000}


@pytest.mark.parametrize("before", [[], [None]])
def test_the_model_that_is_run_first_does_not_choose_for_the_others(
    two: list[Daemon], hosted: Any, before: list[Settings | None]
) -> None:
    for settings in (*before, FIRST, Settings(prefetch=2)):
        two[0].watch_hosts(hosted, settings, 2)
    with pytest.raises(UnsupportedError, match="rank 0 listens already, with lost_after_s=45.0 and not 20.0: give the"):
        two[0].network(hosted, Settings(lost_after_s=20.0))
    network = two[0].network(hosted, Settings(prefetch=2, timeout_s=5.0))
    engine: Any = network.engine
    assert network.lost_after_s == engine._connections._lost_after_s == 45.0
    assert network.store.timeout_s == engine._connections._timeout_s == 77.0
    assert two[0].network(hosted, FIRST) is network


def test_without_settings_of_a_model_the_network_follows_what_opens_it(two: list[Daemon], hosted: Any) -> None:
    two[0].watch_hosts(hosted, None, 2)
    assert two[0].network(hosted, FIRST).lost_after_s == 45.0


def test_a_model_that_other_hosts_read_may_be_the_first_to_listen(two: list[Daemon], hosted: Any) -> None:
    """As a policy after a judge whose ranks are on one host: that one's settings named no place to listen at."""
    two[0].watch_hosts(hosted, Settings(), 1)
    network = two[0].network(hosted, Settings(address="127.0.0.1", engine="sockets"), over_hosts=False)
    assert network.address[0] == "127.0.0.1"
