"""Tables of numbers for launches, through memory that is made beforehand.

A launch takes addresses in tables on its device, which change from launch to launch. odc's threads must allocate
nothing, as that may wait for every kernel that runs on the device. So each stream in which they launch has a ring:
pinned memory, and as much on the device, for so many tables.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import lru_cache

import torch

_KEPT = 1024  # tables that are allocated one by one; each takes 512 bytes of a device or a few more
#: Of a ring: how many tables, and the numbers of the longest; 4 MiB here and as much there. A fetch takes two tables,
#: so a minibatch of some hundred units finds those of the last one. A table has a number for each parameter of a unit.
SLOTS, NUMBERS = 256, 2048
HELD = 9  # tables, the most that a call takes: one of the owners, and two for each of four dtypes


class TableRing:
    """Tables of one stream, which must be the current one in every call. Any thread may call any method.

    The least recently asked for table makes room. What the stream was asked for before has read it, in its order. A
    thread may still be about to launch with the `HELD` tables that it has asked for last, however long it is held up:
    none of these makes room.
    """

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._here = torch.zeros(SLOTS, NUMBERS, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._there = torch.zeros(SLOTS, NUMBERS, dtype=torch.int64, device=device)
        self._numbers = self._here.numpy()
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)] if pinned else []
        # By their numbers the slot and its view, which is made once; the next to make room first.
        self._tables: OrderedDict[tuple[int, ...], tuple[int, torch.Tensor]] = OrderedDict()
        self._held: weakref.WeakKeyDictionary[threading.Thread, deque[int]] = weakref.WeakKeyDictionary()  # their slots
        self._changing = threading.Lock()

    def table(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """int64 [numbers] on the device, for the launches of this thread until it has asked for `HELD` others."""
        with self._changing:
            found = self._tables.get(numbers)
            if found is None:
                slot = self._room()
                if slot is None:
                    return pointer_table(numbers, self._there.device)
                self._fill(slot, numbers)
                found = self._tables[numbers] = slot, self._there[slot, : len(numbers)]
            self._tables.move_to_end(numbers)
            self._hold(found[0])
            return found[1]

    def _room(self) -> int | None:
        """The slot to fill next; None if threads hold every one."""
        if len(self._tables) < SLOTS:
            return len(self._tables)
        held = set(itertools.chain.from_iterable(self._held.values()))
        oldest = next((numbers for numbers, (slot, _) in self._tables.items() if slot not in held), None)
        return None if oldest is None else self._tables.pop(oldest)[0]

    def _hold(self, slot: int) -> None:
        thread = threading.current_thread()
        held = self._held.get(thread)
        if held is None:
            held = self._held[thread] = deque(maxlen=HELD)
        elif slot in held:
            held.remove(slot)
        held.append(slot)

    def _fill(self, slot: int, numbers: tuple[int, ...]) -> None:
        copied = self._copied[slot] if self._copied else None
        if copied is not None:
            copied.synchronize()  # over, unless the stream is `SLOTS` tables behind
        self._numbers[slot, : len(numbers)] = numbers
        self._there[slot, : len(numbers)].copy_(self._here[slot, : len(numbers)], non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._there.device))


_rings: dict[tuple[torch.device, int], TableRing] = {}


def reserve_tables(device: torch.device) -> None:
    """Make the ring of the current stream, if it has none. It stays: streams are torch's, which reuses them."""
    key = device, _stream(device)
    if key not in _rings:
        _rings[key] = TableRing(device)


def passing_table(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64, 1-D, read-only, for this thread's next launches in the current stream; a `pointer_table` may be kept.

    Allocates nothing where the stream has a ring and the numbers are no more than `NUMBERS`. Does not wait.
    """
    ring = _rings.get((device, _stream(device))) if _rings and len(numbers) <= NUMBERS else None
    return pointer_table(numbers, device) if ring is None else ring.table(tuple(numbers))


def pointer_table(addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64, 1-D, read-only. Does not wait for the device: the copy is one more operation of the current stream.

    The latest tables are cached by stream: a unit is often fetched to where it was fetched before.
    """
    return _kept(tuple(addresses), device, _stream(device))


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@lru_cache(maxsize=_KEPT)
def _kept(numbers: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """Used by one stream only: its work follows the copy, and freed memory is reused by that stream first."""
    on_cuda = device.type == "cuda"
    # From pageable memory torch would wait for the copy, and so for all earlier work of the stream.
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=on_cuda and len(numbers) > 0)
    return host.to(device, non_blocking=True) if on_cuda else host
