"""What lies where in the heap of a root: board, published shards, accumulators, staging rings. Arithmetic alone.

Every size is fixed when the root is initialised, from its units alone (docs/architecture.md, "Memory").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odc.errors import UnsupportedError
from odc.memory import MUTEX_BYTES, round_up
from odc.movers import changes
from odc.protocol.grid import RankGrid
from odc.protocol.peers.board import REASON_BYTES
from odc.protocol.rounding import RoundedUnit
from odc.protocol.units import UnitSpec
from odc.protocol.words import BOARD_WORDS, VERSION_WORDS, VERSIONS_KEPT
from odc.settings import Settings

HEADER_WORDS = 5  # of a staged block: unit, first element, elements, wire dtype, slot
_BLOCK_BYTES = 1 << 20  # of a staging block on the CPU, where a block is added while the next one is copied
STAGING_BYTES = 896 << 20  # of all rings to one rank, with eight ranks on a host 2 x 64 MiB each; on the CPU, too
LANDINGS = 2  # reads over the network that a thread has going: one comes while the other is copied on
_LANDING_BYTES = 16 << 20
WIRE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DATA_REGIONS = frozenset(
    {"published", "accumulator", "staging", "cache", "sums", "wire", "arrived", "residual", "landing", "changes"}
)  # on the heap's device, by the first part of their names; the others are words
#: Of the ledger: of these regions.
DATA_ACCOUNTS = frozenset({"published", "accumulator", "staging", "cache", "sums", "changes"})
# Of regions, by the first part of their names.
_ACCOUNTS = {"headers": "words", "arrived": "sums", "wire": "sums", "residual": "sums", "landing": "cache"}


@dataclass(frozen=True)
class Ring:
    """Shape of every staging ring: `slots` blocks of `slot_bytes`."""

    slots: int
    slot_bytes: int

    @classmethod
    def fit(cls, units: Sequence[UnitSpec], rings: int, block_bytes: int | None = None) -> Ring:
        """Two blocks at least, of at most `block_bytes`; a ring has no more than 2 x the largest chunk in all, and no
        more than its part of `STAGING_BYTES`, which `rings` share. Gradients travel in the compute dtype.
        """
        chunk = max((round_up(unit.pushed_bytes, 64) for unit in units), default=64)
        most = min(2 * chunk, STAGING_BYTES // max(1, rings))
        slot = max(64, min(block_bytes or most, most // 2) // 64 * 64)
        return cls(max(2, most // slot), slot)


class Regions:
    """The regions of a root's heap, which are the same in that of every member.

    Attributes:
        param_base: for each unit the number of parameters in the units before it.
        buffers: published versions side by side, 1 or 2.
        shares: into which replicas divide what they accumulated, to sum one each; 1 where each sums all of it.
        sums_at: for each unit the bytes before its accumulators among the sums of all units, and the bytes of all.
        spans_hosts: whether shards lie on several hosts, each a node: sums leave as they are complete.
        rounded: for each unit how its sums are rounded as they cross the network; None where they cross whole.
        keeps_residuals: whether what rounding takes off a sum is added to the next one.
        wire_at: as `sums_at`, of the sums as they cross.
        says_changes: whether other hosts, and readers outside the job, may read what has changed of a shard instead of
            the shard.
        stages: whether pushes to other ranks of the shard group go through staging slots.
    """

    def __init__(self, grid: RankGrid, units: Sequence[UnitSpec], settings: Settings, on_device: bool) -> None:
        self.grid, self.units, self.settings, self._on_device = grid, tuple(units), settings, on_device
        self.param_base = [0]
        for unit in self.units:
            self.param_base.append(self.param_base[-1] + len(unit.params))
        block = settings.staging_block_bytes or (None if self._on_device else _BLOCK_BYTES)  # a device waits a block
        self.ring = Ring.fit(self.units, len(grid.nodes.local_shard_group) - 1, block)
        self.buffers = 2 if settings.second_buffer else 1
        replicas = len(grid.replica_group)
        self.shares = replicas if replicas > 2 else 1  # two read as much either way
        self.spans_hosts = bool(grid.remote) and grid.nodes is grid and grid.shards_span_hosts
        spans = bool(grid.remote) and grid.nodes.shards_span_hosts
        always = settings.changes == "on" and self.exports
        self.says_changes = bool(units) and (always or (spans and settings.changes != "off"))
        # Every rank of a host adds to its sums; in CPU memory to the accumulators there as well.
        self.stages = settings.accumulate == "server" and (self._on_device or not self.spans_hosts)
        _refuse_rounding(self, settings.sums_dtype)
        self.keeps_residuals = self.spans_hosts and settings.sums_dtype == "int8"
        self.rounded: tuple[RoundedUnit, ...] | None = None
        if self.spans_hosts and settings.sums_dtype != "accumulator":
            self.rounded = tuple(_rounded(unit, self.keeps_residuals) for unit in self.units)
        whole = [-(-unit.numel // self.shares) * unit.accumulator_dtype.itemsize for unit in self.units]
        self.sums_at = _starts(whole)
        self.wire_at = _starts(whole if self.rounded is None else [one.nbytes for one in self.rounded])

    def requests(self) -> list[tuple[str, int]]:
        """Every region of a rank's heap, by name, and its bytes."""
        members = len(self.grid.ranks)
        requests = [
            ("board", BOARD_WORDS * 8),
            ("reason", REASON_BYTES),
            ("abandoned", 2 * REASON_BYTES),
            ("sent", members * 8),
            ("accumulated", members * 8),
            ("pushes", max(1, len(self.grid.local) * self.param_base[-1]) * 8),
            ("mutexes", max(1, len(self.units)) * MUTEX_BYTES),
        ]
        # Side by side, because readers outside the job may read these and nothing else: see `HeapLayout.readable`.
        requests += [(f"published/{one.index}", max(64, self.buffers * one.published_bytes)) for one in self.units]
        if self.says_changes:
            requests += [(f"changes/{one.index}", max(64, changes.room_for(one.published_bytes))) for one in self.units]
            requests.append(("versions", VERSIONS_KEPT * len(self.units) * VERSION_WORDS * 8))
        requests += [(f"accumulator/{one.index}", max(64, one.accumulator_bytes)) for one in self.units]
        if self.stages:
            for distance in range(1, len(self.grid.nodes.local_shard_group)):
                requests.append((f"headers/{distance}", self.ring.slots * HEADER_WORDS * 8))
                requests.append((f"staging/{distance}", self.ring.slots * self.ring.slot_bytes))
        if self.settings.queue_bytes:
            requests += [("claimed", 64), ("queue", round_up(self.settings.queue_bytes, 64))]
        return requests + self._requests_over_nodes()

    def _requests_over_nodes(self) -> list[tuple[str, int]]:
        grid, nodes, units = self.grid, self.grid.nodes, self.units
        hosts, rows, count = grid.host_count - 1, nodes.host_count - 1, max(1, len(units))
        requests: list[tuple[str, int]] = []
        if grid.remote:  # the words of one member on each other host
            requests += [
                ("mirror/board", hosts * BOARD_WORDS * 8),
                ("mirror/reason", hosts * REASON_BYTES),
                ("mirror/abandoned", hosts * 2 * REASON_BYTES),
                ("mirror/pushes", hosts * max(1, self.param_base[-1]) * 8),
            ]
        if nodes.shards_span_hosts:  # the node cache, and this node's sums for one member on each other
            requests += [
                ("node/claims", rows * count * 2 * 8),
                ("node/cached", rows * count * 8),
                ("node/mutexes", rows * count * 2 * MUTEX_BYTES),
            ]
            for row in range(rows):
                requests += [(f"cache/{row}/{unit.index}", max(64, unit.published_bytes)) for unit in units]
                requests.append((f"sums/{row}", max(64, self.sums_at[-1])))
        if self.landing_bytes:
            requests += [(f"landing/{number}", self.landing_bytes) for number in range(LANDINGS)]
        if self.says_changes and grid.remote:
            requests.append(("mirror/versions", hosts * len(units) * VERSION_WORDS * 8))
        if self.spans_hosts:
            requests.append(("node/lasts", count * 2 * 8))
        if self.rounded is not None:
            requests += [(f"wire/{row}", max(64, self.wire_at[-1])) for row in range(hosts)]
        if self.keeps_residuals:
            requests += [(f"residual/{row}", max(64, self.sums_at[-1])) for row in range(hosts)]
        arrived = max(64, self.wire_at[-1])
        return requests + [(f"arrived/{number}", arrived) for number in range(len(self.contributors))]

    @property
    def exports(self) -> bool:
        """Whether processes outside the job can read the published shards: not those in NVSHMEM's memory."""
        return not self._on_device or self.settings.memory == "driver"

    @property
    def contributors(self) -> tuple[int, ...]:
        """Members on other hosts whose memory holds a part of this rank's gradients, in the order of their parts: its
        partners, with their nodes' sums, or its replicas, with their accumulators.
        """
        nodes = self.grid.nodes
        found = nodes.partners if nodes.shards_span_hosts else self.grid.replica_group
        return tuple(member for member in found if self.grid.is_remote(member))

    @property
    def landing_bytes(self) -> int:
        """Of a landing: where this rank's reads for peers of its host land, and changes, which come whole, on a device
        where shards span hosts; 0 elsewhere.
        """
        if not (self._on_device and self.grid.remote and self.grid.nodes.shards_span_hosts):
            return 0
        most = max((unit.published_bytes for unit in self.units), default=_LANDING_BYTES)
        return max(64, min(_LANDING_BYTES, most), changes.room_for(most) if self.says_changes else 0)

    def buffer_offset(self, unit: UnitSpec, epoch: int) -> int:
        """Bytes from the start of a unit's published region to the buffer that holds `epoch`."""
        return epoch % self.buffers * unit.published_bytes

    def ledger(self) -> dict[str, int]:
        """Bytes by purpose: published, accumulator, staging, queue, words; over nodes also cache and sums; changes."""
        account = {"published": 0, "accumulator": 0, "staging": 0, "queue": 0, "words": 0}
        if self.grid.nodes.remote:
            account |= {"cache": 0, "sums": 0}
        if self.says_changes:
            account["changes"] = 0
        for name, nbytes in self.requests():
            kind = name.split("/")[0]
            account[_ACCOUNTS.get(kind, kind if kind in account else "words")] += nbytes
        return account


def _starts(sizes: Sequence[int]) -> list[int]:
    """The bytes before each of these, and of all: each begins on a cache line."""
    return [0, *itertools.accumulate(round_up(size, 64) for size in sizes)]


def _rounded(unit: UnitSpec, by_parameter: bool) -> RoundedUnit:
    if not by_parameter:
        return RoundedUnit([(unit.numel, False)])
    return RoundedUnit([(spec.numel if spec.trained else 0, spec.coarse) for spec in unit.params])


def _refuse_rounding(regions: Regions, sums_dtype: str) -> None:
    """Raise `UnsupportedError` where sums cannot be rounded as the settings ask; on one host none cross."""
    if not regions.grid.remote or sums_dtype == "accumulator":
        return
    where = f"rank {regions.grid.rank}: Settings(sums_dtype={sums_dtype!r})"
    if not regions.spans_hosts:
        raise UnsupportedError(f"{where} is for a mesh whose shards lie on several hosts")
    for unit in regions.units:
        if unit.accumulator_dtype == torch.float64:
            raise UnsupportedError(f"{where} would round the fp64 sums of unit {unit.name!r}")
