"""The server daemon of a rank, a thread: one loop that accumulates, watches peers, and answers connections.

It sleeps until a pusher notifies it by the doorbell (an eventfd), a peer dies (its pidfd becomes readable), a link has
data, or a process connects to its listener (a Unix socket).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from odc.deadlines import ALIVE_CHECK_S, DAEMON_JOIN_S
from odc.errors import ConfigError, UnsupportedError
from odc.hosts.watch import HostWatch, neighbours
from odc.memory import Words
from odc.net.handshake import PeerCredentials
from odc.net.host_link import HostLink
from odc.net.listener import Listener, list_listeners, remedy
from odc.net.liveness import Liveness, Loss
from odc.net.network import HostNetwork
from odc.net.reactor import Reactor, Registration
from odc.net.requests import ask, serve_requests
from odc.runtime.service import Service
from odc.runtime.shutdown import ReleaseQueue
from odc.settings import Settings

_log = logging.getLogger(__name__)
LISTENER_PREFIX = "odc."
#: What else this process answers to `odc status`, by name; values are replaced, never changed.
process_status: dict[str, Any] = {}
_ADDRESS = re.compile(r"(?P<rank>\d+)\.(?P<pid>\d+)\.\w+")  # after the prefix and the user


class Daemon:
    """The daemon of this process; see `daemon()`. Methods may be called from any thread.

    Attributes:
        liveness: the ranks that are known to be lost.
        releases: the roots that this rank has shut down, until no peer needs them.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()
        self.address = f"{LISTENER_PREFIX}{os.getuid()}.{rank}.{self.pid}.{secrets.token_hex(4)}"
        self._services: dict[str, Service] = {}
        self._registered: dict[str, list[Registration]] = {}  # by service
        self._listener: Listener[None] | None = None
        self._network: HostNetwork | None = None
        self._host_watch: HostWatch | None = None
        self._shared: Settings | None = None  # the first that a model was given: what models share follows them
        self._making = threading.Lock()
        self._stopped = False
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reactor = reactor = Reactor("odc-server", self._abort_all, self._end)
        self.liveness = Liveness(reactor, rank)
        try:
            self._listener = serve_requests(reactor, self.address, self._answer)
        except OSError:
            reactor.stop(DAEMON_JOIN_S)
            raise
        self.releases = ReleaseQueue()
        reactor.call(lambda: reactor.on_readable(self.doorbell, self._on_doorbell))

    # called by the rank ------------------------------------------------------------------------------------------

    def serve(self, service: Service) -> None:
        """Serve a root, which follows the losses of ranks too."""
        self._services[service.identity] = service
        self.liveness.follow(service.identity, service.lost)
        self.notify()

    def boards_beside(self, identity: str) -> list[Words]:
        """Of the roots that this rank has beside one; they stay valid when those shut down."""
        return [one.board for one in list(self._services.values()) if one.identity != identity]

    def dismiss(self, service: Service, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Stop serving a root; the loop calls `then` once it no longer touches the root's heap.

        Does not wait for that: the garbage collector may end a root on any thread, and the loop may wait for something
        that this thread holds. Returns a function that waits; on the loop's own thread it returns at once.
        """
        gone = threading.Event()

        def drop() -> None:
            self._services.pop(service.identity, None)
            self.liveness.unfollow(service.identity)
            for registration in self._registered.pop(service.identity, []):
                registration.cancel()
            try:
                service.settle()
            except Exception:  # of a device that is broken: what it had been asked for will not be done
                _log.exception("rank %d: root %s is let go of although its device fails", self.rank, service.identity)
            then()
            gone.set()

        def wait() -> None:
            while not self._reactor.is_current() and self._reactor.alive() and not gone.wait(ALIVE_CHECK_S):
                pass

        self._reactor.call(drop)
        return wait

    def watch(self, service: Service, member: int, pid: int) -> None:
        """Report the loss of a member as soon as its process `pid` ends, unless it has shut the root down before."""

        def ended() -> None:
            if (loss := service.end_of(member)) is not None:
                self.liveness.report(loss)

        if pid != self.pid:
            self._register(service, lambda: self._reactor.on_exit(pid, ended))

    def attend(self, service: Service, link: HostLink, read: Callable[[], bool]) -> None:
        """Call `read()` whenever `link` is readable, until it returns False or the service is dismissed."""

        def begin() -> Registration | None:
            if link.fileno() < 0:
                return None

            def call() -> None:
                if not read():
                    reading.cancel()

            reading = self._reactor.on_readable(link.fileno(), call)
            return reading

        self._register(service, begin)

    def _register(self, service: Service, begin: Callable[[], Registration | None]) -> None:
        def register() -> None:
            if service.identity in self._services and (made := begin()) is not None:
                self._registered.setdefault(service.identity, []).append(made)

        self._reactor.call(register)

    def network(self, store: Any, settings: Settings, over_hosts: bool = True) -> HostNetwork:
        """The network of this process, for a root over several hosts or, without `over_hosts`, one that readers on
        other hosts read; made on first use. The former follows the first settings that a model was given.

        Raises UnsupportedError if a root uses it with another address or secret file than `settings` ask for.
        """
        with self._making:
            first = (self._shared if over_hosts else None) or settings
            network = self._listening(store, first)
            before = network.address
            network.open(first)
            network.open(settings)
            if self._host_watch is not None and network.address != before:
                self._host_watch.connect()
            return network

    def watch_hosts(self, store: Any, settings: Settings | None, world: int) -> None:
        """Watch this rank's neighbours among `world` ranks, where torchrun runs the job on several hosts (`HostWatch`).

        Called by each `fully_shard`; None where it was given no settings, which the root may still have. What models
        share follows the first settings, whichever model is run first.
        Raises as a JobStore does; where this host cannot be listened at, the first root raises an error.
        """
        with self._making, contextlib.suppress(UnsupportedError, ConfigError):
            self._shared = self._shared or settings
            chosen = self._shared or Settings()
            if self._host_watch is not None:
                self._host_watch.wait_for_network(chosen.lost_after_s)
            elif around := neighbours(self.rank, world):
                network = self._listening(store, chosen)
                self._host_watch = HostWatch(self._reactor, network, self.liveness, around, chosen.lost_after_s)

    def listening(self, store: Any, settings: Settings) -> HostNetwork:
        """The network of this process, which roots may open later, perhaps with other settings. Raises as `network`."""
        with self._making:
            return self._listening(store, self._shared or settings)

    def _listening(self, store: Any, settings: Settings) -> HostNetwork:
        if self._network is None:
            self._network = HostNetwork(self._reactor, store, self.rank, settings, self.liveness.refuse)
        return self._network

    def notify(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the loop has ended
            os.eventfd_write(self.doorbell, 1)

    def alive(self) -> bool:
        """Whether the loop runs, in this process."""
        return self._reactor.alive()

    def close(self) -> None:
        """Stop the loop and close the listener; idempotent."""
        if os.getpid() != self.pid or self._stopped:
            return
        self._stopped = True
        self.releases.stop()
        self._reactor.stop(DAEMON_JOIN_S)

    # the loop ----------------------------------------------------------------------------------------------------

    def _abort_all(self, error: BaseException) -> None:
        """The loop fails. Whatever it was, peers must learn of it: nothing adds their pushes any more."""
        reason = f"the server daemon of rank {self.rank} failed: {type(error).__name__}: {error}"
        for service in list(self._services.values()):
            service.abort(reason, self.rank)
        self.liveness.report(Loss(self.rank, self.rank, reason))

    def _end(self) -> None:
        self._services.clear()
        while self._registered:
            for registration in self._registered.popitem()[1]:
                registration.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._network is not None:
            self._network.close()
        if self._host_watch is not None:
            self._host_watch.leave()
        # A late notification must not write to a recycled file descriptor.
        doorbell, self.doorbell = self.doorbell, -1
        os.close(doorbell)

    def _on_doorbell(self) -> None:
        # Reset before the rings are read: a later post notifies again, so no block is left behind.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.doorbell)
        busy = False
        for service in list(self._services.values()):
            busy |= service.drain()
        if busy:
            self.notify()  # once more, after a death, a link or a connection in between

    def _answer(self, request: dict[str, Any], peer: PeerCredentials) -> tuple[dict[str, Any], Sequence[int]]:
        if request.get("op") == "status":
            services = [service.status() for service in list(self._services.values())]
            return {"rank": self.rank, "pid": self.pid, "roots": services, **process_status}, ()
        service = self._services.get(str(request.get("root")))
        if request.get("op") not in ("attach", "read") or service is None:
            return {"error": f"no root {request.get('root')!r} here"}, ()
        reading = request["op"] == "read"
        reply = service.answer_attach(request, reading=reading)
        if "error" in reply:
            return reply, ()
        heap = service.layout.heap
        # Peers write to each other's heaps: pushes, and ABORT on every board. Readers outside the job must not; of a
        # device's memory there is no descriptor without that right, so they map it without.
        return reply, (heap.read_only_fd, *heap.other_fds) if reading else (heap.fd, self.doorbell, *heap.other_fds)


_daemon: Daemon | None = None
_lock = threading.RLock()  # the garbage collector may end a root, which asks for the daemon, while this thread does


def daemon(rank: int) -> Daemon:
    """The daemon of this process, started on first use; a forked child starts its own.

    Raises UnsupportedError where that is impossible: this process has too few file descriptors, for example.
    """
    global _daemon
    with _lock:
        if _daemon is None or not _daemon.alive():
            try:
                _daemon = Daemon(rank)
            except OSError as error:
                other = "look at what the container or sandbox of this process allows (odc doctor)"
                reason = f"rank {rank} cannot start its server daemon ({error}); {remedy(error, other)}"
                raise UnsupportedError(reason) from error
        return _daemon


def await_releases() -> None:
    """Wait until no peer needs a root that this process has shut down; WaitTimeoutError if one had to be given up."""
    if _daemon is not None and _daemon.alive():
        _daemon.releases.wait()


def stop_daemon() -> None:
    """Stop the daemon of this process, if there is one. Roots must have been shut down before."""
    global _daemon
    with _lock:
        if _daemon is not None:
            _daemon.close()
            _daemon = None


def report_to_hosts(reason: str, culprit: int) -> None:
    """Report the error that ends this rank to other hosts, also where no root is linked. Never raises or waits."""
    if _daemon is not None and _daemon.alive():
        _daemon.liveness.report(Loss(_daemon.rank, culprit, reason))


def refuse_losses(doing: str) -> None:
    """Raise PeerLostError if this process knows that another rank of the job is lost. Does not wait."""
    if _daemon is not None and _daemon.alive():
        _daemon.liveness.refuse(doing)


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank: `roots` as in `Service.status`; `error` instead if it did not answer.

    `recovery`, where the job uses `odc.Recovery`, has the rank's generation, how often it has gone back (`recoveries`),
    the newest step that it has kept, and whether it waits to meet the others (`connecting`).

    Of a rank `elsewhere`, on another host, `pid` is that of the rank here with its index, which receives it.
    """

    rank: int
    pid: int
    roots: list[dict[str, Any]]
    error: str | None = None
    elsewhere: bool = False
    recovery: dict[str, Any] | None = None


def ask_all(timeout_s: float = 2.0) -> list[RankStatus]:
    """The status of every odc rank of this user on this host, and of those on other hosts of their jobs, by rank.

    Ranks are found by the addresses of their listeners, and asked for at most `timeout_s` each. The daemon answers, so
    also while the rank computes.
    """
    found = []
    prefix = f"{LISTENER_PREFIX}{os.getuid()}."
    for address in list_listeners(prefix):
        named = _ADDRESS.fullmatch(address.removeprefix(prefix))
        if named is None:  # any process may listen at any address
            continue
        rank, pid = int(named["rank"]), int(named["pid"])
        try:
            answer = ask(address, {"op": "status"}, timeout_s)
            found += _answered(rank, pid, list(answer.reply["roots"]), answer.reply.get("recovery"))
        except (OSError, KeyError, TypeError) as error:  # no answer, or not one of odc's
            found.append(RankStatus(rank, pid, [], f"{type(error).__name__}: {error}"))
    return sorted(found, key=lambda status: (status.rank, status.pid))


def _answered(rank: int, pid: int, roots: list[dict[str, Any]], recovery: dict[str, Any] | None) -> list[RankStatus]:
    """The rank that answers, and those on other hosts that it knows of."""
    others: dict[int, list[dict[str, Any]]] = {}
    for root in roots:
        for other in root.pop("others", ()):
            others.setdefault(int(other["rank"]), []).append({"root": root["root"], "hosts": root["hosts"], **other})
    remote = [RankStatus(other, pid, own, elsewhere=True) for other, own in others.items()]
    return [RankStatus(rank, pid, roots, recovery=recovery), *remote]
