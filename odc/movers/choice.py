"""The choice among the movers: torch and memmove, torch and CUDA's driver, kernels.

The callers decide when data may move; order, waiting and visibility are their concern.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol, cast

import torch

from odc.errors import UnsupportedError, install
from odc.memory import Lanes
from odc.movers import cpu
from odc.movers.plans import Addition, Dtypes, PackedUnit, Patches, Rounding
from odc.settings import Settings

LAUNCHING = ("fetch", "push", "server")  # lanes in which odc's threads launch kernels
_CPU = torch.device("cpu")
_BUILD = "triton builds its driver with a C compiler and Python's headers; see `odc doctor --need kernels`"
_log = logging.getLogger(__name__)


class DataMover(Protocol):
    """Functions that move data; from any thread, none waits for a peer.

    On the CPU they return when it is done; on a device when it is asked for, in the current lane (`odc.memory.Lanes`).
    """

    def publish(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """Copy each shard to its place in the published buffer, converting; or what a sum begins with to the sum."""

    def zero(self, totals: Sequence[torch.Tensor]) -> None:
        """Fill accumulators of this rank with zeros."""

    def gather(
        self,
        outs: Sequence[torch.Tensor],
        offsets: Sequence[int],
        shards: int,
        sources: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Fill a unit's unsharded parameters.

        Args:
            outs: for each parameter 1-D contiguous [shards * padded shard].
            offsets: byte offset of each one's shard in every owner's published memory.
            shards: how many there are.
            sources: (shard, its owner's published memory, uint8), in the order in which to read them.
        """

    def put(self, address: int, source: int, nbytes: int) -> None:
        """Copy bytes from `source` into a peer's staging slot at `address`."""

    def add(self, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Add to accumulators of this rank or of a peer, converting; the caller holds their lock."""


class DeviceMover(DataMover, Protocol):
    """What moves data on a device besides: whole units, from and to all owners at once.

    `atomic`: whether `accumulate_all` adds atomically, so that pushers need no lock. `packs`: whether `pack`, `patches`
    and `rounding` work.
    """

    atomic: bool
    packs: bool

    def prepare(self, device: torch.device, dtypes: Dtypes, atomic: bool) -> None:
        """Compile and load what the calls below launch, and make what they need of memory in the current lane; with
        `atomic`, atomic adds to peers as well.

        `dtypes` are of shards, of parameters and their gradients, and of the sums of these, None where there are none.

        On the training thread. Loading a module, as allocating, may wait for every kernel that runs on the device:
        another thread that did so would hold its rank up, or wait for a kernel that waits for that thread's rank.
        """

    def stage(
        self,
        values: Sequence[torch.Tensor],
        numels: Sequence[int],
        offsets: Sequence[int],
        slots: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Copy every owner's part of gradients of one dtype to its slot; zeros where they are short of whole shards.

        Args:
            values: gradients, 1-D, shard after shard.
            numels: elements of a shard of each.
            offsets: of each in a slot, in elements.
            slots: (shard, its owner's slot, uint8).
        """

    def addition(self, places: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]]) -> Addition:
        """How to add to each place all of its values, converting; places do not overlap."""

    def accumulate_all(
        self,
        values: Sequence[torch.Tensor],
        numels: Sequence[int],
        offsets: Sequence[int],
        accumulators: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """As `stage`, added to every owner's accumulator, 1-D; only where it is atomic."""

    def add_part(
        self,
        values: Sequence[torch.Tensor],
        numels: Sequence[int],
        offsets: Sequence[int],
        shard: int,
        accumulator: torch.Tensor,
    ) -> None:
        """As `stage`, one owner's part added to its accumulator, 1-D; no other thread adds meanwhile."""

    def pack(self, units: Sequence[PackedUnit], found: torch.Tensor) -> None:
        """As `publish`, of all units; and write for each what has changed since the version before.

        Adds to `found[i]`, int32, a quarter of the bytes of unit i's records, which follow its directory: nothing if
        nothing has changed. If the two are more than their memory holds, that holds anything.
        """

    def patches(self, params: Sequence[tuple[int, int, int]], device: torch.device) -> Patches:
        """Of a unit with these parameters: byte offset in the shard, elements and their bytes. On the training thread,
        which then has compiled and loaded what patches launch.
        """

    def rounding(self, params: Sequence[tuple[int, int, bool]], device: torch.device) -> Rounding:
        """Of the fp32 sums of a unit with these parameters: elements, byte offset in the rounded sum, and whether it
        crosses in 8 bits, else in bf16. On the training thread, as `patches`.
        """

    def differ(self, places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], found: torch.Tensor) -> None:
        """Make `found[i]`, int32, not 0 if shard i, converted, is not what its published place holds, bit for bit.

        Takes a few MiB of memory at most, however large the shards are.
        """


def mover_for(settings: Settings, device: torch.device = _CPU, own: int = 0) -> DataMover:
    """The mover that `settings.kernels` asks for, for memory on `device`: on CUDA a `DeviceMover`. `own`: shard index.

    On the training thread: on CUDA a kernel is launched, and with "auto" torch takes its place, with one warning, if it
    fails. Raises UnsupportedError if triton is not installed, or could neither compile (no GPU) nor interpret here.
    """
    on_device = device.type == "cuda"
    if settings.kernels == "torch" or (settings.kernels == "auto" and not (on_device and _kernels_run(device))):
        if not on_device:
            return cpu
        from odc.movers.cuda import CudaMover

        return CudaMover(own, settings.copy_engine_bytes)
    try:
        from odc.movers import compiled, triton
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"Settings(kernels='triton') needs triton: {install('kernels')}") from error
    if on_device:
        if why := _failure(device):
            raise UnsupportedError(f"Settings(kernels='triton'): no kernel runs on {device}: {why}; {_BUILD}")
        return compiled.CompiledMover(own, settings.copy_engine_bytes)
    triton.refuse_unusable(device)
    return triton


def prepare_mover(
    mover: DataMover,
    settings: Settings,
    device: torch.device,
    own: int,
    lanes: Lanes,
    dtypes: Dtypes,
    atomic: bool,
) -> DataMover:
    """Prepare `mover` for odc's lanes; as of `mover_for`, torch takes its place with "auto" if one of its kernels
    cannot be compiled or launched, with a warning. On the training thread. Returns the mover to use.
    """
    try:
        for name in LAUNCHING:
            with lanes.lane(name):
                device_mover(mover).prepare(device, dtypes, atomic)
        return mover
    except Exception as error:
        if _full(error) or settings.kernels != "auto" or not getattr(mover, "atomic", False):
            raise
        _warn(device, f"{type(error).__name__}: {error}".splitlines()[0])
    plain = replace(settings, kernels="torch")
    return prepare_mover(mover_for(plain, device, own), plain, device, own, lanes, dtypes, False)


def device_mover(mover: DataMover) -> DeviceMover:
    """The mover of a heap on a device, by its whole type."""
    return cast(DeviceMover, mover)


@cache
def _kernels_run(device: torch.device) -> bool:
    """Whether triton is installed and a kernel runs on `device`; warns where the first holds alone, once a process."""
    if importlib.util.find_spec("triton") is None:
        return False
    if why := _failure(device):
        _warn(device, why)
    return not why


def _warn(device: torch.device, why: str) -> None:
    _log.warning("odc's kernels do not run on %s, torch's take their place: %s; %s", device, why, _BUILD)


def _full(error: Exception) -> bool:
    """Whether the device had no memory left, which says nothing of kernels; as torch or as triton has it."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


@cache
def _failure(device: torch.device) -> str:
    """Why no kernel can be launched on `device`; empty where one can. Images without a compiler have triton, too."""
    try:
        from odc.movers import triton

        triton.launch_one(device)
    except Exception as error:
        if _full(error):
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
