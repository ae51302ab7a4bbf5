"""Reads from another host, one after the other or two in progress: what share of a link they use.

Run as root, as `OMP_NUM_THREADS=1 python -m bench.landings --results bench/results` (a minute). Two hosts are network
namespaces of this machine, with one rank each; the link is limited by `tbf`, and packets take `--delay-us` each way.
Rank 0 reads pieces of rank 1's memory, by the code that fills a node cache: into a landing, from which each is copied
to its place, as on a device (by NIXL; sockets read straight to the place). All is CPU memory. "of a stream" is beside
one plain TCP connection that sends as much, taken in turns with the arms; "of the link" is beside the rate that was
set, of which headers take 4%. NIXL is left out where it is not installed.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bench.script import Script
from odc.hosts.heaps import RemoteHeaps
from odc.memory import HostLanes
from odc.net.engines.nixl import installed
from odc.protocol.heap_reader import HeapRead

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the hosts are those of the tests

_RATES = {"1gbit": 125e6, "10gbit": 1250e6}
_MOST = 64 << 20  # bytes that an arm reads, 64 pieces at most
_open: dict[str, Any] = {}  # of this process, by engine


class Landing:
    """Stands for a rank's layout: its peers are on other hosts, and what it reads lands, and is then copied."""

    def __init__(self, piece: int, rank: int) -> None:
        self._places = [torch.zeros(piece, dtype=torch.uint8) for _ in range(2)]
        self.landing_bytes = piece
        self.grid = SimpleNamespace(ranks=range(2), is_remote=lambda member: member != rank)
        self.heap = SimpleNamespace(device=torch.device("cpu"), lanes=HostLanes(), place=lambda region: ("", 0))
        self.mover = SimpleNamespace(put=ctypes.memmove)

    def landing(self, number: int) -> torch.Tensor:
        return self._places[number]

    def is_mine(self, memory: torch.Tensor) -> bool:
        return False


def open_engine(rank: int, world: int, engine: str) -> None:
    """Make this rank's engine; rank 1 exposes what is read."""
    from support.engines import EnginePeer

    _open[engine] = made = EnginePeer(rank, engine, f"landings {engine}")
    made.engine.expose("heap", torch.arange(_MOST // 8).view(torch.uint8))
    dist.barrier()


def read(rank: int, world: int, engine: str, piece: int, two: bool) -> float:
    """Bytes a second of rank 0."""
    dist.barrier()
    if rank:
        dist.barrier()
        return 0.0
    into = torch.zeros(min(_MOST, 64 * piece), dtype=torch.uint8)
    layout = Landing(piece, rank)
    for place in layout._places if engine == "nixl" else ():  # as a heap's landings are
        _open[engine].engine.expose(f"landing {place.data_ptr()}", place)
    waiter = SimpleNamespace(check=lambda doing: None)
    heaps = RemoteHeaps("heap", _open[engine].engine, SimpleNamespace(layout=layout, waiter=waiter))  # type: ignore[arg-type]
    begin = time.perf_counter()
    if two:
        heaps.read_all(_reads(into, piece))
    else:
        for one in _reads(into, piece):
            heaps.read_all([one])
    took = time.perf_counter() - begin
    for place in layout._places if engine == "nixl" else ():
        _open[engine].engine.withdraw(f"landing {place.data_ptr()}")
    assert torch.equal(into.view(torch.int64), torch.arange(into.numel() // 8)), "other bytes have come"
    dist.barrier()
    return into.numel() / took


def _reads(into: torch.Tensor, piece: int) -> Iterator[HeapRead]:
    for number, part in enumerate(into.split(piece)):
        yield HeapRead(1, "", number * piece, part, "pieces")


def stream(rank: int, world: int, nbytes: int) -> float:
    """Bytes a second of a plain connection."""
    from support.engines import own_address

    found: list[Any] = [None]
    listener = socket.create_server((own_address(), 0)) if rank else None
    if listener is not None:
        found[0] = listener.getsockname()
    dist.broadcast_object_list(found, 1)
    if listener is not None:
        with listener, listener.accept()[0] as connection:
            connection.recv(1)
            connection.sendall(bytes(nbytes))
            connection.recv(1)
        return 0.0
    buffer = bytearray(1 << 20)
    with socket.create_connection(found[0]) as connection:
        begin, left = time.perf_counter(), nbytes
        connection.send(b"b")
        while left:
            left -= connection.recv_into(buffer, min(left, len(buffer)), socket.MSG_WAITALL)
        took = time.perf_counter() - begin
        connection.send(b"e")
    return nbytes / took


def main() -> None:
    script = Script(
        __doc__,
        rate=("1gbit", "of the link", list(_RATES)),
        delay_us=(500, "of a packet, each way"),
        pieces_kib=([64, 256, 1024, 4096, 16384], "read at once"),
        repeats=(5, "of every arm, in turns"),
        name=("landings", "of the result that is stored"),
    )
    given = script.given
    from support.host_ranks import HostPool
    from support.hosts import Hosts

    engines = ["sockets", *(["nixl"] if installed() else [])]
    rates: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    plain: list[float] = []
    with Hosts(2) as hosts:
        pool = HostPool(hosts, 1)
        hosts.shape(given.rate)
        hosts.delay(given.delay_us)
        for engine in engines:
            pool.run(open_engine, engine)
        for repeat in range(1 + given.repeats):  # the first one connects and warms up
            plain.append(pool.run(stream, _MOST)[0])
            for arm in [(e, kib << 10, two) for e in engines for kib in given.pieces_kib for two in (False, True)]:
                rates[arm].append(pool.run(read, *arm)[0])
            print(f"{repeat} of {given.repeats}", file=sys.stderr)
        pool.close()
    best = median(plain[1:])
    rows = [
        {
            "engine": engine,
            "piece, KiB": piece >> 10,
            "in progress": 1 + two,
            "MB/s": (rate := median(found[1:])) / 1e6,
            "of a stream": rate / best,
            "of the link": rate / _RATES[given.rate],
            "runs, of a stream": " ".join(f"{one / best:.2f}" for one in found[1:]),
        }
        for (engine, piece, two), found in rates.items()
    ]
    title = f"Reads over {given.rate} with {given.delay_us / 1000:g} ms each way; a stream has {best / 1e6:.1f} MB/s"
    script.store(given.name, title, rows)


if __name__ == "__main__":
    main()
