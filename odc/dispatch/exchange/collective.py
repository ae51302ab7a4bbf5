"""Exchange by one all-to-all with exact sizes (OrchMLLM, section 5.2.1), and the all-gather it replaces.

A small head is gathered first, so that ranks with different plans refuse the step instead of moving garbage.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from odc.dispatch.exchange.checked_group import CheckedGroup
from odc.dispatch.exchange.rows import Kind, as_bytes, from_bytes, instances_of_host, kinds_of, sent_bytes, signature
from odc.dispatch.rearrangement import Ints
from odc.dispatch.route import FieldRoute, Route
from odc.errors import OdcError
from odc.net import JobStore, announce_process
from odc.protocol import RankGrid
from odc.runtime import locate, refuse_losses


class CollectiveExchange:
    """An `Exchange` by collectives of torch.distributed (gloo, NCCL); see there for the methods.

    All ranks of the job construct it together, under a name unlike that of any other exchange. It makes process groups
    for data, heads and planning, so planning may run on another thread.
    """

    def __init__(self, store: Any, *, timeout_s: float = 600.0, name: str = "dispatch") -> None:
        self.ranks, self.me = tuple(range(dist.get_world_size())), dist.get_rank()
        self._store, self._timeout_s = store, timeout_s
        self.moved: dict[str, int] = Counter()
        self.buffer_bytes = 0
        self._data = CheckedGroup(store, f"{name}/data", dist.get_backend(), timeout_s)
        self._heads = CheckedGroup(store, f"{name}/heads", "gloo", timeout_s)
        self._planning = CheckedGroup(store, f"{name}/planning", "gloo", timeout_s)

    @property
    def per_host(self) -> int:
        watch = functools.partial(refuse_losses, f"rank {self.me}, looking for the ranks of its host")
        announce_process(job := JobStore(self._store, self._timeout_s, self.me, watch=watch), self.me)
        return instances_of_host(locate(job, RankGrid(self.ranks, len(self.ranks), self.me)))

    def gather(self, step: int, channel: str, values: Ints) -> list[Ints]:
        return self._planning.gather(f"gathering {channel} of step {step}", values)

    @torch.no_grad()
    def move(
        self, step: int, channel: str, route: Route, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        who, what = f"rank {self.me}", f"moving {channel} of step {step}"
        kinds: dict[str, Kind] = {}
        refusal, mark = "", 0
        try:
            kinds = kinds_of(route, tensors, who)
            mark = signature(route, kinds)
        except OdcError as error:
            refusal = str(error)
        self._heads.agree(what, refusal, mark, step)
        raw = {name: as_bytes(tensor) for name, tensor in tensors.items()}
        sent = sent_bytes(route, {name: kind.row_bytes for name, kind in kinds.items()})
        self.moved[channel] += self._traffic(sent)
        got = self._data.run(what, lambda: self._exchange(route, raw, sent))
        return {name: from_bytes(got[name], kind) for name, kind in kinds.items()}

    def close(self) -> None:
        for group in (self._data, self._heads, self._planning):
            group.close()

    def _traffic(self, sent: list[int]) -> int:
        """Bytes that leave this rank."""
        return sum(sent) - sent[self.me]

    def _exchange(self, route: Route, raw: dict[str, torch.Tensor], sent: list[int]) -> dict[str, torch.Tensor]:
        """Local rows as bytes by field, in; the rows for this rank, out."""
        names = list(route.fields)
        packed = {name: _rows(raw[name], route.fields[name].pack) for name in names}
        parts = {name: _split(packed[name], route.fields[name].sent) for name in names}
        widths = {name: raw[name].shape[1] for name in names}
        outgoing = _joined([parts[name][i] for i in range(len(self.ranks)) for name in names])
        received = [sum(int(route.fields[n].received[i]) * widths[n] for n in names) for i in range(len(self.ranks))]
        incoming = torch.empty(sum(received), dtype=torch.uint8, device=outgoing.device)
        self.buffer_bytes = max(self.buffer_bytes, outgoing.nbytes + incoming.nbytes)
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self._data.group)
        chunks: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        at = 0
        for source in range(len(self.ranks)):
            for name in names:
                nbytes = int(route.fields[name].received[source]) * widths[name]
                chunks[name].append(incoming[at : at + nbytes])
                at += nbytes
        return {name: _landed(chunks[name], widths[name], route.fields[name]) for name in names}


class AllGatherExchange(CollectiveExchange):
    """The baseline of the paper: every rank gathers all rows of all ranks and keeps what it needs."""

    def _traffic(self, sent: list[int]) -> int:
        return sum(sent) * (len(self.ranks) - 1)

    def _exchange(self, route: Route, raw: dict[str, torch.Tensor], sent: list[int]) -> dict[str, torch.Tensor]:
        found = {}
        for name, field in route.fields.items():
            mine = _rows(raw[name], field.pack)
            sizes = torch.from_numpy(field.sent).to(mine.device)
            tables = [torch.empty_like(sizes) for _ in self.ranks]
            dist.all_gather(tables, sizes, group=self._data.group)
            rows = [int(table.sum()) for table in tables]
            padded = torch.empty(max(rows), mine.shape[1], dtype=torch.uint8, device=mine.device)
            padded[: len(mine)] = mine
            everything = [torch.empty_like(padded) for _ in self.ranks]
            self.buffer_bytes = max(self.buffer_bytes, padded.nbytes * (1 + len(everything)))
            dist.all_gather(everything, padded, group=self._data.group)
            chunks = []
            for table, all_rows in zip(tables, everything, strict=True):
                begin = int(table[: self.me].sum())
                chunks.append(all_rows[begin : begin + int(table[self.me])].reshape(-1))
            found[name] = _landed(chunks, mine.shape[1], field)
        return found


def _rows(raw: torch.Tensor, rows: Ints) -> torch.Tensor:
    """The rows listed, of uint8 [rows, bytes]."""
    return raw.index_select(0, torch.from_numpy(rows).to(raw.device))


def _split(raw: torch.Tensor, counts: Ints) -> list[torch.Tensor]:
    return [part.reshape(-1) for part in raw.split(counts.tolist())]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    filled = [part for part in parts if part.numel()]
    return filled[0] if len(filled) == 1 else torch.cat(filled) if filled else parts[0]


def _landed(chunks: list[torch.Tensor], width: int, field: FieldRoute) -> torch.Tensor:
    """Chunks in receive order as uint8 [rows, width] in the local order of rows."""
    rows = len(field.unpack)
    return _rows(_joined(chunks).view(rows, width) if width else chunks[0].new_empty(rows, 0), field.unpack)
