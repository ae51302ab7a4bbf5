from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator

import pytest
import torch.distributed as dist
from support.listeners import served
from support.members import BF16, F32, Layout, units_of
from support.sides import LAYOUT, RANKS, Side, descriptors
from support.silent import SilentStore
from support.waiting import until

from odc.errors import LayoutMismatchError, PeerLostError, WaitTimeoutError
from odc.net import JobStore
from odc.protocol import RankGrid, Word
from odc.runtime import Rendezvous
from odc.runtime.connect import RootEvents, _listing
from odc.settings import Settings

Make = Callable[..., Side]


def refusing(doing: str) -> None:
    raise PeerLostError(f"aborted while {doing}")


# attaching -----------------------------------------------------------------------------------------------------------


def test_reports_each_peer_it_attached_to_once(side: Make) -> None:
    left, _ = side(0).announce(), side(1).announce()
    left.layout.peer(1).attach()
    left.layout.peer(1).attach()
    assert left.attached == [(1, os.getpid())]


def test_a_notification_wakes_the_peers_daemon(side: Make) -> None:
    left, right = side(0).announce(), side(1).announce()
    drained = threading.Event()
    right.service.drain = lambda: drained.set() or False  # type: ignore[method-assign]
    left.layout.peer(1).attach()
    drained.clear()
    left.meet.notify(1)
    assert drained.wait(60.0)


def test_a_peer_may_come_up_later(side: Make) -> None:
    left, right = side(0).announce(), side(1)
    timer = threading.Timer(0.1, right.announce)
    timer.start()
    assert left.layout.peer(1).board.load(0) == 0
    timer.join()


def test_descriptors_are_given_back(side: Make) -> None:
    gc.collect()
    before = descriptors()
    left, right = side(0).announce(), side(1).announce()
    for _ in range(3):
        attachment = left.meet.connect(1)
        os.close(attachment.fd)
        os.close(left.meet.doorbells.pop(1))
    left.layout.peer(1).attach()
    right.layout.peer(0).attach()
    left.close()
    right.close()
    left.close()
    until(lambda: descriptors() <= before)


# refusals ------------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused(side: Make) -> None:
    left, _ = side(0).announce(), side(1).announce(token="guessed")
    gc.collect()
    before = descriptors()
    with pytest.raises(PeerLostError, match="rank 10, attaching to rank 13: wrong token") as caught:
        left.layout.peer(1).attach()
    assert caught.value.culprit == 13
    until(lambda: descriptors() <= before, "the other side's end, which its thread may still hold")


def test_descriptors_that_come_with_a_refusal_are_closed(side: Make) -> None:
    """Any process may listen at the name of a socket."""
    left, name = side(0).announce(), f"odc-test.refusing.{time.monotonic_ns()}"
    side(1).announce(address=name)
    with served(name, lambda request, peer: ({"error": "not today"}, (0, 0))):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with pytest.raises(PeerLostError, match="not today"):
                left.meet.connect(1)
        assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_root_that_has_left_is_no_longer_there(side: Make) -> None:
    left, right = side(0).announce(), side(1).announce()
    right.daemon.dismiss(right.service)()
    with pytest.raises(PeerLostError, match=r"rank 10, attaching to rank 13: no root '7\.abc' here"):
        left.layout.peer(1).attach()


UNITS = "differently: rank {me} has {mine} units, rank {peer} has {theirs}"
FIRST = "differently: the first unit to differ is {0!r} on rank {me} and {0!r} on rank {peer}"
LONGER_V, SHORTER_V = "v (5 elements a rank, float32, trained)", "v (4 elements a rank, float32, trained)"
FROZEN_B, TRAINED_B = "b (2 elements a rank, float32, frozen)", "b (2 elements a rank, float32, trained)"
C = "c (1 elements a rank, float32, trained)"


@pytest.mark.parametrize(
    ("other", "frozen", "starts", "mine", "theirs"),
    [
        ([LAYOUT[0], [("v", 5, F32)]], (), FIRST.format("u1", me="{me}", peer="{peer}"), SHORTER_V, LONGER_V),
        ([[*LAYOUT[0], ("c", 1, F32)], LAYOUT[1]], (), "", "sums in float32", C),
        (LAYOUT, ("b",), "", TRAINED_B, FROZEN_B),
        ([[("w", 8, F32), ("b", 2, BF16)], LAYOUT[1]], (), FIRST.format("u0", me="{me}", peer="{peer}"), "", ""),
        ([LAYOUT[1], LAYOUT[0]], (), FIRST.format("u0", me="{me}", peer="{peer}"), "", ""),
        ([LAYOUT[0]], (), UNITS, "", ""),
    ],
)
def test_the_first_difference_of_layouts_is_named_on_both_sides(
    side: Make, other: Layout, frozen: Collection[str], starts: str, mine: str, theirs: str
) -> None:
    left, right = side(0).announce(), side(1, other, frozen=frozen).announce()
    for one, me, peer, here, there in ((left, 10, 13, mine, theirs), (right, 13, 10, theirs, mine)):
        with pytest.raises(LayoutMismatchError) as caught:
            one.layout.peer(1 - one.grid.me).attach()
        message, counts = str(caught.value), {10: len(LAYOUT), 13: len(other)}
        start = starts.format(me=me, peer=peer, mine=counts[me], theirs=counts[peer])
        assert message.startswith(f"rank {me} and rank {peer} laid out heap 7.abc {start}")
        assert not mine or message.endswith(f" on rank {peer}: rank {me} has {here}, rank {peer} has {there}")


def test_what_is_announced_of_many_parameters_fits_into_a_store() -> None:
    """One value may have 8 MiB in torch's TCPStore."""
    store = dist.HashStore()
    meet = Rendezvous(store, "7.abc", RankGrid(RANKS, 2, 0), 60.0, RootEvents(refusing))
    names = [f"model.layers.7.mlp.experts.{i}.up_proj.lora_A.default.weight" for i in range(2000)]
    units = units_of([[(name, 1 << 20, BF16) for name in names]] * 40, Settings())
    lines = [unit.lines() for unit in units]
    assert sum(len(line) for unit in lines for line in unit) > 8 << 20
    meet.announce("listener", "token", "digest", units)
    assert len(store.get("odc/7.abc/10/lines")) < 1 << 20


@pytest.mark.parametrize("other", [Settings(accumulate="direct"), Settings(staging_block_bytes=8192)])
def test_other_settings_are_named_on_both_sides(side: Make, other: Settings) -> None:
    left, right = side(0).announce(), side(1, settings=other).announce()
    for one in (left, right):
        with pytest.raises(LayoutMismatchError, match=r"laid out heap .* differently: settings or mesh differ"):
            one.layout.peer(1 - one.grid.me).attach()


def test_a_mismatch_is_named_even_if_the_peer_has_gone(side: Make) -> None:
    left, right = side(0).announce(), side(1, [LAYOUT[0]]).announce()
    right.close()
    with pytest.raises(LayoutMismatchError):
        left.layout.peer(1).attach()


def test_nothing_is_waited_for_that_a_peer_may_delete(side: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank that shuts a root down deletes its keys, even while another reads them."""

    def waits(self: JobStore, key: str) -> bytes:
        raise AssertionError(f"waits for {key!r}, which may be gone, and all calls of this process with it")

    monkeypatch.setattr(JobStore, "get", waits)
    left, right = side(0).announce(calls=[0]), side(1, frozen={"b"}).announce(calls=[0])
    with pytest.raises(LayoutMismatchError, match="rank 13 has b "):
        left.layout.peer(1).attach()
    right.service.abort("ValueError: no words", 13)
    right.leave()()
    assert left.meet._reported(1) is not None
    other = side(0, identity="8.abc", settings=Settings(timeout_s=0.2)).announce(calls=[0, 1])
    with pytest.raises(LayoutMismatchError, match=r"heap 8\.abc differently"):
        other.layout.peer(1).attach()
    for key in ("odc/7.abc/13", "odc/7.abc/10", "odc/7.abc/13/lines"):
        left.meet._store.delete_key(key)
    with pytest.raises(WaitTimeoutError, match="come up"):  # listed, and gone before it is read
        other.layout.peer(1).attach()


# a peer that does not answer ----------------------------------------------------------------------------------------


def test_a_rank_that_never_comes_up_is_named_at_the_deadline(side: Make) -> None:
    left = side(0, settings=Settings(timeout_s=0.2)).announce()
    with pytest.raises(
        WaitTimeoutError, match=r"^rank 10, waiting for rank 13 to come up: .*heap 7\.abc in 0\.2 s"
    ) as e:
        left.layout.peer(1).attach()
    assert e.value.culprit == 13


def test_an_abort_ends_the_wait_for_a_rank_to_come_up(side: Make) -> None:
    left = side(0, settings=Settings(timeout_s=600.0), aborted=refusing).announce()
    with pytest.raises(PeerLostError, match="aborted while waiting for rank 13 to come up"):
        left.layout.peer(1).attach()


@pytest.fixture
def left_over_silent() -> Iterator[tuple[Side, SilentStore]]:
    """The root of rank 10, not announced yet, whose job is aborted once its store is silent."""
    store = SilentStore(silent=False)

    def aborted(doing: str) -> None:
        if store.silent:
            refusing(doing)

    left = Side(store, 0, settings=Settings(timeout_s=600.0), aborted=aborted)
    yield left, store
    store.silent = False
    left.close()
    assert not store.waited, "the wait for the store ends only with it"


def test_an_abort_ends_the_announcement_to_a_silent_store(left_over_silent: tuple[Side, SilentStore]) -> None:
    """As where the host of the store is cut off: this rank knows that before any call of the store ends."""
    left, store = left_over_silent
    list_root = left.meet._list

    def silence(rank: int, calls: list[int] | None) -> None:
        store.silent = True
        list_root(rank, calls)

    left.meet._list = silence  # type: ignore[method-assign]
    with pytest.raises(PeerLostError, match="aborted while asking the job's store"):
        left.announce(calls=[0])
    assert not _listing.locked()


def test_an_abort_ends_what_a_rank_stores_once_it_has_attached_to_all(
    left_over_silent: tuple[Side, SilentStore],
) -> None:
    """This holds the heap's lock, which other threads of the rank wait for."""
    left, store = left_over_silent
    right, settle = Side(store, 1).announce(), left.announce().meet.settle

    def silence() -> None:
        store.silent = True
        settle()

    left.meet.settle = silence  # type: ignore[method-assign]
    left.layout.peer(1).attach()
    assert store.silent and left.layout.peer(1).attached
    store.silent = False
    right.close()


@pytest.fixture
def silent_listener() -> Iterator[str]:
    """A listener that takes connections and does not answer, as that of a stopped process."""
    name = f"odc-test.silent.{os.getpid()}.{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(100)
        yield name


def test_a_server_that_is_held_up_is_not_dead_before_the_deadline(
    side: Make, silent_listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odc.runtime.connect.ATTACH_CHECK_S", 0.05)
    left = side(0, settings=Settings(timeout_s=0.3)).announce()
    side(1).announce(address=silent_listener)
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"rank 10, attaching to rank 13: .*not answered for 0\.3 s") as caught:
        left.layout.peer(1).attach()
    assert time.monotonic() - begin >= 0.3
    assert caught.value.culprit == 13


def test_a_server_that_hung_up_is_asked_again(side: Make) -> None:
    """This process may have been stopped for longer than the server waits for a request."""
    name = f"odc-test.again.{os.getpid()}.{time.monotonic_ns()}"
    message = b'{"error": "no such root"}'
    left = side(0, settings=Settings(timeout_s=60.0)).announce()
    side(1).announce(address=name)
    over = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(100)
        listener.settimeout(0.05)

        def answer_from_the_third_on() -> None:
            heard = 0
            while not over.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as connection:
                    heard += 1
                    if heard > 1:
                        connection.recv(1000)
                    if heard > 2:
                        connection.sendall(struct.pack("!I", len(message)) + message)

        thread = threading.Thread(target=answer_from_the_third_on)
        thread.start()
        with pytest.raises(PeerLostError, match="attaching to rank 13: no such root"):
            left.layout.peer(1).attach()
        over.set()
        thread.join()


def test_an_abort_ends_the_wait_for_a_server_that_is_held_up(side: Make, silent_listener: str) -> None:
    left = side(0, settings=Settings(timeout_s=600.0), aborted=refusing).announce()
    side(1).announce(address=silent_listener)
    with pytest.raises(PeerLostError, match="aborted while attaching to rank 13"):
        left.layout.peer(1).attach()


def test_a_late_rank_blames_the_culprit_and_not_the_peer_that_reports_it(side: Make) -> None:
    left, right = side(0).announce(), side(1).announce()
    right.meet.report("rank 7 died before its first minibatch", 7)
    right.daemon.close()
    with pytest.raises(PeerLostError, match=r"rank 10, attaching to rank 13: .* by rank 7: rank 7 died") as caught:
        left.layout.peer(1).attach()
    assert caught.value.culprit == 7
    assert left.layout.peer(0).board.load(Word.ABORT) == 1 + 7, "peers of this rank learn of it too"


def test_a_rank_that_cannot_attach_aborts_those_it_has_attached_to(side: Make) -> None:
    left, right = side(0).announce(), side(1).announce()
    right.daemon.close()
    with pytest.raises(PeerLostError, match="its server does not answer") as caught:
        left.layout.peer(1).attach()
    assert caught.value.culprit == 13
    assert left.layout.peer(0).board.load(Word.ABORT) == 1 + 13
