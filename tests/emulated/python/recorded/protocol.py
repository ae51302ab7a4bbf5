"""What the protocol keeps in memory of the host, and names for reports: of regions, ranks, lanes, lines."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

from recorded.notes import (
    ACQUIRE,
    MESSAGE,
    PROCESS,
    READ,
    REGION,
    RELEASE,
    SITE,
    STREAM,
    WRITE,
    agreed,
    library,
    name,
    note,
    site,
    touched,
    wrapped,
)


class _Headers:
    """The layout of blocks' headers, which notes what is read and written by it at the moment when it is."""

    def __init__(self, layout: struct.Struct) -> None:
        self._layout, self.size = layout, layout.size

    def pack_into(self, headers: memoryview, at: int, *words: int) -> None:
        touched(headers[at : at + self.size], WRITE)
        self._layout.pack_into(headers, at, *words)

    def unpack_from(self, headers: memoryview, at: int) -> tuple[int, ...]:
        touched(headers[at : at + self.size], READ)
        return self._layout.unpack_from(headers, at)


def ring(module: ModuleType) -> None:
    """Headers of blocks, in memory of the host."""
    module._HEADER = _Headers(module._HEADER)  # type: ignore[attr-defined]


def counts(module: ModuleType) -> None:
    """Counts of pushes, in memory of the host."""

    def share(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, counts: Any) -> None:
            real(self, counts)
            for member in self.grid.local:
                touched(self.layout.local(member).pushes(self.grid.me).numpy().data, WRITE)

        return run

    wrapped(module.MemberProtocol, "share_counts", share)


def collect(module: ModuleType) -> None:
    """Counts of pushes are read."""

    def counts(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(layout: Any) -> Any:
            touched(layout.mine.all_pushes().numpy().data, READ)
            return real(layout)

        return run

    wrapped(module, "push_counts", counts)


def cuda_heap(module: ModuleType) -> None:
    """Names of regions on the device."""

    def seal(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, *args: Any) -> None:
            announce = self._host.seal

            def announced(*described: Any) -> None:
                note(RELEASE, agreed(f"{self.identity} {self.ranks[self.me]} is sealed"), 0, MESSAGE)
                announce(*described)

            self._host.seal = announced  # from then on peers may attach
            try:
                real(self, *args)
            finally:
                del self._host.seal

        return run

    def attach(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, member: int) -> Any:
            found = real(self, member)  # its rank has answered, which it does once its heap is sealed
            note(ACQUIRE, agreed(f"{self.identity} {self.ranks[member]} is sealed"), 0, MESSAGE)
            return found

        return run

    wrapped(module.CudaHeap, "seal", _named_regions)
    wrapped(module.CudaHeap, "seal", seal)
    wrapped(module.CudaHeap, "_map", attach)


def cuda_lanes(module: ModuleType) -> None:
    """Names of lanes."""

    def lane(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, lane: str) -> Any:
            found = real(self, lane)
            stream = self._streams[lane]
            number = library().emulated_stream_number(stream.cuda_stream, stream.device_index)
            note(STREAM, number, name(f"lane {lane}"))
            note(SITE, site())
            return found

        return run

    wrapped(module.CudaLanes, "lane", lane)
    for method in ("mark", "follow", "settle", "reached"):
        wrapped(module.CudaLanes, method, _placed)


def shm_heap(module: ModuleType) -> None:
    """Names of regions in memory of the host."""
    wrapped(module.ShmHeap, "seal", _named_regions)


def _named_regions(seal: Callable[..., None]) -> Callable[..., None]:
    def run(self: Any, *args: Any, **named: Any) -> None:
        seal(self, *args, **named)
        rank, base = self.ranks[self.me], self.whole(self.me).data_ptr()
        note(PROCESS, name(f"rank {rank}"))
        for request in self.layout.requests:
            at = base + self.layout.offset(request.name)
            note(REGION, at, request.nbytes, name(f"{request.name} of rank {rank}"))

    return run


def _placed(real: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        note(SITE, site())
        return real(*args, **named)

    return run


def _placed_run(real: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        found = real(*args)
        found.run = _placed(found.run)
        return found

    return make


def mover(module: ModuleType) -> None:
    """Where in odc a mover is called."""
    for owner in (module.CudaMover, *module.CudaMover.__subclasses__()):
        for method in ("gather", "stage", "add_part", "accumulate_all", "differ"):
            if method in vars(owner):
                wrapped(owner, method, _placed)
        if "addition" in vars(owner):
            wrapped(owner, "addition", _placed_run)
