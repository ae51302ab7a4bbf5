"""How the ranks of a job meet before NVSHMEM's collectives, and agree on where models lie; with threads for ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.silent import silent_once_a_rank_is_lost
from support.waiting import until

from odc import Settings
from odc.errors import HeapMemoryError, LayoutMismatchError, PeerLostError, UnsupportedError, WaitTimeoutError
from odc.memory import nvshmem as memory
from odc.net.announced import announce_failure, host_identity
from odc.net.store import JobStore
from odc.runtime import nvshmem
from odc.runtime.daemon import process_status
from odc.runtime.nvshmem import AllRanks, end_nvshmem, placer

MIB = 1 << 20


def on_threads(ranks: int, run: Callable[[int], Any]) -> dict[int, Any]:
    """What `run(rank)` returns or raises."""
    found: dict[int, Any] = {}

    def live(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert len(found) == ranks, "a thread hangs"
    return found


def store_of(shared: Any, rank: int, timeout_s: float = 60.0) -> JobStore:
    return JobStore(shared, timeout_s, rank)


# gathering -----------------------------------------------------------------------------------------------------------


def test_all_ranks_learn_what_all_bring() -> None:
    shared = dist.HashStore()
    found = on_threads(3, lambda rank: AllRanks(store_of(shared, rank), "m", 3, rank).gather(str(rank * rank), "meet"))
    assert [found[rank] for rank in range(3)] == [[b"0", b"1", b"4"]] * 3


def test_a_late_rank_is_named_and_is_not_met_any_more() -> None:
    """The one that comes after the others have given up raises as well: alone it would wait in a collective."""
    shared = dist.HashStore()
    expected = r"rank 0, waiting for all 2 ranks .* to start: rank 1 has not in 0\.1 s"
    with pytest.raises(WaitTimeoutError, match=expected) as late:
        AllRanks(store_of(shared, 0, 0.1), "m", 2, 0).gather("", "start")
    assert late.value.culprit == 1
    with pytest.raises(PeerLostError, match="rank 1, waiting .*: rank 1 has not in") as refused:
        AllRanks(store_of(shared, 1), "m", 2, 1).gather("", "start")
    assert refused.value.culprit == 1


def test_one_that_gives_up_when_the_others_go_on_goes_on_too() -> None:
    """All had come, and another rank's word came first."""
    shared = dist.HashStore()

    class Impatient(JobStore):
        def await_key(self, key: str, late: str, **options: Any) -> bytes:
            patient = AllRanks(store_of(shared, 1), "m", 2, 1)
            assert patient.gather("b", "start") == [b"a", b"b"]
            raise WaitTimeoutError(late)

    assert AllRanks(Impatient(shared, 60.0, 0), "m", 2, 0).gather("a", "start") == [b"a", b"b"]


def test_ranks_that_wait_end_with_the_first_that_gives_up() -> None:
    shared = dist.HashStore()

    def live(rank: int) -> Any:
        if rank == 0:
            until(lambda: shared.check(["m/1"]))
        return AllRanks(store_of(shared, rank, 0.3 if rank == 0 else 60.0), "m", 3, rank).gather("", "start")

    found = on_threads(2, live)
    assert isinstance(found[0], WaitTimeoutError) and isinstance(found[1], PeerLostError), found
    assert found[0].culprit == found[1].culprit == 2


def test_a_rank_that_has_failed_is_named() -> None:
    shared = dist.HashStore()
    announce_failure(store_of(shared, 1), "ValueError: no such data", 1)
    with pytest.raises(PeerLostError, match="ValueError: no such data") as lost:
        AllRanks(store_of(shared, 0), "m", 2, 0).gather("", "start")
    assert lost.value.culprit == 1


def test_a_rank_whose_process_has_ended_is_named() -> None:
    shared, dead = dist.HashStore(), subprocess.Popen([sys.executable, "-c", ""])
    store = store_of(shared, 0)
    from odc.net.announced import _key, _namespace  # what the dead process would have announced

    store.set(_key(1), f'[{dead.pid}, "{_namespace()}", "{host_identity()}"]')
    dead.wait()
    with pytest.raises(PeerLostError, match="the process of rank 1 has ended") as lost:
        AllRanks(store, "m", 2, 0).gather("", "start")
    assert lost.value.culprit == 1


# places --------------------------------------------------------------------------------------------------------------


def job_of(shared: Any, rank: int, nbytes: int) -> Any:
    library: Any = SimpleNamespace(rank=rank, nbytes=nbytes)
    return nvshmem._Job(library, weakref.ref(shared), "p", os.getpid())


def test_roots_lie_at_equal_offsets_in_whatever_order_they_are_run() -> None:
    shared = dist.HashStore()

    def live(rank: int) -> dict[str, int]:
        store, job = store_of(shared, rank), job_of(shared, rank, 64 * MIB)
        names = [f"root {(i + rank) % 4}" for i in range(4)]
        return {name: nvshmem._place(store, job, name, (0, 1, 2, 3), 3 * MIB).offset for name in names}

    found = on_threads(4, live)
    assert all(one == found[0] for one in found.values()), found
    assert sorted(found[0].values()) == [0, 4 * MIB, 8 * MIB, 12 * MIB]


def test_roots_that_share_no_rank_may_share_an_offset() -> None:
    shared = dist.HashStore()
    pairs = {0: (0, 2), 1: (1, 3)}
    at = {
        rank: nvshmem._place(store_of(shared, rank), job_of(shared, rank, 4 * MIB), f"{pair}", pair, 4 * MIB).offset
        for rank, pair in pairs.items()
    }
    assert at == {0: 0, 1: 0}
    expected = r"rank 2: heap all needs 1\.0 MiB .* 0\.0 of 4\.0 MiB are left.* to 6291456 or more"
    with pytest.raises(HeapMemoryError, match=expected):
        nvshmem._place(store_of(shared, 2), job_of(shared, 2, 4 * MIB), "all", (0, 1, 2, 3), MIB)


def test_a_root_of_another_size_on_another_rank_is_refused() -> None:
    shared = dist.HashStore()
    nvshmem._place(store_of(shared, 0), job_of(shared, 0, 64 * MIB), "root", (0, 1), 3 * MIB)
    with pytest.raises(LayoutMismatchError, match="rank 1: heap root takes 9437184 bytes here, and 4194304 on another"):
        nvshmem._place(store_of(shared, 1), job_of(shared, 1, 64 * MIB), "root", (0, 1), 9 * MIB)


# start and end, of rank 0 of two -------------------------------------------------------------------------------------


class FakeLibrary:
    """NVSHMEM, started."""

    def __init__(self, uid: bytes, rank: int, ranks: int, device: torch.device, nbytes: int) -> None:
        self.uid, self.rank, self.ranks, self.nbytes, self.ended = uid, rank, ranks, nbytes, 0

    def finalize(self) -> None:
        self.ended += 1


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """The bytes and the interface that NVSHMEM was given at each start."""
    found = list[tuple[int, str | None]]()
    monkeypatch.setattr(memory, "set_environment", lambda nbytes, interface, rank: found.append((nbytes, interface)))
    return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, given: object) -> Any:
    """A store in which rank 1 is ready, and needs 10 MiB."""
    monkeypatch.setattr(memory, "core", lambda: None)
    monkeypatch.setattr(memory, "make_id", lambda: b"the id")
    monkeypatch.setattr(nvshmem, "Library", FakeLibrary)
    monkeypatch.setattr(nvshmem, "_require_free", lambda *unused: None)
    monkeypatch.setattr(nvshmem, "_job", None)
    monkeypatch.setattr(nvshmem, "own_address", lambda store, address: "127.0.0.1")
    store = dist.HashStore()
    other_is_ready(store, 0)
    return store


def other_is_ready(store: Any, number: int, host: str = "") -> None:
    other = store_of(store, 1)
    other.set(f"odc/nvshmem/{number}/need/1", json.dumps([10 * MIB, host or host_identity()]))
    other.set(f"odc/nvshmem/{number}/ready/1", "")


def place(store: Any, identity: str = "root", nbytes: int = 3 * MIB, **settings: Any) -> tuple[Any, int]:
    chosen = Settings(timeout_s=60.0, memory="nvshmem", **settings)
    return placer(store, identity, (0, 1), chosen, 0, 2, torch.device("cpu"))(nbytes)  # type: ignore[return-value]


def test_it_starts_once_with_as_much_as_any_rank_needs(shared: Any, given: list[Any]) -> None:
    library, offset = place(shared)
    assert (library.nbytes, library.uid, library.rank, library.ranks, offset) == (10 * MIB, b"the id", 0, 2, 0)
    assert given == [(10 * MIB, None)], "on one host NVSHMEM finds the interface by itself"
    assert place(shared, "second") == (library, 4 * MIB)


def test_a_setting_asks_for_more(shared: Any) -> None:
    assert place(shared, nvshmem_bytes=31 * MIB)[0].nbytes == 32 * MIB


def test_over_hosts_the_interface_of_this_host_is_given(shared: Any, given: list[Any]) -> None:
    other_is_ready(shared, 0, host="another")
    place(shared)
    assert given == [(10 * MIB, "lo")]


def test_it_ends_with_all_ranks_and_may_start_again(shared: Any) -> None:
    library, _ = place(shared)
    store_of(shared, 1).set("odc/nvshmem/0/end/1", "")
    end_nvshmem(failed=False)
    assert library.ended == 1
    other_is_ready(shared, 1)
    again, offset = place(shared)
    assert again is not library and offset == 0


@pytest.mark.parametrize("why", ["failed", "gradient views", "another rank", "late"])
def test_no_rank_ends_it_where_one_cannot(shared: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "NVSHMEM_END_S", 0.1)
    library, _ = place(shared, gradient_views=why == "gradient views")
    if why != "late":
        store_of(shared, 1).set("odc/nvshmem/0/end/1", "")
    if why == "another rank":
        store_of(shared, 1).set("odc/nvshmem/0/end", '[1, "it has failed"]')
    end_nvshmem(failed=why == "failed")
    assert library.ended == 0
    word = store_of(shared, 1).find("odc/nvshmem/0/end")
    assert word is not None and word != b"all have come", "the others learn of it"
    assert place(shared)[0] is library, "its memory stays, for what is left of the job"


def test_another_job_in_the_same_process_is_refused(shared: Any) -> None:
    place(shared)
    with pytest.raises(UnsupportedError, match="rank 0: this process has used NVSHMEM in another job"):
        place(dist.HashStore())


def test_a_loss_ends_the_wait_for_a_silent_store(shared: Any) -> None:
    ended = pytest.raises(PeerLostError, match="rank 0, finding a place for heap root: .* rank 1 died")
    with silent_once_a_rank_is_lost() as store, ended:
        place(store)


def test_recovery_is_refused(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(process_status, "recovery", {})
    with pytest.raises(UnsupportedError, match=r"memory='nvshmem'\) with odc\.Recovery: NVSHMEM cannot replace a rank"):
        place(shared)
