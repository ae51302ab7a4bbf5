"""What every symmetric heap must do. A backend's tests subclass `HeapConformance` and set `group`.

Everything runs in real processes (the pool of `ranks`), because what a process sees of its own writes says nothing of
what another one sees. Module-level functions below run on every rank; they take `(rank, world, group, identity, ...)`,
where `group(identity, ranks, me, deadline_s)` is a context manager that yields this member's unsealed heap and
serves it to the others until the block ends.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odc.errors import LayoutMismatchError, OdcError, WaitTimeoutError
from odc.memory import SymmetricHeap, Words

Group = Callable[[str, tuple[int, ...], int, float], AbstractContextManager[SymmetricHeap]]

WORDS = frozenset({"flags"})  # regions that processors load and store, whatever the data lies on
REGIONS = (("flags", 8 * 16), ("odd", 100), ("small", 4096), ("large", 3 << 20))
GLOBAL = 10  # member m is global rank 10 + m, so that a message with member indices is noticed
DEADLINE_S = 60.0


@contextmanager
def sealed(
    group: Group,
    identity: str,
    rank: int,
    world: int,
    regions: tuple[tuple[str, int], ...] = REGIONS,
    mark: str = "v1",
    *,
    mapped: bool = True,
) -> Iterator[SymmetricHeap]:
    """This member's sealed heap; at the end everyone waits for everyone, so that no peer leaves too early.

    Device memory is mapped by all members at once; with `mapped` they do it here, and then reach whom they like.
    """
    with group(identity, tuple(GLOBAL + member for member in range(world)), rank, DEADLINE_S) as heap:
        for name, nbytes in regions:
            heap.allocate(name, nbytes, words=name in WORDS)
        heap.seal(mark)
        if mapped and heap.device.type != "cpu":
            for member in range(world):
                heap.whole(member)
        yield heap
        dist.barrier()


def await_word(words: Words, i: int, least: int) -> int:
    """Poll until word `i` is at least `least`."""
    deadline = time.monotonic() + DEADLINE_S
    while (value := words.load(i)) < least:
        assert time.monotonic() < deadline, f"word {i} stays at {value}, waited for {least}"
        time.sleep(0)
    return value


def starts_zeroed(rank: int, world: int, group: Group, identity: str) -> None:
    with sealed(group, identity, rank, world) as heap:
        for member in range(world):
            for name, nbytes in REGIONS:
                tensor = heap.tensor(member, name, torch.uint8)
                assert tensor.shape == (nbytes,), (name, tensor.shape)
                assert not tensor.any(), f"{name} of member {member} is not zero"
        dist.barrier()


def describes_itself(rank: int, world: int, group: Group, identity: str) -> tuple[Any, ...]:
    with sealed(group, identity, rank, world, mapped=False) as heap:
        assert (heap.identity, heap.me, heap.sealed) == (identity, rank, True), "identity, me, sealed"
        assert heap.ranks == tuple(GLOBAL + member for member in range(world)), heap.ranks
        assert heap.attached(rank), "the own memory needs no attaching"
        before = [heap.attached(member) for member in range(world) if member != rank]
        bases = [heap.whole(member).data_ptr() for member in range(world)]
        after = [heap.attached(member) for member in range(world) if member != rank]
        for member in range(world):
            for name, _ in REGIONS:
                address = heap.address(member, name)
                assert address == heap.tensor(member, name, torch.uint8).data_ptr(), f"{name} of {member}"
                on_device = name not in WORDS or heap.device.type == "cpu"
                assert not on_device or address == bases[member] + heap.layout.offset(name), f"base of {member}"
                assert address % 64 == 0, f"{name} starts at {address:#x}"
        named = heap.bytes_by_name()
        assert named.items() >= dict(REGIONS).items(), named
        assert sum(named.values()) <= heap.nbytes, (named, heap.nbytes)
        return before, after, heap.digest, heap.nbytes


def writes_are_seen(rank: int, world: int, group: Group, identity: str, dtype: torch.dtype) -> None:
    """Each member puts a pattern into the next one's heap, and gets what the previous one wrote into its own."""
    count, skip = 50_000, 37
    pattern = torch.arange(count, dtype=torch.float32).remainder(251).to(dtype)
    following, preceding = (rank + 1) % world, (rank - 1) % world
    with sealed(group, identity, rank, world) as heap:
        put = heap.tensor(following, "large", dtype, offset=skip, numel=count)
        put.copy_(pattern + rank)
        heap.lanes.settle()
        heap.words(following, "flags").store(rank, 1)
        await_word(heap.words(rank, "flags"), preceding, 1)
        mine = heap.tensor(rank, "large", dtype).cpu()
        assert torch.equal(mine[skip : skip + count], (pattern + preceding).to(dtype)), "what was put is not there"
        assert not mine[:skip].any(), "written before the offset"
        assert not mine[skip + count :].any(), "written behind the end"
        got = torch.empty(count, dtype=dtype).copy_(heap.tensor(following, "large", dtype, offset=skip, numel=count))
        assert torch.equal(got, (pattern + rank).to(dtype)), "what was put cannot be got"
        dist.barrier()


def passes_messages(rank: int, world: int, group: Group, identity: str, rounds: int) -> int:
    """Litmus: rank 0 writes a payload, then stores the round; a load of the round must then see the whole payload."""
    with sealed(group, identity, rank, world) as heap:
        payload = heap.tensor(0, "small", torch.int64)
        flags = heap.words(0, "flags")
        torn = 0
        for turn in range(1, rounds + 1):
            if rank == 0:
                payload.fill_(turn)
                heap.lanes.settle()
                flags.store(0, turn)
                for other in range(1, world):
                    await_word(flags, other, turn)
            else:
                await_word(flags, 0, turn)
                low, high = payload.aminmax()
                torn += not (int(low) == int(high) == turn)
                flags.store(rank, turn)
        return torn


def streams_messages(rank: int, world: int, group: Group, identity: str, rounds: int) -> int:
    """Litmus without a pause: a payload may be newer than the word that announced it, never older."""
    with sealed(group, identity, rank, world) as heap:
        payload = heap.tensor(0, "small", torch.int64)
        flags = heap.words(0, "flags")
        stale, seen = 0, 0
        if rank == 0:
            await_word(flags, 1, 1)
            for turn in range(1, rounds + 1):
                payload.fill_(turn)
                heap.lanes.settle()
                flags.store(0, turn)
        else:
            flags.store(rank, 1)
            deadline = time.monotonic() + DEADLINE_S
            while seen < rounds and time.monotonic() < deadline:
                seen = flags.load(0)
                stale += int(payload.min()) < seen
        dist.barrier()
        return stale


def adds_atomically(rank: int, world: int, group: Group, identity: str, rounds: int) -> int:
    with sealed(group, identity, rank, world) as heap:
        words = heap.words(0, "flags")
        words.add(8, 1)
        await_word(words, 8, world)  # all at once from here
        olds = [words.add(1, 3) for _ in range(rounds)]
        dist.barrier()
        assert sorted(olds) == olds, "an older value came later"
        return words.load(1)


def lays_out(rank: int, world: int, group: Group, identity: str, changed: dict[str, Any]) -> str:
    """Rank 1 asks for something else; both must learn of it when they attach."""
    regions, mark = (changed.get("regions", REGIONS), changed.get("mark", "v1")) if rank == 1 else (REGIONS, "v1")
    with sealed(group, identity, rank, world, regions, mark, mapped=False) as heap:
        with pytest.raises(LayoutMismatchError) as failure:
            heap.tensor(1 - rank, "flags", torch.uint8)
        assert not heap.attached(1 - rank), "attached all the same"
        return str(failure.value)


def misses_a_peer(rank: int, world: int, group: Group, identity: str) -> tuple[str, float]:
    """Rank 1 never comes up."""
    if rank == 1:
        dist.barrier()
        return "", 0.0
    with group(identity, (GLOBAL, GLOBAL + 1), rank, 0.3) as heap:
        heap.allocate("flags", 64, words=True)
        heap.seal()
        begin = time.monotonic()
        with pytest.raises(WaitTimeoutError) as failure:
            heap.words(1, "flags")
        took = time.monotonic() - begin
        dist.barrier()
        return str(failure.value), took


def refuses_misuse(rank: int, world: int, group: Group, identity: str) -> None:
    with group(identity, tuple(range(world)), rank, DEADLINE_S) as heap:
        heap.allocate("a", 64)
        for bad in (lambda: heap.allocate("a", 64), lambda: heap.allocate("", 64), lambda: heap.allocate("b", 0)):
            with pytest.raises(ValueError):
                bad()
        with pytest.raises(OdcError, match="not sealed"):
            heap.tensor(rank, "a", torch.uint8)
        heap.seal()
        with pytest.raises(OdcError, match="sealed"):
            heap.allocate("late", 64)
        with pytest.raises(OdcError, match="once"):
            heap.seal()
        with pytest.raises(KeyError, match="nowhere"):
            heap.tensor(rank, "nowhere", torch.uint8)
        with pytest.raises(IndexError):
            heap.tensor(world, "a", torch.uint8)
        with pytest.raises(IndexError):
            heap.tensor(-1, "a", torch.uint8)
        for offset, numel in ((0, 17), (16, 1), (17, None), (-1, 2), (0, -1)):
            with pytest.raises(ValueError):
                heap.tensor(rank, "a", torch.float32, offset=offset, numel=numel)
        assert heap.tensor(rank, "a", torch.float32, offset=16).numel() == 0, "an empty view is no error"
        dist.barrier()


def outlives_close(rank: int, world: int, group: Group, identity: str) -> None:
    with sealed(group, identity, rank, world) as heap:
        views = [heap.tensor(member, "small", torch.int64) for member in range(world)]
        words = heap.words((rank + 1) % world, "flags")
        dist.barrier()
        heap.close()
        heap.close()
        for use in (lambda: heap.tensor(rank, "small", torch.int64), lambda: heap.words((rank + 1) % world, "flags")):
            with pytest.raises(OdcError, match="closed"):
                use()
        views[(rank + 1) % world].fill_(rank + 1)
        heap.lanes.settle()
        words.store(0, 7)
        dist.barrier()
        assert views[rank].tolist() == [1 + (rank - 1) % world] * views[rank].numel(), "views died with the heap"


class HeapConformance:
    """Tests that every backend passes. Set `group` to a module-level function that rank processes can import."""

    group: Group

    def run(self, ranks: Callable[[int], Any], function: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
        group = type(self).__dict__["group"].__func__
        return ranks(world).run(function, group, uuid.uuid4().hex[:12], *args)

    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_starts_zeroed(self, ranks: Callable[[int], Any], world: int) -> None:
        self.run(ranks, starts_zeroed, world=world)

    @pytest.mark.parametrize("world", [1, 3])
    def test_describes_itself(self, ranks: Callable[[int], Any], world: int) -> None:
        found = self.run(ranks, describes_itself, world=world)
        assert all(not any(before) and all(after) for before, after, *_ in found)
        assert len({tuple(rest) for _, _, *rest in found}) == 1, "digest and size are the same everywhere"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
    def test_writes_are_seen(self, ranks: Callable[[int], Any], dtype: torch.dtype) -> None:
        self.run(ranks, writes_are_seen, dtype, world=3)

    def test_message_passing(self, ranks: Callable[[int], Any]) -> None:
        assert self.run(ranks, passes_messages, 3000) == [0, 0]

    def test_message_streaming(self, ranks: Callable[[int], Any]) -> None:
        assert self.run(ranks, streams_messages, 50_000) == [0, 0]

    def test_atomics(self, ranks: Callable[[int], Any]) -> None:
        assert self.run(ranks, adds_atomically, 5000, world=3) == [3 * 3 * 5000] * 3

    @pytest.mark.parametrize(
        ("changed", "differs"),
        [
            ({"regions": (*REGIONS[:3], ("large", 2 << 20))}, r"'large' of 3145728 bytes.*'large' of 2097152 bytes"),
            ({"regions": (REGIONS[1], REGIONS[0], *REGIONS[2:])}, r"'flags' of 128 bytes.*'odd' of 100 bytes"),
            ({"regions": (REGIONS[0], ("even", 100), *REGIONS[2:])}, r"'odd' of 100 bytes.*'even' of 100 bytes"),
            ({"regions": (*REGIONS, ("more", 64))}, r"'more' of 64 bytes"),
            ({"mark": "v2"}, r"'v1'.*'v2'"),
        ],
        ids=["size", "order", "name", "count", "fingerprint"],
    )
    def test_other_layouts_are_refused(self, ranks: Callable[[int], Any], changed: dict, differs: str) -> None:
        first, second = self.run(ranks, lays_out, changed)
        assert re.search(differs, first), first
        assert f"rank {GLOBAL} and rank {GLOBAL + 1} " in first
        assert f"rank {GLOBAL + 1} and rank {GLOBAL} " in second

    def test_a_peer_that_never_comes(self, ranks: Callable[[int], Any]) -> None:
        (message, took), _ = self.run(ranks, misses_a_peer)
        assert f"rank {GLOBAL + 1}" in message
        assert took >= 0.3

    def test_misuse_is_refused(self, ranks: Callable[[int], Any]) -> None:
        self.run(ranks, refuses_misuse)

    def test_views_outlive_close(self, ranks: Callable[[int], Any]) -> None:
        self.run(ranks, outlives_close, world=3)
