"""Buddies: whose state a rank keeps, and how states are shown and read. Ranks of this process stand for hosts."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import odc
from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.fsdp import rejoin
from odc.net import JobStore
from odc.net.network import HostNetwork, _key
from odc.net.reactor import Reactor
from odc.recovery import buddy
from odc.recovery import recovery as recovery_module
from odc.recovery.buddy import Buddies, StateExchange, refuse_hosts, ward_of
from odc.recovery.generations import GenerationOver
from odc.recovery.members import Agreed, Share
from odc.recovery.recovery import Recovery
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


@pytest.mark.parametrize("first", [False, True])
def test_one_host_has_no_place_for_buddies_when_a_job_begins(first: bool) -> None:
    """Later the ranks of a lost host may come back on the one that is left."""
    presences = dict.fromkeys(range(4), SimpleNamespace(host="here"))
    generations: Any = SimpleNamespace(presences=presences, may_shrink=False)
    with pytest.raises(UnsupportedError, match="all are on this one") if first else contextlib.nullcontext():
        refuse_hosts(generations, buddies=True, first=first)


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
    found = threading.Event()
    one.exchange.fetch(1, Share(0, 1), 5, mine, found)
    timer.join()
    assert found.is_set()
    assert mine.steps() == [5]
    tensors, text = mine.read(5)
    assert text == b"step 5" and torch.equal(tensors[0], torch.full((1000,), 5.0))


def answers(monkeypatch: pytest.MonkeyPatch, asking: Rank, call: Callable[[int], object]) -> None:
    """Call `call` with the number of each answer that a rank has received, from 1."""
    listed, received = asking.exchange._listed, list[int]()

    def counted(holder: int) -> Any:
        found = listed(holder)
        received.append(holder)
        call(len(received))
        return found

    monkeypatch.setattr(asking.exchange, "_listed", counted)


def test_what_is_hidden_is_not_read(pair: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    other.exchange.show(Share(0, 1), 4, kept(4))
    other.exchange.hide(0)
    answers(monkeypatch, one, lambda number: one.exchange.close() if number == 5 else None)
    found = threading.Event()
    with pytest.raises(PeerLostError):
        one.exchange.fetch(1, Share(0, 1), 4, Slots.create(Share(0, 1)), found)
    assert not found.is_set()


def test_a_rank_that_answers_is_waited_for_however_long_it_computes(
    pair: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that writes a checkpoint: the deadline is that of the wait for the rank, in `settle`."""
    one, other = pair
    monkeypatch.setattr(buddy, "Deadline", lambda *given: SimpleNamespace(passed=lambda *progress: True))
    answers(monkeypatch, one, lambda number: other.exchange.show(Share(0, 1), 4, kept(4)) if number == 20 else None)
    mine = Slots.create(Share(0, 1))
    one.exchange.fetch(1, Share(0, 1), 4, mine, threading.Event())
    assert mine.steps() == [4]


@pytest.mark.parametrize("closed", [0, 1])
def test_the_end_of_either_side_ends_the_wait(pair: list[Rank], closed: int) -> None:
    pair[0].exchange.connect(1)
    timer = threading.Timer(0.1, pair[closed].exchange.close)
    timer.start()
    with pytest.raises(PeerLostError) as lost:
        pair[0].exchange.fetch(1, Share(0, 1), 7, Slots.create(Share(0, 1)), threading.Event())
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
            outsider.exchange.fetch(1, Share(0, 1), 4, Slots.create(Share(0, 1)), threading.Event())
    outsider.close()
    mine = Slots.create(Share(0, 1))
    pair[0].exchange.fetch(1, Share(0, 1), 4, mine, threading.Event())
    assert mine.steps() == [4]


@pytest.mark.parametrize("call", ["ask", "read"])
def test_a_call_of_the_engine_ends_with_the_exchange(
    pair: list[Rank], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Not only at its own deadline, where the other rank does not answer, or is connected to again and again."""
    one, other = pair
    other.exchange.show(Share(0, 1), 4, kept(4))
    made = getattr(one.exchange._engine, call)

    def last(*arguments: Any, check: Callable[[str], None], **options: Any) -> Any:
        check("reading")
        one.exchange.close()
        check("reading")
        return made(*arguments, check=check, **options)

    monkeypatch.setattr(one.exchange._engine, call, last)
    with pytest.raises(PeerLostError, match="rank 0, reading: this rank has left the generation") as lost:
        one.exchange.fetch(1, Share(0, 1), 4, Slots.create(Share(0, 1)), threading.Event())
    assert lost.value.culprit == 1


class Generation:
    """In the place of `Generations`: ends at the `last` check of the processes of this host."""

    rank = 0

    def __init__(self, last: int, patience_s: float = 600.0) -> None:
        self._last, self.patience_s, self.checks, self.left = last, patience_s, 0, False

    def lost_here(self) -> int | None:
        self.checks += 1
        return 1 if self.checks == self._last else None

    def culprit(self) -> None:
        return None

    def leave(self) -> None:
        self.left = True


def waiting(generation: Generation, work: Callable[[threading.Event], None]) -> Buddies:
    """Buddies of a rank that have begun what waits for rank 1."""
    made: Any = Buddies
    found: Buddies = made(generation, {}, Settings())
    found._begin(1, "rank 1 to show the state of rank 2 after step 7", work)
    return found


def held_up(release: threading.Event) -> Callable[[threading.Event], None]:
    """Work that waits for what does not come."""

    def work(found: threading.Event) -> None:
        release.wait(PATIENCE_S)

    return work


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Ends the work of `waiting` after the test; waits sleep little."""
    monkeypatch.setattr(buddy, "WORD_SLEEP_S", 0.001)
    event = threading.Event()
    yield event
    event.set()


def test_the_wait_for_a_ward_ends_with_the_generation(release: threading.Event) -> None:
    """Before a model is in use; the ward itself is alive, and may take long."""
    generation = Generation(5)
    with pytest.raises(GenerationOver):
        waiting(generation, held_up(release)).settle()
    assert generation.left and generation.checks == 5


def test_a_ward_that_does_not_show_its_state_is_named(release: threading.Event) -> None:
    late = r"^rank 0, waiting for rank 1 to show the state of rank 2 after step 7: it has not in 0 s$"
    with pytest.raises(WaitTimeoutError, match=late) as error:
        waiting(Generation(1000, 0.0), held_up(release)).settle()
    assert error.value.culprit == 1


def test_a_state_that_is_being_read_may_take_long(release: threading.Event) -> None:
    """Its bytes come, or the engine's deadline passes."""

    def read(found: threading.Event) -> None:
        found.set()
        assert release.wait(PATIENCE_S)

    generation = Generation(10, 0.0)
    generation.lost_here = lambda: release.set()  # type: ignore[assignment,func-returns-value,method-assign]
    one = waiting(generation, read)
    while not one._awaited[2].is_set():
        threading.Event().wait(0.001)
    one.settle()
    assert release.is_set()


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Of rank 0 alone, which is its own ward here, with a `timeout_s`."""
    made: Any = dist
    dist.init_process_group("gloo", store=made.HashStore(), rank=0, world_size=1)
    found: Any = odc.fully_shard(torch.nn.Linear(4, 4), settings=Settings(timeout_s=request.param))
    found(torch.ones(1, 4)).sum().backward()
    yield found
    odc.shutdown()
    dist.destroy_process_group()


@pytest.mark.parametrize("model", [600.0], indirect=True)
@pytest.mark.parametrize("shown", [False, True])
def test_the_wait_for_a_ward_ends_as_soon_as_the_job_is_aborted(
    model: Any, release: threading.Event, shown: bool
) -> None:
    """Where a model is in use: whether the ward has still to show its state, or that is being read."""

    def work(found: threading.Event) -> None:
        if shown:
            found.set()
        assert release.wait(PATIENCE_S)

    generation: Any = Generation(1)  # it is not asked
    one = Buddies(generation, {}, Settings())  # type: ignore[arg-type]
    one._begin(0, "rank 0 to show its state", work)
    (root,) = rejoin.live_roots()
    timer = threading.Timer(0.05, lambda: root.member.protocol.abort("rank 3 died", 3))
    timer.start()
    with pytest.raises(
        PeerLostError, match="^rank 0 .epoch 1., waiting for rank 0 to show its state: .* by rank 3"
    ) as lost:
        one.settle()
    timer.join()
    assert lost.value.culprit == 3 and not generation.checks


def test_states_cross_by_the_settings_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, wanted = list[Settings](), Settings(lost_after_s=30.0)

    def noted(settings: Settings) -> None:
        seen.append(settings)
        raise KeyError("no network")

    monkeypatch.setattr(buddy, "host_network", noted)
    generation, held = Generation(1), SimpleNamespace(own_share=Share(0, 0))
    generation.presences = {0: SimpleNamespace(host="a"), 1: SimpleNamespace(host="b")}  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="no network"):
        Buddies(generation, held, wanted).open(None)  # type: ignore[arg-type]
    assert seen == [wanted]


@pytest.mark.parametrize("model", [0.2], indirect=True)
def test_a_ward_has_as_long_as_in_any_wait_of_the_model(model: Any, release: threading.Event) -> None:
    """By `Settings.timeout_s`, not by the time for ranks to come back; from its last call into odc on."""
    generation: Any = Generation(1, 0.0)
    one = Buddies(generation, {}, Settings())  # type: ignore[arg-type]
    one._begin(0, "rank 0 to show its state", held_up(release))
    with pytest.raises(WaitTimeoutError, match=r"to show its state: rank 0 has not called into odc for 0\.2 s"):
        one.settle()


def test_ranks_divide_a_state_anew_without_one_that_does_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It joins, and takes long to build its model: the others go on without it, as where it does not come at all."""

    def settle() -> None:
        raise WaitTimeoutError("rank 1 has not shown it", culprit=1)

    def nothing(*arguments: Any, **options: Any) -> Any:
        return None

    generation: Any = Generation(1000)
    generation.places_of, generation.place, generation.world = (lambda layout: (0, 1)), 0, 2
    one = Recovery.__new__(Recovery)
    former = SimpleNamespace(kept=lambda base: ((), b""), part=None)
    monkeypatch.setattr(recovery_module, "FormerLayout", lambda *arguments: former)
    monkeypatch.setattr(one, "_keep", nothing)
    parts = {
        "_generations": generation,
        "_buddies": SimpleNamespace(begin=nothing, settle=settle),
        "_trained": SimpleNamespace(put=nothing),
        "_held": SimpleNamespace(own=SimpleNamespace(forget_after=nothing)),
        "_shown": SimpleNamespace(gone_back=nothing),
    }
    for name, part in parts.items():
        monkeypatch.setattr(one, name, part, raising=False)
    one.step, one._first = 4, 0
    with pytest.raises(GenerationOver):
        one._divide_anew(Agreed(0, 4))
    assert generation.left
