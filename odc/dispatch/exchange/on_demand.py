"""Exchange without any collective: each rank writes its rows to its arena, and peers copy theirs one-sided.

A rank waits only for the ranks it gets rows from, when it needs them. Over hosts every row crosses the network once, to
the rank that gets it, and what is gathered once to every host.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from odc.dispatch.exchange.checked_group import require_same_plan
from odc.dispatch.exchange.rows import as_bytes, from_bytes, instances_of_host, kinds_of, signature
from odc.dispatch.rearrangement import Ints
from odc.dispatch.route import Route, Run
from odc.errors import HeapMemoryError, OdcError, PlanError, UnsupportedError
from odc.runtime import Arena
from odc.settings import Settings
from odc.trace import FETCH, recorder

_OF_HOST = "@host"  # added to a channel: what was gathered from the members with this index on all hosts
_LANE = "plan"  # the planning thread's in the trace
_HEAD = 8  # bytes for each destination: where its rows begin


class OnDemandExchange:
    """An `Exchange` over an arena in shared memory; see there for the methods. Needs no process group.

    Args:
        store: of the job; `torch.distributed.TCPStore` for example.
        ranks: global ranks of the instances; `rank` is this one's.
        channels: every name that is moved or gathered under; a backward's is its forward's with ".back".
        arena_bytes: room on each rank for what others have yet to copy, at least the bytes of one channel. With all
            that a rank moves and gathers in one step no rank waits for room. With less than that, what a thread plans
            ahead and what another one moves can wait for each other's room in a circle of ranks, up to the deadline.
        timeout_s: how long a wait may last without progress of the peer it waits for.
        name: unlike that of any other exchange of these ranks.
        hosts: its address, ports, secret_file and engine are for ranks on several hosts; see `odc.Settings`.

    Waits until all ranks have called `fully_shard` or make an exchange.
    """

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        channels: Sequence[str],
        *,
        arena_bytes: int = 64 << 20,
        timeout_s: float = 600.0,
        name: str = "dispatch",
        hosts: Settings | None = None,
    ) -> None:
        everything = [*channels, *(channel + _OF_HOST for channel in channels)]
        self._arena = Arena(store, ranks, rank, arena_bytes, everything, timeout_s, name, hosts or Settings())
        self.ranks, self.me = self._arena.grid.ranks, self._arena.grid.me
        self.moved: dict[str, int] = Counter()
        self.buffer_bytes = self._arena.nbytes

    @property
    def per_host(self) -> int:
        return instances_of_host(self._arena.grid)

    def gather(self, step: int, channel: str, values: Ints) -> list[Ints]:
        grid, mine = self._arena.grid, np.array(values, np.int64)
        neighbours = [member for member in grid.others() if not grid.is_remote(member)]
        found = [mine] * len(self.ranks)
        if not grid.remote:
            self._show_all(channel, step, mine, neighbours)
            for owner in neighbours:
                found[owner] = self._shown_by(channel, step, owner)
            return found
        # First from the member with this index on every other host, then from the neighbours, which have done the same.
        self._show_all(channel, step, mine, grid.partners)
        for owner in grid.partners:
            found[owner] = self._shown_by(channel, step, owner)
        of_hosts = [found[grid.me if host == grid.here else grid.partner(host)] for host in range(grid.host_count)]
        self._show_all(
            channel + _OF_HOST, step, np.concatenate([[len(one) for one in of_hosts], *of_hosts]), neighbours
        )
        for neighbour in neighbours:
            both = self._shown_by(channel + _OF_HOST, step, neighbour)
            lengths, values_of_hosts = np.split(both, [grid.host_count])
            for host, part in enumerate(np.split(values_of_hosts, np.cumsum(lengths))[:-1]):
                found[grid.on(host)[grid.index(neighbour)]] = part
        return found

    def _show_all(self, channel: str, step: int, values: Ints, readers: Sequence[int]) -> None:
        raw = self._arena.put(channel, step, values.nbytes, readers, _LANE)
        raw.copy_(torch.from_numpy(np.ascontiguousarray(values, np.int64).view(np.uint8)))
        self._arena.show(channel)

    def _shown_by(self, channel: str, step: int, owner: int) -> Ints:
        found = self._arena.get(channel, step, owner, _LANE).raw.numpy().view(np.int64).copy()
        self._arena.done(channel, step, owner)
        return found

    @torch.no_grad()
    def move(
        self, step: int, channel: str, route: Route, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        who, what = f"rank {self.ranks[self.me]}", f"moving {channel} of step {step}"
        try:
            kinds = kinds_of(route, tensors, who)
            _refuse_devices(tensors, who)
        except OdcError as error:
            self._arena.refuse(f"{what}: the step is refused: {error}")
            raise
        raw = {name: as_bytes(tensor) for name, tensor in tensors.items()}
        mark = signature(route, kinds)
        widths = {name: kind.row_bytes for name, kind in kinds.items()}
        try:
            self._lay_out(step, channel, route, raw, widths, mark)
        except HeapMemoryError as error:
            self._arena.refuse(f"{what}: the step is refused: {error}")
            raise
        got = {
            name: torch.empty(len(field.unpack), widths[name], dtype=torch.uint8, device="cpu")
            for name, field in route.fields.items()
        }
        for name, field in route.fields.items():
            _own_rows(raw[name], got[name], field.outgoing[self.me], field.incoming[self.me])
        for owner in self._arena.grid.others():
            if any(field.received[owner] for field in route.fields.values()):
                self._take(step, channel, route, owner, got, mark, what)
        return {name: from_bytes(got[name], kind) for name, kind in kinds.items()}

    def close(self) -> None:
        self._arena.close()

    def _lay_out(
        self, step: int, channel: str, route: Route, raw: dict[str, torch.Tensor], widths: dict[str, int], mark: int
    ) -> None:
        """Write what others get: a head with the place where each rank's rows begin, then the rows, field by field."""
        heads, end = [0] * len(self.ranks), _HEAD * len(self.ranks)
        for reader in range(len(self.ranks)):
            heads[reader] = end
            if reader != self.me:
                end += sum(int(field.sent[reader]) * widths[name] for name, field in route.fields.items())
        readers = [
            reader for reader in self._arena.grid.others() if any(field.sent[reader] for field in route.fields.values())
        ]
        if not readers:
            return
        room = self._arena.put(channel, step, end, readers)
        room[: _HEAD * len(self.ranks)].copy_(torch.tensor(heads, device="cpu").view(torch.uint8))
        base = room.data_ptr()
        for reader in readers:
            at = base + heads[reader]
            for name, field in route.fields.items():
                _copy(at, raw[name].data_ptr(), field.outgoing[reader], widths[name])
                at += int(field.sent[reader]) * widths[name]
        self.moved[channel] += end - _HEAD * len(self.ranks)
        self._arena.show(channel, mark)

    def _take(
        self, step: int, channel: str, route: Route, owner: int, got: dict[str, torch.Tensor], mark: int, what: str
    ) -> None:
        """Copy this rank's rows out of the owner's arena."""
        entry = self._arena.get(channel, step, owner)
        begin = recorder().now()
        try:
            require_same_plan([(mark,), (entry.signature,)], (self.ranks[self.me], self.ranks[owner]), 0, what)
        except PlanError as error:
            self._arena.refuse(str(error))
            raise
        head = int(entry.part(_HEAD * self.me, _HEAD).view(torch.int64))
        nbytes = sum(int(field.received[owner]) * got[name].shape[1] for name, field in route.fields.items())
        rows = entry.part(head, nbytes)
        at = rows.data_ptr()
        for name, field in route.fields.items():
            width = got[name].shape[1]
            _copy_out(got[name].data_ptr(), at, field.incoming[owner], width)
            at += int(field.received[owner]) * width
        self._arena.done(channel, step, owner)
        recorder().add(FETCH, begin, unit=channel, peer=self.ranks[owner], nbytes=nbytes)


def _refuse_devices(tensors: Mapping[str, torch.Tensor], who: str) -> None:
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"{who}: field {name!r} is on {tensor.device}; on demand only CPU tensors move yet")


def _copy(to: int, source: int, runs: list[Run], width: int) -> None:
    """Copy local rows to where a reader finds them."""
    memmove = ctypes.memmove
    for there, here, rows in runs:
        memmove(to + there * width, source + here * width, rows * width)


def _copy_out(to: int, source: int, runs: list[Run], width: int) -> None:
    """Copy a peer's rows to their local places."""
    memmove = ctypes.memmove
    for there, here, rows in runs:
        memmove(to + here * width, source + there * width, rows * width)


def _own_rows(raw: torch.Tensor, got: torch.Tensor, outgoing: list[Run], incoming: list[Run]) -> None:
    """Copy the rows that stay on this rank, through the send order."""
    rows = sum(rows for _, _, rows in outgoing)
    between = torch.empty(rows, raw.shape[1], dtype=torch.uint8, device="cpu")
    _copy(between.data_ptr(), raw.data_ptr(), outgoing, raw.shape[1])
    _copy_out(got.data_ptr(), between.data_ptr(), incoming, raw.shape[1])
