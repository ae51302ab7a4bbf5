"""The arena: which rank waits for which, what it refuses, and that its entries are read whole."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.on_ranks import on_ranks
from support.ranks import spawn_ranks
from support.silent import silent_once_a_rank_is_lost

import odc
from odc.errors import HeapMemoryError, OdcError, PeerLostError, WaitTimeoutError
from odc.fsdp import default_store
from odc.protocol.arena_protocol import AbsentMember
from odc.runtime import Arena
from odc.settings import Settings

CHANNELS = ["rows", "more"]
_made = 0


def arena_of(rank: int, world: int, nbytes: int, timeout_s: float = 60.0) -> Arena:
    global _made
    _made += 1
    return Arena(default_store(), range(world), rank, nbytes, CHANNELS, timeout_s, f"arena{_made}")


@on_ranks(2)
def test_entries_pass_between_two_ranks(rank: int, world: int) -> None:
    """Room for one entry of the two channels at a time, so that a put waits for the readers of both."""
    arena, peer = arena_of(rank, world, 4096), 1 - rank
    for step in range(1, 20):
        for channel in CHANNELS:
            arena.put(channel, step, 2048 + 64, [peer]).fill_(2 * step + rank)
            arena.show(channel, signature=100 * step + rank)
            entry = arena.get(channel, step, peer)
            assert entry.signature == 100 * step + peer, f"{entry.signature}"
            assert entry.raw.tolist() == [2 * step + peer] * 2112, f"{channel} of step {step}: {entry.raw}"
            arena.done(channel, step, peer)
    arena.close()


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, world: int) -> None:
    arena = arena_of(rank, world, 1 << 12)
    with pytest.raises(
        HeapMemoryError,
        match=r"rows of step 1 needs 4864 bytes, .* has 4096; declare arena_bytes=4864 or more, and if several threads",
    ):
        arena.put("rows", 1, 4801, [1 - rank])
    with pytest.raises(OdcError, match="no channel 'other'; declared are rows, more"):
        arena.put("other", 1, 1, [1 - rank])
    arena.put("rows", 2, 1, [])
    arena.show("rows")
    with pytest.raises(OdcError, match="rows was put for step 2 already, not only for 2"):
        arena.put("rows", 2, 1, [])
    default_store().set(f"{rank} has put step 2", "")
    default_store().wait([f"{1 - rank} has put step 2"], timedelta(hours=1))
    with pytest.raises(OdcError, match=rf"rank {1 - rank} has put rows of a step after 1: plans differ"):
        arena.get("rows", 1, 1 - rank)
    arena.close()


def keeps_what_is_not_copied(rank: int, world: int) -> None:
    """Rank 1 is there and looks on until rank 0 has given up."""
    arena, store = arena_of(rank, world, 4096, timeout_s=10.0), default_store()
    store.set(f"{rank} is there", "")
    store.wait([f"{1 - rank} is there"], timedelta(hours=1))
    if rank == 1:
        store.wait(["rank 0 has given up"], timedelta(hours=1))
        return
    arena.put("rows", 1, 4096, [1])
    arena.show("rows")
    says = (
        r"rank 1 to read rows of step 1, to make room for more of step 1 \(with arena_bytes=4160 this would not wait\)"
    )
    with pytest.raises(WaitTimeoutError, match=says) as late:
        arena.put("more", 1, 1, [1])
    assert late.value.culprit == 1, str(late.value)
    store.set("rank 0 has given up", "")


def test_a_put_that_finds_no_room_names_the_rank_that_has_not_copied() -> None:
    with spawn_ranks(2, keeps_what_is_not_copied) as ranks:
        outcomes = ranks.wait()
    assert [(one.exit_code, one.error) for one in outcomes] == [(0, None)] * 2, outcomes[0].describe()


def leaves_with_open_arenas(rank: int, world: int) -> None:
    """Each rank has dropped another of them: its peer learns that it leaves the one that it still has, too."""
    kept = {name: Arena(default_store(), range(world), rank, 1 << 12, CHANNELS, 120.0, name) for name in ("a", "b")}
    del kept["ab"[rank]]
    gc.collect()
    odc.shutdown()
    assert len(kept) == 1


@pytest.mark.thorough
def test_a_rank_that_shuts_down_leaves_the_arenas_that_were_not_closed() -> None:
    with spawn_ranks(2, leaves_with_open_arenas) as job:
        outcomes = job.wait()
    assert not any(one.error for one in outcomes), "\n".join(one.describe() for one in outcomes)


def waits_in_a_row(rank: int, world: int) -> tuple[int | None, str]:
    """Each waits for the next one, and the last has an error."""
    arena = arena_of(rank, world, 1 << 12)
    if rank == world - 1:
        with pytest.raises(ValueError, match="page"), contextlib.closing(arena):
            raise ValueError("no such page")
        return rank, ""
    with pytest.raises(PeerLostError) as caught, contextlib.closing(arena):
        arena.get("rows", 1, rank + 1)
    return caught.value.culprit, str(caught.value)


def test_a_rank_that_waits_for_one_that_an_error_has_ended_blames_the_first(ranks: Any) -> None:
    """Not the one in between, which has left because of it."""
    (first, message), (second, _), _ = ranks(3).run(waits_in_a_row)
    assert (first, second) == (2, 2), message
    assert "rank 0 (epoch 0), waiting for rank 1 to put rows" in message
    assert "rank 2 has left the job" in message and "ValueError: no such page" in message


def test_a_loss_ends_an_arena_that_is_made_over_a_silent_store() -> None:
    """As where the host of the store is cut off: this rank knows that before any call of the store ends."""
    ended = pytest.raises(PeerLostError, match="rank 0, making an exchange: the job was aborted by rank 1: rank 1 died")
    with silent_once_a_rank_is_lost() as store, ended:
        Arena(store, range(2), 0, 1 << 12, CHANNELS, 600.0, "silent", hosts=Settings())


def test_threads_that_wait_for_members_to_come_up_learn_each_that_its_own_is_absent() -> None:
    """Channels may be used from several threads."""
    asked, absent, ended = set[int](), set[int](), dict[int, BaseException]()

    def is_absent(member: int) -> bool:
        asked.add(member)
        return member in absent

    arena = Arena(dist.HashStore(), range(3), 0, 1 << 12, CHANNELS, 60.0, "absent", absent=is_absent)

    def get(owner: int) -> None:
        try:
            arena.get(CHANNELS[owner - 1], 1, owner)
        except BaseException as error:
            ended[owner] = error

    threads = {owner: threading.Thread(target=get, args=(owner,)) for owner in (1, 2)}
    for owner, thread in threads.items():
        thread.start()
        while owner not in asked and owner not in ended:
            time.sleep(0.001)
    for owner, thread in threads.items():
        absent.add(owner)
        thread.join()
        assert isinstance(ended[owner], AbsentMember), ended
        assert len(ended) == owner, "the other thread waits on"
    arena.close(needed=False)
