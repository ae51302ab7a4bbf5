"""Copies of shards on other hosts, which a reader brings from version to version by what has changed.

A member's words and changes are those of its newest version, and are written as it publishes. They are used only once
no member is found to have begun the next version after they were read, and only then is anything applied. So a copy
never holds a mixture because of them. Of a whole read that is overtaken, a copy holds nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from odc.errors import OdcError
from odc.handover.handle import PublishedParameter, WeightHandle
from odc.movers import changes, tiles
from odc.protocol.changes import checksum
from odc.protocol.words import VERSION_WORDS, VERSIONS_KEPT, Version, VersionWord, Word
from odc.runtime import ReadOnlyMember, RemoteMember

# Read between two checks of whether the rest is still worth reading, for each member that a check asks.
_CHECK_BYTES = 16 << 20


@dataclass
class _Copy:
    """Of one unit's shard: `memory`, uint8, holds the parameters at the offsets `held`, of `version`."""

    memory: torch.Tensor
    version: int = 0
    held: set[int] = field(default_factory=set)


class KeptMember(ReadOnlyMember):
    """A member on another host, and a copy of what was read of its shards: what is copied from it comes from there.

    `bring` fills the copy. It takes as much memory as the shards, in compute dtype.
    """

    def __init__(self, member: RemoteMember, handle: WeightHandle) -> None:
        self.rank, self._member, self._handle = member.rank, member, handle
        self._starts = [unit.offset for unit in handle.units]
        self._copies: dict[int, _Copy] = {}
        self._words = torch.empty(0, dtype=torch.int64, device="cpu")
        self._changes: dict[int, list[torch.Tensor]] = {}  # by unit, what brings its copy to the newest version
        self._arriving: list[tuple[_Copy, PublishedParameter]] = []  # what was read whole, not yet known to be whole

    # what a reader asks of any member

    def load(self) -> Mapping[Word, int]:
        return self._member.load()

    def expect(self, extents: Sequence[tuple[int, int]]) -> None:
        return

    def copy(self, offset: int, into: torch.Tensor) -> None:
        unit = bisect_right(self._starts, offset) - 1
        begin = (offset - self._starts[unit]) % self._handle.units[unit].nbytes
        into.copy_(self._copies[unit].memory[begin : begin + into.numel()])

    def refuse_if_gone(self, doing: str) -> None:
        self._member.refuse_if_gone(doing)

    def close(self) -> None:
        self._member.close()
        self._copies.clear()

    # what brings the copy

    def holds(self, parameters: Sequence[PublishedParameter]) -> bool:
        """Whether there is anything of their units that changes could bring to another version."""
        return any(self._copies[one.unit].held for one in parameters if one.unit in self._copies)

    def drop(self) -> None:
        """Keep nothing, so that the next version is read whole."""
        self._copies.clear()

    def read_words(self) -> None:
        """Those of all versions that are kept of all units."""
        words = torch.empty(VERSIONS_KEPT * len(self._starts) * VERSION_WORDS, dtype=torch.int64, device="cpu")
        self._member.copy_words(self._handle.versions, words.view(torch.uint8))
        self._words = words.view(VERSIONS_KEPT, -1, VERSION_WORDS)

    def read_changes(self, parameters: Sequence[PublishedParameter]) -> None:
        """Those of the units of `parameters` whose copies they bring to the newest version, by less than all bytes."""
        self._changes = {}
        self._member.expect([])
        for number in {one.unit for one in parameters}:
            copy = self._copies.get(number)
            if copy is None or not copy.held:
                continue
            since = _since(copy.version, [Version(*row) for row in self._words[:, number].tolist()])
            whole = sum(one.nbytes for one in self._handle.by_unit[number] if one.offset in copy.held)
            if since is not None and sum(one.packed for one in since) < whole:
                self._changes[number] = [self._read(number, one) for one in since]

    def _read(self, number: int, version: Version) -> torch.Tensor:
        packed = torch.empty(version.packed, dtype=torch.uint8, device="cpu")
        self._member.copy(self._handle.units[number].changes + version.place, packed)
        return packed

    def apply(self, version: int) -> None:
        """Apply what `read_changes` has read, and which is known to be of `version`."""
        for number, packed in self._changes.items():
            copy = self._copies[number]
            held, copy.held = copy.held, set()
            for one in packed:
                self._patch(number, copy.memory, one)
            self._check(number, version, held)
            copy.version, copy.held = version, held
        self._changes = {}

    def _patch(self, number: int, shard: torch.Tensor, packed: torch.Tensor) -> None:
        if not self._handle.kernels:
            changes.patch(shard, packed)
            return
        begin, of_unit = self._starts[number], self._handle.by_unit[number]
        tiles.patch(shard, packed, [(one.offset - begin, one.shard_numel, one.torch_dtype.itemsize) for one in of_unit])

    def _check(self, number: int, version: int, held: set[int]) -> None:
        """Compare with the checksum that is sent where the protocol is checked."""
        published = int(self._words[0, number, VersionWord.CHECKSUM])
        complete = all(one.offset in held for one in self._handle.by_unit[number])
        if published and complete and checksum(self._copies[number].memory) != published:
            raise OdcError(
                f"reader: by its changes, unit {number} of version {version} is not what rank {self.rank} has published"
            )

    def read_whole(self, version: int, parameters: Sequence[PublishedParameter]) -> Iterator[int]:
        """Read those of `parameters` of which the copy does not hold `version`; gives the bytes of each read."""
        self._arriving = []
        for one in parameters:
            if one.unit not in self._copies:
                nbytes = self._handle.units[one.unit].nbytes
                self._copies[one.unit] = _Copy(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
            copy = self._copies[one.unit]
            if copy.version != version:
                copy.version, copy.held = version, set()
            if one.offset not in copy.held:
                self._arriving.append((copy, one))
        places = [one.place(version, self._handle.buffers) for _, one in self._arriving]
        self._member.expect([(place, one.nbytes) for place, (_, one) in zip(places, self._arriving, strict=True)])
        for place, (copy, one) in zip(places, self._arriving, strict=True):
            begin = one.offset - self._starts[one.unit]
            self._member.copy(place, copy.memory[begin : begin + one.nbytes])
            yield one.nbytes

    def settle(self) -> None:
        """What `read_whole` has read is known to be of its version."""
        for copy, one in self._arriving:
            copy.held.add(one.offset)


def keeps(handle: WeightHandle) -> bool:
    """Whether a copy can be brought to another version by changes: those of kernels take numba to apply here."""
    return bool(handle.units) and (changes.available() or not handle.kernels)


def bring(
    members: Sequence[KeptMember],
    version: int,
    parameters: Sequence[PublishedParameter],
    buffers: int,
    overtaken: Callable[[int], bool],
) -> bool:
    """Bring the copies of `parameters` to `version`, which all members have published; whether it succeeded.

    `overtaken(n)`: whether a member has begun to publish version n, of which `buffers` later ones lie elsewhere.
    """
    if any(member.holds(parameters) for member in members):
        for member in members:
            member.read_words()
        if overtaken(version + 1):
            return False
        for member in members:
            member.read_changes(parameters)
        if overtaken(version + 1):
            return False
        for member in members:
            member.apply(version)
    unchecked, read, most = 0, False, _CHECK_BYTES * len(members)
    for member in members:
        for nbytes in member.read_whole(version, parameters):
            unchecked, read = unchecked + nbytes, True
            if unchecked >= most:
                unchecked = 0
                if overtaken(version + buffers):
                    return False
    if read and overtaken(version + buffers):
        return False
    for member in members:
        member.settle()
    return True


def _since(version: int, kept: Sequence[Version]) -> list[Version] | None:
    """What turns a version into the newest of those that are `kept`, newest first; None if that cannot be read."""
    found: list[Version] = []
    for one in kept:
        if version >= one.changed:
            return found[::-1]
        if one.packed <= 0:
            return None
        found.append(one)
    return found[::-1] if version >= kept[-1].base else None
