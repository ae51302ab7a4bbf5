"""The watch over neighbours on other hosts: four ranks' watches in this process, each on a host of its own."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.ports import free_ports
from support.waiting import PATIENCE_S, until

from odc.deadlines import Deadline
from odc.hosts.watch import PURPOSE, HostWatch, neighbours
from odc.net import JobStore, network
from odc.net.announced import failure
from odc.net.conversation import converse
from odc.net.handshake import begin_handshake
from odc.net.liveness import Liveness, Loss
from odc.net.messages import PushCounts, Watching, encode
from odc.net.network import HostNetwork, _key
from odc.net.reactor import Reactor
from odc.protocol.peers.board import clipped
from odc.settings import Settings

WORLD = 4
Make = Callable[[int], "Rank"]


class Rank:
    """A rank's network and watch, with a loop of its own."""

    def __init__(self, store: Any, rank: int) -> None:
        self.ended: list[tuple[int, str, int]] = []
        self.noticed = threading.Condition()
        around = sorted({(rank - 1) % WORLD, (rank + 1) % WORLD})
        settings = Settings(address="127.0.0.1", timeout_s=PATIENCE_S, lost_after_s=20.0)
        self._reactor = Reactor(f"rank {rank}", lambda error: None, self._close)
        self.network = HostNetwork(self._reactor, store, rank, settings)
        self.liveness = Liveness(self._reactor, rank)
        self.liveness.follow("this test", self._end)
        self.watch = HostWatch(self._reactor, self.network, self.liveness, around, 20.0)
        self._good_bye = True

    def _end(self, loss: Loss) -> None:
        if self.liveness.is_first(loss):
            with self.noticed:
                self.ended.append((loss.rank, loss.text(), loss.culprit))
                self.noticed.notify_all()

    def watches(self, *ranks: int) -> None:
        """Wait until it watches these neighbours, and no others."""
        until(lambda: self.watch.watched() == set(ranks), f"connections to {ranks}")

    def until_ended(self, *ranks: int) -> list[tuple[int, str, int]]:
        with self.noticed:
            assert self.noticed.wait_for(lambda: {rank for rank, *_ in self.ended} >= set(ranks), PATIENCE_S)
        return self.ended

    def end(self, *, good_bye: bool) -> None:
        """End as a process that shuts down, or as one that is killed."""
        if self._reactor.alive():
            self._good_bye = good_bye
            self._reactor.stop(PATIENCE_S)

    def _close(self) -> None:
        self.network.close()
        self.watch.leave() if self._good_bye else self.watch.close()


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


@pytest.fixture
def make(store: Any) -> Iterator[Make]:
    made = list[Rank]()

    def one(rank: int) -> Rank:
        made.append(Rank(store, rank))
        return made[-1]

    yield one
    for rank in made:
        rank.end(good_bye=True)


def ring(make: Make) -> list[Rank]:
    ranks = [make(rank) for rank in range(WORLD)]
    for number, rank in enumerate(ranks):
        rank.watches((number - 1) % WORLD, (number + 1) % WORLD)
    return ranks


def limits(rank: Rank) -> set[int]:
    """Milliseconds of silence after which the kernel ends its connections to neighbours."""
    option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    return {one._connection.getsockopt(*option) for one in rank.watch._connected}


def test_connections_wait_for_the_network_as_the_settings_say_then_and_later(make: Make) -> None:
    ranks = ring(make)
    assert [limits(rank) for rank in ranks] == [{20_000}] * WORLD
    ranks[0].watch.wait_for_network(45.0)  # as a root that was sharded later asks
    assert limits(ranks[0]) == {45_000}


@pytest.mark.parametrize("reason", ["no file \ud83d", "é" * 2000])
def test_a_loss_of_any_text_goes_around_the_ring(make: Make, reason: str) -> None:
    """It may quote what has no encoding, or be too long and end inside a character."""
    ranks = ring(make)
    ranks[0].liveness.report(Loss(1, 1, reason))
    ((_, text, _),) = ranks[2].until_ended(1)
    assert text == clipped(reason)


def test_a_death_goes_around_the_ring_and_into_the_store(make: Make, store: Any) -> None:
    ranks = ring(make)
    ranks[2].end(good_bye=False)
    for rank in (ranks[0], ranks[1], ranks[3]):  # rank 0 is no neighbour of rank 2
        ((dead, reason, culprit),) = rank.until_ended(2)
        assert (dead, culprit) == (2, 2)
        assert reason.startswith("rank 2 died: its connection to rank ")
    job = JobStore(store, PATIENCE_S)
    until(lambda: failure(job) is not None)
    culprit, reason = failure(job) or (-1, "")
    assert culprit == 2 and reason.startswith("rank 2 died")


def test_a_rank_that_shuts_down_is_not_dead(make: Make, store: Any) -> None:
    ranks = ring(make)
    ranks[2].end(good_bye=True)
    ranks[1].watches(0)
    ranks[3].watches(0)
    ranks[0].end(good_bye=False)  # what the others hear next is of rank 0
    for rank in (ranks[1], ranks[3]):
        assert [dead for dead, *_ in rank.until_ended(0)] == [0]


def test_an_error_is_sent_with_its_culprit_before_the_good_bye(make: Make, store: Any) -> None:
    ranks = ring(make)
    ranks[2].liveness.report(Loss(2, 3, "ValueError: no such token"))
    ranks[2].end(good_bye=True)
    for rank in (ranks[0], ranks[1], ranks[3]):
        assert rank.until_ended(2) == [(2, "ValueError: no such token", 3)]
    assert failure(JobStore(store, PATIENCE_S)) is None, "the rank that raised writes it into the store itself"


def test_a_late_rank_learns_of_earlier_deaths(make: Make) -> None:
    ranks = [make(rank) for rank in (0, 1, 2)]
    ranks[1].watches(0, 2)
    ranks[2].end(good_bye=False)
    ranks[0].until_ended(2)
    assert make(3).until_ended(2)[0][0] == 2


def test_a_neighbour_that_cannot_be_reached_is_not_taken_for_dead(make: Make, store: Any) -> None:
    JobStore(store, PATIENCE_S).set(_key(1), json.dumps(["127.0.0.1", *free_ports(1)]))
    one, other = make(0), make(3)
    one.watches(3)
    other.end(good_bye=False)
    assert [rank for rank, *_ in one.until_ended(3)] == [3]


def test_a_neighbour_that_is_stopped_as_it_is_dialled_is_not_taken_for_dead(
    make: Make, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host takes the connection, and no process answers; no thread ends with an error either."""
    monkeypatch.setattr(network, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        JobStore(store, PATIENCE_S).set(_key(1), json.dumps(list(stopped.getsockname())))
        rank = make(0)
        stopped.settimeout(PATIENCE_S)
        with stopped.accept()[0]:
            until(lambda: not any(thread.name == "odc-watch" for thread in threading.enumerate()))
    assert not rank.ended


def test_messages_are_read_of_neighbours_with_the_secret_alone(make: Make) -> None:
    one = make(0)
    where, secret = one.network.address, one.network._secret
    for purpose, rank in ((PURPOSE, 2), ("link 0.a", 1)):
        with socket.create_connection(where) as connection:
            converse(connection, begin_handshake(secret, rank, purpose), Deadline(PATIENCE_S))
            assert connection.recv(1) == b""
    with socket.create_connection(where) as connection:
        converse(connection, begin_handshake(secret, 1, PURPOSE), Deadline(PATIENCE_S))
        connection.sendall(encode(Watching(until_now=0)))
        one.watches(1)
        connection.sendall(encode(PushCounts(0, (1,))))
        (ended,) = one.until_ended(1)
        assert "is broken (a message of kind 4" in ended[1]


def test_a_connection_that_ends_before_a_word_is_no_death(make: Make) -> None:
    """As of a rank that shuts down while it connects."""
    one, other = make(0), make(3)
    one.watches(3)
    where, secret = one.network.address, one.network._secret
    with socket.create_connection(where) as connection:
        converse(connection, begin_handshake(secret, 1, PURPOSE), Deadline(PATIENCE_S))
        assert connection.recv(64), "it has been taken"
    other.end(good_bye=False)
    assert [rank for rank, *_ in one.until_ended(3)] == [3]


def test_a_forked_child_keeps_no_connection(make: Make) -> None:
    ranks = [make(0), make(1)]
    ranks[0].watches(1)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b".")
        os.read(go_on[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    ranks[1].end(good_bye=False)
    assert ranks[0].until_ended(1)[0][0] == 1, "the child holds the connection of the rank that ended"
    os.write(go_on[1], b".")
    os.waitpid(child, 0)
    for fd in (*ready, *go_on):
        os.close(fd)


@pytest.mark.parametrize(
    ("world", "here", "rank", "found"),
    [(8, "2", 0, [2, 6]), (8, "2", 7, [1, 5]), (2, "1", 1, [0]), (4, "4", 1, []), (5, "2", 1, [])],
)
def test_neighbours_have_the_same_index(
    monkeypatch: pytest.MonkeyPatch, world: int, here: str, rank: int, found: list[int]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert neighbours(rank, world) == found
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert neighbours(rank, world) == []
