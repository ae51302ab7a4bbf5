"""The heaps of a root's members, laid out alike, and the table of its peers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from odc.errors import UnsupportedError
from odc.memory import MUTEX_BYTES, RobustMutex, SymmetricHeap
from odc.movers import changes, int8
from odc.movers.choice import DeviceMover, device_mover, mover_for, prepare_mover
from odc.movers.plans import Patches, Rounding
from odc.protocol.grid import RankGrid, refuse_unsupported
from odc.protocol.peers.local import LocalPeer
from odc.protocol.peers.remote import NodeShare, RemotePeer
from odc.protocol.regions import DATA_REGIONS, WIRE_DTYPES, Regions
from odc.protocol.units import UnitSpec
from odc.settings import Settings

_log = logging.getLogger(__name__)


class HeapLayout(Regions):
    """This rank's heap, and by member its peers', of whom each is attached when it is first asked for anything.

    `heap` is unsealed, the same on every member, and is sealed here; `units` are in the same order on every rank;
    `fingerprint` is further text on which the members must agree.
    """

    def __init__(
        self, heap: SymmetricHeap, grid: RankGrid, units: Sequence[UnitSpec], settings: Settings, fingerprint: str
    ) -> None:
        self.heap, self.mover = heap, mover_for(settings, heap.device, grid.shard)
        refuse_unsupported(grid, kernels="auto" if heap.device.type == "cuda" else settings.kernels)
        super().__init__(grid, units, settings, heap.lanes.asynchronous)
        if heap.lanes.asynchronous:
            self._prepare_mover()
        self.patches = self._make_patches() if self.says_changes and heap.lanes.asynchronous else []
        self.applies_changes = bool(self.patches) or not heap.lanes.asynchronous
        self.rounding: Sequence[Rounding] | None = self._make_rounding()
        heap.adds_atomically = bool(getattr(self.mover, "atomic", True))
        for name, nbytes in self.requests():
            heap.allocate(name, nbytes, words=name.split("/")[0] not in DATA_REGIONS)
        mesh = f"{grid.ranks}/{grid.shards}" + (f"/{grid.hosts}" if grid.hosts else "")
        mesh += f"/nodes of {grid.node_size}" if grid.node_size else ""
        parts = [settings.fingerprint(), mesh, fingerprint]
        heap.seal("|".join(parts + [unit.fingerprint() for unit in self.units]))
        self._initialize_mutexes("mutexes")
        if grid.nodes.shards_span_hosts:
            self._initialize_mutexes("node/mutexes")
        self._peers = [self._make_peer(member) for member in grid.members]
        self._shares = {
            member: NodeShare(heap, grid.nodes, member, self.sums_at[:-1])
            for member in (grid.nodes.remote if grid.nodes.shards_span_hosts else ())
        }

    def _prepare_mover(self) -> None:
        """No thread but this one, which trains, is to compile a kernel; gradients come in their parameter's dtype."""
        dtypes = [
            (
                spec.own_dtype or spec.dtype,
                spec.dtype,
                unit.accumulator_dtype if spec.trained and spec.dtype in WIRE_DTYPES else None,
            )
            for unit in self.units
            for spec in unit.params
        ]
        atomic = self.settings.accumulate == "direct" or self.grid.nodes.shards_span_hosts
        atomic &= device_mover(self.mover).atomic
        own, device, lanes = self.grid.shard, self.heap.device, self.heap.lanes
        self.mover = prepare_mover(self.mover, self.settings, device, own, lanes, dtypes, atomic)
        if self.rounded is not None:
            torch.zeros(1, device=device).to(torch.bfloat16)  # torch's kernel for it is loaded

    def _make_patches(self) -> list[Patches]:
        """For each unit; kernels are compiled, and their lane is made, before another thread patches. None where there
        are no kernels, or they fail, and the settings do not ask for them.
        """
        device = self.heap.device
        try:
            mover = self._packing_mover("changes='on'")
            with self.heap.lanes.lane("patch"):
                self._try_packing(mover)
                return [
                    mover.patches(
                        [(spec.published_offset, spec.numel, spec.dtype.itemsize) for spec in unit.params], device
                    )
                    for unit in self.units
                ]
        except Exception as error:
            if self.settings.changes == "on":
                raise
            if device_mover(self.mover).packs:
                _log.warning(
                    "rank %d: shards are read whole, as none is packed on %s: %s", self.grid.rank, device, error
                )
            return []

    def _try_packing(self, mover: DeviceMover) -> None:
        """Pack one number of each dtype of shards and places that occurs; raises whatever keeps kernels from that."""
        device = self.heap.device
        for shard, dtype in {(spec.own_dtype or spec.dtype, spec.dtype) for unit in self.units for spec in unit.params}:
            place, one = torch.zeros(8, dtype=dtype, device=device)[:1], torch.ones(1, dtype=shard, device=device)
            into = torch.zeros(64, dtype=torch.uint8, device=device)
            mover.pack([([place], [place], [one], into)], torch.zeros(1, dtype=torch.int32, device=device))
        self.heap.lanes.settle()

    def _make_rounding(self) -> Sequence[Rounding] | None:
        """For each unit; what it takes is compiled before another thread rounds. None where sums cross whole."""
        if self.rounded is None or not self.keeps_residuals:
            return self.rounded
        if not self.heap.lanes.asynchronous:
            int8.prepare()
            return self.rounded
        mover, device = self._packing_mover("sums_dtype='int8'"), self.heap.device
        with self.heap.lanes.lane("server"):
            return [
                mover.rounding([(part.numel, part.at, part.coarse) for part in one.parts], device)
                for one in self.rounded
            ]

    def _packing_mover(self, setting: str) -> DeviceMover:
        """The mover of a device, for what the setting asks for; UnsupportedError if it has no kernels."""
        mover = device_mover(self.mover)
        if not mover.packs:
            raise UnsupportedError(
                f"rank {self.grid.rank}: Settings({setting}) packs on {self.heap.device} by odc's kernels, and torch's "
                "copies are used; see `odc doctor --need kernels`"
            )
        return mover

    def _initialize_mutexes(self, region: str) -> None:
        address, nbytes = self.heap.address(self.grid.me, region), 8 * len(self.heap.words(self.grid.me, region))
        for at in range(0, nbytes, MUTEX_BYTES):
            RobustMutex.initialize(address + at)

    def _make_peer(self, member: int) -> LocalPeer | RemotePeer:
        parameters = self.param_base[-1]
        if self.grid.is_remote(member):
            return RemotePeer(self.heap, self.grid, member, parameters)
        return LocalPeer(self.heap, self.grid, member, self.buffers, parameters)

    def peer(self, member: int) -> LocalPeer | RemotePeer:
        return self._peers[member]

    def local(self, member: int) -> LocalPeer:
        """A member on this host."""
        peer = self._peers[member]
        assert isinstance(peer, LocalPeer), f"member {member} is on another host"
        return peer

    def remote(self, member: int) -> RemotePeer:
        """A member on another host."""
        peer = self._peers[member]
        assert isinstance(peer, RemotePeer), f"member {member} is on this host"
        return peer

    @property
    def mine(self) -> LocalPeer:
        return self.local(self.grid.me)

    def published(self, epoch: int) -> list[torch.Tensor]:
        """Where this rank's shards are published, in compute dtype: of every parameter of one unit after the other."""
        mine = self.mine
        return [mine.published(unit, i, epoch) for unit in self.units for i in range(len(unit.params))]

    def holder(self, member: int) -> LocalPeer | NodeShare:
        """Where this rank reads the shards of a member of its shard group, and adds gradients for it."""
        return self._shares.get(member) or self.local(member)

    def share(self, member: int) -> NodeShare:
        """What this node keeps of a member of another node."""
        return self._shares[member]

    def node_sums(self, unit: UnitSpec) -> list[torch.Tensor]:
        """This node's sums of `unit` that lie in this rank's heap, one for each other node where shards span nodes."""
        nodes = self.grid.nodes
        if not nodes.shards_span_hosts:
            return []
        return [self.sums_of(nodes.me, row, unit) for row in range(nodes.host_count - 1)]

    def sums_of(self, member: int, row: int, unit: UnitSpec) -> torch.Tensor:
        """1-D [unit.numel]: in the heap of a member of this host, its node's sum for the `row`-th other."""
        at = self.sums_at[unit.index] // unit.accumulator_dtype.itemsize
        return self.heap.tensor(member, f"sums/{row}", unit.accumulator_dtype, offset=at, numel=unit.numel)

    def round_sums(self, units: Sequence[UnitSpec]) -> object:
        """Where sums are rounded: write `node_sums` to where they are read from. On any thread; they have settled.

        Does not wait: returns a mark of lane "server" that is reached when they are there; None if nothing is asked
        for, or all done.
        """
        rounding, lanes = self.rounding, self.heap.lanes
        if rounding is None:
            return None
        with lanes.lane("server"):
            for unit in units:
                for row, whole in enumerate(self.node_sums(unit)):
                    rounding[unit.index].write(whole, self._wire(row, unit))
            return lanes.mark()

    def keep_residuals(self, used: Sequence[bool]) -> None:
        """Where residuals are kept: note what of this epoch's `node_sums` has not crossed, which is rounded for good.

        `used`: for each parameter of all units whether any rank has pushed it. On the main thread.
        """
        if self.rounding is None or not self.keeps_residuals:
            return
        for unit, one in zip(self.units, self.rounding, strict=True):
            of_unit = used[self.param_base[unit.index] : self.param_base[unit.index + 1]]
            for row, whole in enumerate(self.node_sums(unit) if any(of_unit) else ()):
                one.keep(whole, self._wire(row, unit), self._residual(row, unit), of_unit)

    def clear(self, units: Sequence[UnitSpec]) -> None:
        """Zero this rank's accumulators and `node_sums`; where residuals are kept the sums begin with those instead."""
        accumulators = [self.mine.accumulator(unit) for unit in units]
        sums = [(row, unit, total) for unit in units for row, total in enumerate(self.node_sums(unit))]
        if not self.keeps_residuals:
            self.mover.zero(accumulators + [total for _, _, total in sums])
            return
        self.mover.zero(accumulators)
        if sums:
            self.mover.publish([total for _, _, total in sums], [self._residual(row, unit) for row, unit, _ in sums])

    def _wire(self, row: int, unit: UnitSpec) -> torch.Tensor:
        """uint8: the rounded sum for the `row`-th other node."""
        at, end = self.wire_at[unit.index : unit.index + 2]
        return self.heap.tensor(self.grid.me, f"wire/{row}", torch.uint8, offset=at, numel=end - at)

    def _residual(self, row: int, unit: UnitSpec) -> torch.Tensor:
        """fp32 [unit.numel]: what the `row`-th other node has not been sent yet."""
        at = self.sums_at[unit.index] // 4
        return self.heap.tensor(self.grid.me, f"residual/{row}", torch.float32, offset=at, numel=unit.numel)

    def arrived(self, number: int) -> torch.Tensor:
        """uint8: where what was read from the `number`-th of `contributors` lies, laid out by `wire_at`."""
        return self.heap.tensor(self.grid.me, f"arrived/{number}", torch.uint8)

    def landing(self, number: int) -> torch.Tensor:
        """uint8 [landing_bytes]: one of `LANDINGS` places."""
        return self.heap.tensor(self.grid.me, f"landing/{number}", torch.uint8)

    def patch(self, unit: UnitSpec, shard: torch.Tensor, packed: torch.Tensor) -> None:
        """Turn `shard`, a unit's in the node cache, into the version whose changes since its own are `packed`, once.

        Returns when that is done. On any thread: on a device in lane "patch", which no compute comes before.
        """
        if not self.patches:
            changes.patch(shard, packed)
            return
        lanes = self.heap.lanes
        with lanes.lane("patch"):
            self.patches[unit.index].run(shard, packed)
            lanes.settle()

    def is_mine(self, memory: torch.Tensor) -> bool:
        """Whether `memory`, of the heap of a rank of this host, is of this rank's."""
        mine = self.heap.whole(self.grid.me)
        return mine.data_ptr() <= memory.data_ptr() < mine.data_ptr() + mine.numel()

    @property
    def readable(self) -> dict[str, range]:
        """What readers outside the job may read, as bytes of each part of the heap: the published shards of all units,
        and with `says_changes` what has changed of them and the words of that.
        """
        regions = [f"published/{unit.index}" for unit in self.units if self.exports]
        if regions and self.says_changes:
            regions += [*(f"changes/{unit.index}" for unit in self.units), "versions"]
        sizes, found = self.heap.bytes_by_name(), dict[str, range]()
        for name in regions:  # those of a part lie side by side
            part, begin = self.heap.place(name)
            found[part] = range(found[part].start if part in found else begin, begin + sizes[name])
        return found

    def close(self) -> None:
        """Give the memory of all members back as soon as no view of it is in use; idempotent."""
        for peer in (*self._peers, *self._shares.values()):
            peer.forget()
        self.heap.close()
