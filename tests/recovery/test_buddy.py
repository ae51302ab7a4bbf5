"""Buddies: whose state a rank keeps, and how states are shown and read. Ranks of this process stand for hosts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import PeerLostError, WaitTimeoutError
from odc.net import JobStore
from odc.net.network import HostNetwork, _key
from odc.net.reactor import Reactor
from odc.recovery.buddy import StateExchange, ward_of
from odc.recovery.members import Share
from odc.recovery.slots import Slots
from odc.settings import Settings

PATIENCE_S = 60.0


@given(st.integers(2, 5), st.integers(1, 4), st.randoms())
def test_every_rank_has_one_buddy_on_another_host(count: int, per_host: int, shuffled: Any) -> None:
    on = [f"host {i}" for i in range(count) for _ in range(per_host)]
    shuffled.shuffle(on)
    hosts = dict(enumerate(on))
    wards = {rank: ward_of(hosts, rank) for rank in hosts}
    assert {*wards.values()} == {*hosts}
    pairs = {(hosts[rank], hosts[ward]) for rank, ward in wards.items() if ward is not None}
    assert len(pairs) == count, "the wards of a host's ranks are on one other host"
    assert all(here != there for here, there in pairs)


def test_there_is_no_ward_on_one_host() -> None:
    assert ward_of({0: "here", 1: "here"}, 1) is None


class Rank:
    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._reactor = Reactor(f"rank {rank}", lambda error: None, lambda: self.network.close())
        self.network = HostNetwork(self._reactor, store, rank, Settings(address="127.0.0.1"))
        self.exchange = StateExchange(self.network, timeout_s)

    def close(self) -> None:
        self.exchange.close()
        self._reactor.stop(PATIENCE_S)


@pytest.fixture
def pair() -> Iterator[list[Rank]]:
    made: Any = dist
    store = made.HashStore()
    ranks = [Rank(store, 0, PATIENCE_S), Rank(store, 1, 0.3)]
    yield ranks
    for rank in ranks:
        rank.close()


def kept(*steps: int) -> Slots:
    slots = Slots.create(Share(0, 1))
    for step in steps:
        slots.write(step, [torch.full((1000,), float(step))], f"step {step}".encode())
    return slots


def test_a_state_is_read_once_it_is_shown(pair: list[Rank]) -> None:
    one, other = pair
    theirs, mine = kept(4, 5), Slots.create(Share(0, 1))
    other.exchange.show(Share(0, 1), 4, theirs)
    timer = threading.Timer(0.1, lambda: other.exchange.show(Share(0, 1), 5, theirs))
    timer.start()
    one.exchange.fetch(1, Share(0, 1), 5, mine)
    timer.join()
    assert mine.steps() == [5]
    tensors, text = mine.read(5)
    assert text == b"step 5" and torch.equal(tensors[0], torch.full((1000,), 5.0))


def test_what_is_hidden_is_not_read(pair: list[Rank]) -> None:
    one, other = pair
    one.exchange.show(Share(0, 1), 4, kept(4))
    one.exchange.hide(0)
    # On a busy machine the answer that there is none is late itself.
    late_or_none = "waiting for rank 0 to show the state of rank 1 after step 4|reading which states it shows of rank 0"
    with pytest.raises(WaitTimeoutError, match=late_or_none) as late:
        other.exchange.fetch(0, Share(0, 1), 4, Slots.create(Share(0, 1)))
    assert late.value.culprit == 0


@pytest.mark.parametrize("closed", [0, 1])
def test_the_end_of_either_side_ends_the_wait(pair: list[Rank], closed: int) -> None:
    pair[0].exchange.connect(1)
    timer = threading.Timer(0.1, pair[closed].exchange.close)
    timer.start()
    with pytest.raises(PeerLostError) as lost:
        pair[0].exchange.fetch(1, Share(0, 1), 7, Slots.create(Share(0, 1)))
    timer.join()
    assert lost.value.culprit == 1


def test_a_peer_without_the_secret_reads_no_state_and_disturbs_none(pair: list[Rank]) -> None:
    """It knows where rank 1 listens, and what it shows, but not the job's secret."""
    made: Any = dist
    store = made.HashStore()
    outsider = Rank(store, 0, PATIENCE_S)
    JobStore(store, PATIENCE_S).set(_key(1), json.dumps(pair[1].network.address))
    pair[1].exchange.show(Share(0, 1), 4, kept(4))
    for _ in range(3):
        with pytest.raises(PeerLostError, match="it may not know the job's secret"):
            outsider.exchange.fetch(1, Share(0, 1), 4, Slots.create(Share(0, 1)))
    outsider.close()
    mine = Slots.create(Share(0, 1))
    pair[0].exchange.fetch(1, Share(0, 1), 4, mine)
    assert mine.steps() == [4]
