"""Whether all hosts of a job reach each other: `odc doctor --reach`, started on every host by the job's own launcher.

One process of each host listens as a rank does (`odc.net.HostNetwork`), connects to every other host's, and sends bytes
there and back, one byte and 256 KiB. Firewalls, a wrong interface and a path that loses large packets show here, before
a model is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc import launchers
from odc.errors import ConfigError, OdcError
from odc.net.network import HostNetwork
from odc.net.reactor import Reactor
from odc.net.store import store_of_hosts
from odc.net.tcp import interface_of
from odc.settings import Settings
from odc.worker import in_background

PURPOSE = "reach"
_PINGS, _LARGE = 5, 256 << 10  # bytes there and back
_LARGE_S = 10.0  # for those; a path that loses large packets delivers none


@dataclass(frozen=True)
class Host:
    """Where the first process of a host listens, whose global rank is `rank`. `mtu` is in bytes, 0 where the interface
    is not known.
    """

    number: int
    rank: int
    name: str
    address: str
    interface: str
    mtu: int


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


def look(settings: Settings) -> tuple[list[Host], list[Way]] | None:
    """What all hosts have found, on host 0; None elsewhere, and in all processes of a host but one.

    Waits for every host to come, for `settings.timeout_s`. Raises ConfigError where no launcher has started processes
    on several hosts, or something is missing; OdcError if a host does not come, or cannot listen.
    """
    launched = launchers.export()
    if launched is None or launched.hosts < 2:
        raise ConfigError("reach: start it on every host, by the launcher of the job (srun, torchrun --no-python, ...)")
    if launched.missing:
        raise ConfigError(f"reach: {launched.describe()}")
    if launched.local_rank:
        return None
    me, others = launched.host, [(launched.host + step) % launched.hosts for step in range(1, launched.hosts)]
    with _listening(store_of_hosts(me, settings.timeout_s), launched.rank, settings) as network:
        mine = Host(me, launched.rank, socket.gethostname(), network.address[0], *_interface(network.address[0]))
        _show(network, "host", me, dataclasses.astuple(mine))
        hosts = {me: mine} | {other: Host(*_await(network, "host", other)) for other in others}
        ways = {me: [_way(network, mine, hosts[other]) for other in others]}
        _show(network, "ways", me, [dataclasses.astuple(way) for way in ways[me]])
        for other in others:  # a host that has looked may still be looked at
            ways[other] = [Way(*way) for way in _await(network, "ways", other)]
        _show(network, "over", me, True)
        if me:
            return None
        for other in others:  # this process may host the store
            _await(network, "over", other)
    return [hosts[number] for number in sorted(hosts)], [way for number in sorted(ways) for way in ways[number]]


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
    connection.setblocking(True)
    with contextlib.suppress(OSError), connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def _way(network: HostNetwork, mine: Host, other: Host) -> Way:
    me, target = mine.number, other.number
    try:
        connection = network.dial(other.rank, PURPOSE)
    except OdcError as error:
        return Way(me, target, wrong=str(error))
    with connection:
        connection.settimeout(_LARGE_S)
        try:
            pings = [_there_and_back(connection, 1) for _ in range(_PINGS)]
        except OSError as error:
            return Way(me, target, wrong=f"connected, but no byte comes back ({error})")
        try:
            took = [_there_and_back(connection, _LARGE) for _ in range(_PINGS)]
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
        connection.sendall(bytes(nbytes))


def _show(network: HostNetwork, what: str, host: int, value: Any) -> None:
    network.store.set(f"odc/reach/{what}/{host}", json.dumps(value))


def _await(network: HostNetwork, what: str, host: int) -> Any:
    late = f"rank {network.rank}, waiting for host {host}: it has not looked around in {network.store.timeout_s:g} s"
    return json.loads(network.store.await_key(f"odc/reach/{what}/{host}", late))


def _interface(address: str) -> tuple[str, int]:
    """Name and MTU of the interface that has an address; "" and 0 where there is none."""
    name = interface_of(address) or ""
    return name, int((Path("/sys/class/net") / name / "mtu").read_text()) if name else 0
