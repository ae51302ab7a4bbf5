"""Whether all hosts of a job reach each other: `odc doctor --reach`, started on every host by the job's own launcher.

The first process of each host listens as a rank does (`odc.net.HostNetwork`), connects to every other host's, and sends
bytes there and back, one byte and 256 KiB. Firewalls, a wrong interface and a path that loses large packets show here,
before a model is loaded. A host is what it is to a model's ranks: a container without the namespaces of its neighbour
is another one, and is named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc import launchers
from odc.errors import ConfigError, OdcError
from odc.net.announced import place
from odc.net.network import HostNetwork
from odc.net.reactor import Reactor
from odc.net.store import JobStore, store_of_hosts
from odc.net.tcp import interface_of
from odc.settings import Settings
from odc.worker import Job, in_background

PURPOSE = "reach"
_LENGTH = struct.Struct("!I")  # before each message
_PINGS, _LARGE = 5, 256 << 10  # bytes there and back
_LARGE_S = 10.0  # for those; a path that loses large packets delivers none
_START = "start it on every host, by the launcher of the job (srun, torchrun --no-python, ...)"


@dataclass(frozen=True)
class Host:
    """Where the first process of a host listens, whose global rank is `rank`. `mtu` is in bytes, 0 where the interface
    is not known; `place` is that of `odc.net.announced.place`.
    """

    number: int
    rank: int
    name: str
    address: str
    interface: str
    mtu: int
    place: Sequence[str]


@dataclass(frozen=True)
class Way:
    """What host `source` found on its way to host `target`: the shortest round trip of a byte in milliseconds, MB/s of
    large messages, there and back; or what is wrong.
    """

    source: int
    target: int
    milliseconds: float = 0.0
    rate: float = 0.0
    wrong: str = ""


class _Shown:
    """What the processes of the job show each other in its store, each under its rank."""

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store, self._rank = store, rank

    def show(self, what: str, value: Any) -> None:
        self._store.set(f"odc/reach/{what}/{self._rank}", json.dumps(value))

    def of(self, rank: int, what: str) -> Any:
        """Waits for it. Raises as a JobStore does."""
        late = f"rank {self._rank}, waiting for rank {rank}: it has not looked around in {self._store.timeout_s:g} s"
        return json.loads(self._store.await_key(f"odc/reach/{what}/{rank}", late, culprit=rank))


def look(settings: Settings) -> tuple[list[Host], list[Way]] | None:
    """What the hosts of the job have found, in the process of rank 0; None in all others.

    Waits for every process of the job to come, for `settings.timeout_s`. Raises ConfigError where no launcher has
    started several processes, where all are on one host, or where something is missing; OdcError if a process does not
    come, or cannot listen.
    """
    me, world = _join()
    torch_store = store_of_hosts(me, settings.timeout_s)
    shown = _Shown(JobStore(torch_store, settings.timeout_s, me), me)
    firsts = _first_ranks(shown, me, world)
    found = None
    if me in firsts and len(firsts) > 1:
        with _listening(torch_store, me, settings) as network:
            found = _look_around(network, firsts, shown)
    shown.show("over", True)
    if me:
        return None
    for rank in range(1, world):  # this process may host the store
        shown.of(rank, "over")
    if found is None:
        raise ConfigError(f"reach: all {world} processes are on one host; {_START}")
    return found


def _join() -> tuple[int, int]:
    """Rank and number of this job's processes, whose launcher's variables are made torchrun's."""
    launched = launchers.find(os.environ)
    if launched is not None and launched.missing:
        raise ConfigError(f"reach: {launched.describe()}")
    if launched is None or launched.world < 2:
        raise ConfigError(f"reach: {_START}")
    os.environ.update(launched.variables())
    return launched.rank, launched.world


def _first_ranks(shown: _Shown, me: int, world: int) -> list[int]:
    """The first rank of every host, in order. Waits for all processes."""
    shown.show("place", place())
    if me == 0:
        firsts: dict[tuple[str, ...], int] = {}
        for rank in range(world):
            firsts.setdefault(tuple(shown.of(rank, "place")), rank)
        shown.show("firsts", [*firsts.values()])
    return [int(rank) for rank in shown.of(0, "firsts")]


def _look_around(network: HostNetwork, firsts: Sequence[int], shown: _Shown) -> tuple[list[Host], list[Way]]:
    """All hosts, and the ways between them. Until every host has looked: one that has may still be looked at."""
    number, address = firsts.index(network.rank), network.address[0]
    mine = Host(number, network.rank, socket.gethostname(), address, *_interface(address), place())
    shown.show("host", dataclasses.astuple(mine))
    others = [*firsts[number + 1 :], *firsts[:number]]
    hosts = [mine, *(Host(*shown.of(rank, "host")) for rank in others)]
    shown.show("ways", [dataclasses.astuple(way) for way in _ways(network, mine, hosts[1:])])
    ways = [Way(*way) for rank in firsts for way in shown.of(rank, "ways")]
    return sorted(hosts, key=lambda host: host.number), ways


_REMEDIES = {
    ("PID",): "shareProcessNamespace in the pod, or hostPID of several; --pid=host in Docker",
    ("network",): "hostNetwork in Kubernetes, --network=host in Docker",
    ("PID", "network"): "hostPID and hostNetwork in Kubernetes, --pid=host --network=host in Docker",
}


def parted(hosts: Sequence[Host]) -> list[str]:
    """Of every machine that several hosts are on: what keeps them from being one, what that costs, and the remedy."""
    machines: dict[str, list[Host]] = {}
    for host in hosts:
        machines.setdefault(host.place[0], []).append(host)
    return [_why_parted(those) for boot, those in machines.items() if boot and len(those) > 1]


def _why_parted(hosts: Sequence[Host]) -> str:
    apart = tuple(name for at, name in ((1, "PID"), (2, "network")) if len({host.place[at] for host in hosts}) > 1)
    return (
        f"Hosts {', '.join(str(host.number) for host in hosts)} are containers of one machine that do not share its "
        f"{' and '.join(apart)} namespace{'s' * (len(apart) > 1)}, so their ranks map no memory of each other's: bytes "
        "between them go through TCP, and each container caches shards and sums gradients for all the others by itself "
        "(with one rank each, that is the memory of three models in fp32). Start all ranks of a machine in one "
        f"container, or share the namespaces: {_REMEDIES[apart]}."
    )


@contextlib.contextmanager
def _listening(store: Any, rank: int, settings: Settings) -> Iterator[HostNetwork]:
    """The network of this process, which echoes what comes."""
    reactor = Reactor("odc-reach", lambda error: None)
    network = None
    try:
        network = HostNetwork(reactor, store, rank, settings)
        network.expect(PURPOSE, lambda connection, rank: in_background("odc-echo", lambda: _echo(connection)))
        yield network
    finally:
        if network is not None:
            reactor.call(network.close)
        reactor.stop(10.0)


def _echo(connection: socket.socket) -> None:
    """Answers each message once it is here as a whole: a link that carries both ways at once is not twice as fast."""
    connection.setblocking(True)
    with contextlib.suppress(OSError), connection:
        while len(header := connection.recv(_LENGTH.size, socket.MSG_WAITALL)) == _LENGTH.size:
            (nbytes,) = _LENGTH.unpack(header)
            connection.sendall(connection.recv(nbytes, socket.MSG_WAITALL))


def _ways(network: HostNetwork, mine: Host, others: Sequence[Host]) -> list[Way]:
    """All at once they are found to work or not, as one that a firewall drops takes `CONNECT_S`; rates come in turn."""
    tries = [Job(functools.partial(_first_way, network, mine.number, other)) for other in others]
    for one in tries:
        in_background("odc-reach", one.run)
    ways = []
    for way, connection in [one.wait() for one in tries]:
        if connection is not None:
            with connection:
                way = _way(connection, way.source, way.target, _PINGS)
        ways.append(way)
    return ways


def _first_way(network: HostNetwork, me: int, other: Host) -> tuple[Way, socket.socket | None]:
    """A way as it is at the first try; with its connection, if that works."""
    try:
        connection = network.dial(other.rank, PURPOSE)
    except OdcError as error:
        return Way(me, other.number, wrong=str(error)), None
    connection.settimeout(_LARGE_S)
    way = _way(connection, me, other.number, 1)
    if way.wrong:
        connection.close()
        return way, None
    return way, connection


def _way(connection: socket.socket, me: int, target: int, times: int) -> Way:
    try:
        pings = [_there_and_back(connection, 1) for _ in range(times)]
    except OSError as error:
        return Way(me, target, wrong=f"connected, but no byte comes back ({error})")
    try:
        took = [_there_and_back(connection, _LARGE) for _ in range(times)]
    except OSError as error:
        wrong = f"single bytes come back, {_LARGE >> 10} KiB do not ({error}): compare the MTUs of all on the way"
        return Way(me, target, min(pings) * 1e3, wrong=wrong)
    return Way(me, target, min(pings) * 1e3, 2 * _LARGE / min(took) / 1e6)


def _there_and_back(connection: socket.socket, nbytes: int) -> float:
    """Seconds until so many bytes have come back."""
    begin = time.perf_counter()
    in_background("odc-reach", lambda: _send(connection, nbytes))
    left = nbytes
    while left:
        data = connection.recv(min(left, 1 << 16))
        if not data:
            raise ConnectionError("the other end has hung up")
        left -= len(data)
    return time.perf_counter() - begin


def _send(connection: socket.socket, nbytes: int) -> None:
    with contextlib.suppress(OSError):  # the receiver notices
        connection.sendall(_LENGTH.pack(nbytes) + bytes(nbytes))


def _interface(address: str) -> tuple[str, int]:
    """Name and MTU of the interface that has an address; "" and 0 where there is none."""
    name = interface_of(address) or ""
    return name, int((Path("/sys/class/net") / name / "mtu").read_text()) if name else 0
