"""Readers of a `Job` that take its members for those of another host: an engine that copies from their heaps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from odc.handover import Reader, reader
from odc.protocol.words import VersionWord
from odc.runtime import linking
from support.handover_jobs import Job, changed
from support.members import BF16, F32, Layout

LAYOUT: Layout = [[("w", 6000, BF16), ("b", 5, BF16)], [("v", 3000, F32)]]
UNITS = [12_016, 12_000]  # bytes of each that a rank publishes
Shards = list[list[torch.Tensor]]


class Copying:
    """In place of a `WeightEngine`. It refuses what readers may not read, and counts the bytes of weights and changes
    that it reads. `meanwhile` is called in the middle of every read.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.root, self.nbytes, self.spent = job, "group", 0, 0
        self.meanwhile: Callable[[], None] = lambda: None

    @property
    def sockets(self) -> Copying:
        return self

    def ask(self, rank: int, name: str, **unused: Any) -> bytes:
        assert name == linking.board_name("group")
        return linking._board(self.job.group.layouts[self.job.group.ranks.index(rank)])

    def read(self, rank: int, region: str, offset: int, into: torch.Tensor, **unused: Any) -> None:
        member = self.job.group.ranks.index(rank)
        layout, half = self.job.group.layouts[member], into.numel() // 16 * 8
        allowed = layout.readable[""]
        assert region == "group" and allowed.start <= offset <= offset + into.numel() <= allowed.stop
        memory = layout.heap.whole(member)[offset : offset + into.numel()]
        self.meanwhile()
        into[:half].copy_(memory[:half])
        self.meanwhile()
        into[half:].copy_(memory[half:])
        if not layout.says_changes or offset != layout.heap.layout.offset("versions"):
            self.nbytes += into.numel()

    def taken(self) -> int:
        """Bytes since this was last asked."""
        found, self.spent = self.nbytes - self.spent, self.nbytes
        return found

    def close(self) -> None:
        return


class Moved:
    """Counts the bytes that a reader reads from other hosts."""

    def __init__(self, reader: Reader) -> None:
        assert reader._engine is not None
        self._nbytes, self._read = 0, reader._engine.sockets.read
        reader._engine.sockets.read = self._counting  # type: ignore[method-assign]

    def _counting(self, rank: int, region: str, offset: int, into: torch.Tensor, **options: Any) -> None:
        self._nbytes += into.numel()
        self._read(rank, region, offset, into, **options)

    def taken(self) -> int:
        """Since this was last asked."""
        found, self._nbytes = self._nbytes, 0
        return found


@contextmanager
def far_handle(job: Job, near: tuple[int, ...] = ()) -> Iterator[tuple[str, Copying]]:
    """A handle to whose readers, made meanwhile, all members but those of `near` are on another host."""
    owners = json.loads(job.handle)["owners"]
    for member, owner in enumerate(owners):
        if member not in near:
            owner |= {"host": "elsewhere", "listener": ["elsewhere", 1]}
    engine = Copying(job)
    with mock.patch.object(reader, "WeightEngine", return_value=engine):
        yield changed(job.handle, owners=owners), engine


@contextmanager
def far_reader(job: Job, near: tuple[int, ...] = (), **options: Any) -> Iterator[tuple[Reader, Copying]]:
    """A reader to which all members but those of `near` are on another host."""
    with far_handle(job, near) as (handle, engine), Reader(handle, **options) as made:
        yield made, engine


class Weights:
    """The shards of both members, by version; what a step does depends on the version alone.

    Unit 0 changes in every version, unit 1 in every third; all of unit 0 in every seventh.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        first = [[[torch.randn(n, generator=generator) for _, n, _ in unit] for unit in LAYOUT] for _ in range(2)]
        self._of: list[list[Shards]] = [first, first]  # by version, of which there is no 0

    def of(self, version: int) -> list[Shards]:
        while len(self._of) <= version:
            self._of.append([self._step(shards, len(self._of)) for shards in self._of[-1]])
        return self._of[version]

    @staticmethod
    def _step(shards: Shards, version: int) -> Shards:
        made = [[shard.clone() for shard in unit] for unit in shards]
        few = slice(version * 131 % 5000, None, 977)
        made[0][0][few] *= 1.0079
        made[0][1][version % 5] = version
        if version % 7 == 0:
            made[0][0] *= -1
        if version % 3 == 0:
            made[1][0][version * 17 % 2900 :][:4] += version
        return made

    def expected(self, version: int) -> dict[str, torch.Tensor]:
        """The whole parameters as they are published."""
        found = {}
        for unit, params in enumerate(LAYOUT):
            for i, (name, numel, dtype) in enumerate(params):
                whole = torch.cat([shards[unit][i] for shards in self.of(version)])
                found[f"u{unit}.{name}"] = whole[: 2 * numel - 1].to(dtype)
        return found

    def publish(self, job: Job, version: int) -> None:
        for member, shards in enumerate(self.of(version)):
            job.group.members[member].shards.publish(shards, [False] * len(LAYOUT))

    def publishing(self, job: Job, member: int) -> Iterator[None]:
        """As `PublishedChanges.publish` of version after version, stopping between any two writes."""
        endpoint = job.group.members[member]
        protocol, published, mine = endpoint.protocol, endpoint.shards._changes, endpoint.layout.mine
        assert published is not None
        while True:
            while any(other.protocol.epoch < protocol.epoch for other in job.group.members):
                yield
            epoch = protocol.begin_publishing()
            yield
            for unit, shards in zip(job.group.units, self.of(epoch)[member], strict=True):
                new = torch.zeros(unit.published_bytes, dtype=torch.uint8)
                for spec, shard in zip(unit.params, shards, strict=True):
                    new[spec.published_offset :][: spec.nbytes] = shard.to(spec.dtype).view(torch.uint8)
                old = mine.published_bytes(unit, epoch - 1)[: unit.published_bytes]
                first = not mine.versions(unit).load(VersionWord.CHANGED)
                packed = -1 if first else published._packed(unit, old, new, published._declines(unit))
                yield
                place, half = mine.published_bytes(unit, epoch), unit.published_bytes // 32 * 16
                place[:half] = new[:half]
                yield
                place[half : unit.published_bytes] = new[half:]
                yield
                if packed:
                    protocol.note_version(unit, packed, published._places[unit.index].start if packed > 0 else 0, 0)
                    yield
            protocol.end_publishing()
            for _ in range(8):  # it computes
                yield
