"""The server daemon of a rank, a thread: one loop that accumulates, watches peers, and answers connections.

It polls nothing: it sleeps in epoll until a pusher rings the doorbell (an eventfd), a peer dies (its pidfd becomes
readable) or somebody connects to its listener (a unix socket).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from odc.deadlines import ALIVE_CHECK_S, DAEMON_JOIN_S, DAEMON_POLL_S
from odc.errors import ConfigError, UnsupportedError
from odc.hosts.watch import Ended, HostWatch, neighbours
from odc.memory import ProcessHandle
from odc.net.accepting import remedy
from odc.net.host_link import HostLink
from odc.net.listener import Listener, PeerCredentials, ask, list_listeners
from odc.net.network import HostNetwork
from odc.net.reception import Reception
from odc.runtime.service import Service
from odc.runtime.shutdown import Departures
from odc.settings import Settings

LISTENER_PREFIX = "odc."
_ADDRESS = re.compile(r"(?P<rank>\d+)\.(?P<pid>\d+)\.\w+")  # after the prefix and the user


class Daemon:
    """The daemon of this process; see `daemon()`. Methods may be called from any thread."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()
        self.address = f"{LISTENER_PREFIX}{os.getuid()}.{rank}.{self.pid}.{secrets.token_hex(4)}"
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = Listener(self.address, self._answer)
        self._services: dict[str, Service] = {}
        self._tasks: deque[Callable[[], None]] = deque()  # run by the loop, which owns the selector
        self._selector = selectors.DefaultSelector()
        self._unwatch: dict[str, list[Callable[[], None]]] = {}  # by service: gives the handles of its peers back
        self._polled: dict[ProcessHandle, Callable[[], None]] = {}  # where the kernel refuses pidfds
        self._network: HostNetwork | None = None
        self._watch_over_hosts: HostWatch | None = None
        self._receptions: list[Reception] = []
        self._ended: dict[str, Ended] = {}  # by service: told of ranks that ended on other hosts
        self._making = threading.Lock()
        self._stopping = self._over = False  # asked to end; has run all that it will
        self.departures = Departures()
        self._selector.register(self.doorbell, selectors.EVENT_READ, self._on_doorbell)
        self._selector.register(self._listener.fileno(), selectors.EVENT_READ, self._listener.answer)
        self._thread = threading.Thread(target=self._run, name="odc-server", daemon=True)
        self._thread.start()

    # called by the rank ------------------------------------------------------------------------------------------

    def serve(self, service: Service, ended: Ended | None = None) -> None:
        """Serve a root. `ended` is told, by the loop, of every rank that ended on another host without a good-bye."""
        self._services[service.identity] = service
        if ended is not None:
            self._do(lambda: self._tell_of_ended(service, ended))
        self.notify()

    def _tell_of_ended(self, service: Service, ended: Ended) -> None:
        if service.identity not in self._services:
            return
        self._ended[service.identity] = ended
        before = {} if self._watch_over_hosts is None else dict(self._watch_over_hosts.dead)
        for rank, (reason, culprit) in before.items():
            ended(rank, reason, culprit)

    def dismiss(self, service: Service, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Stop serving a root; the loop calls `then` once it no longer touches the root's heap.

        Does not wait for that: the garbage collector may end a root on any thread, and the loop may wait for something
        that this thread holds. Returns a function that waits; on the loop's own thread it returns at once.
        """
        gone = threading.Event()

        def drop() -> None:
            self._services.pop(service.identity, None)
            self._ended.pop(service.identity, None)
            for unwatch in self._unwatch.pop(service.identity, []):
                unwatch()
            then()
            gone.set()

        def wait() -> None:
            if threading.current_thread() is not self._thread:
                while self._thread.is_alive() and not gone.wait(ALIVE_CHECK_S):
                    pass

        if self._thread.is_alive():
            self._do(drop)
        else:
            drop()
        return wait

    def watch(self, service: Service, member: int, pid: int) -> None:
        """Call `service.peer_died(member)` as soon as process `pid` ends."""
        if pid != self.pid:
            self._do(lambda: self._watch(service, member, ProcessHandle(pid)))

    def network(self, store: Any, settings: Settings) -> HostNetwork:
        """What this process has of the network, made on first use, for a job over several hosts.

        Raises UnsupportedError if it was made with another address or secret file than `settings` ask for.
        """
        with self._making:
            if self._network is None:
                network = self._network = HostNetwork(store, self.rank, settings)
                self._do(lambda: self._listen(network.reception))
            self._network.refuse_others(settings)
            return self._network

    def _listen(self, reception: Reception) -> None:
        self._receptions.append(reception)
        self._selector.register(reception.fileno(), selectors.EVENT_READ, reception.answer)

    def watch_hosts(self, store: Any, settings: Settings | None) -> None:
        """Watch this rank's neighbours on other hosts, where torchrun runs the job on several (see `HostWatch`).

        Called by each `fully_shard`; None where it was given no settings, which the root may still have.
        Raises as a JobStore does; where this host cannot be listened at, the first root says so.
        """
        with self._making, contextlib.suppress(UnsupportedError, ConfigError):
            if self._watch_over_hosts is not None:
                if settings is not None:
                    self._watch_over_hosts.wait_for_network(settings.lost_after_s)
            elif around := neighbours(self.rank):
                watch = HostWatch(store, self.rank, around, settings or Settings(), self._some_rank_ended)
                self._watch_over_hosts = watch
                self._do(lambda: self._drive(watch))

    def _drive(self, watch: HostWatch) -> None:
        self._listen(watch.reception)
        self._selector.register(watch.fileno(), selectors.EVENT_READ, watch.answer)

    def _some_rank_ended(self, *what: Any) -> None:
        """By the watch, on any thread; `what` as of `Ended`."""
        self._do(lambda: self._pass_on(*what))

    def _pass_on(self, rank: int, reason: str, culprit: int) -> None:
        for ended in list(self._ended.values()):
            ended(rank, reason, culprit)

    def tell_hosts(self, reason: str, culprit: int) -> None:
        """Tell ranks on other hosts, also where no root is linked, that an error ends this one. Waits for nobody."""
        if self._watch_over_hosts is not None:
            self._watch_over_hosts.tell(self.rank, reason, culprit)

    def attend(self, service: Service, link: HostLink, read: Callable[[], bool]) -> None:
        """Call `read()` whenever `link` is readable, until it returns False or the service is dismissed."""
        self._do(lambda: self._attend(service, link, read))

    def notify(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the loop has ended
            os.eventfd_write(self.doorbell, 1)

    def alive(self) -> bool:
        """Whether the loop runs, in this process."""
        return self._thread.is_alive() and os.getpid() == self.pid

    def close(self) -> None:
        """Stop the loop and close the listener; idempotent."""
        if os.getpid() != self.pid or self._stopping:
            return
        self.departures.stop()
        self._stopping = True
        self.notify()
        self._thread.join(DAEMON_JOIN_S)

    # the loop ----------------------------------------------------------------------------------------------------

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        if self._over:
            self._run_tasks()  # here, as the loop will not; it has given back all that tasks use
        else:
            self.notify()

    def _run_tasks(self) -> None:
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            task()

    def _run(self) -> None:
        try:
            while not self._stopping:
                visited = [reception for reception in self._receptions if reception.busy]
                for key, _ in self._selector.select(DAEMON_POLL_S if self._polled or visited else None):
                    key.data()
                for reception in visited:
                    reception.answer()  # hangs up on silent visitors
                for handle in [handle for handle in self._polled if not handle.alive()]:
                    self._polled[handle]()
        except BaseException as error:  # whatever it was, peers must learn of it: nobody adds their pushes any more
            reason = f"the server daemon of rank {self.rank} failed: {type(error).__name__}: {error}"
            for service in list(self._services.values()):
                service.abort(reason, self.rank)
            self.tell_hosts(reason, self.rank)
            raise
        finally:
            self._run_tasks()
            self._services.clear()
            self._ended.clear()
            while self._unwatch:
                for unwatch in self._unwatch.popitem()[1]:
                    unwatch()
            self._selector.close()
            self._listener.close()
            if self._network is not None:
                self._network.close()
            if self._watch_over_hosts is not None:
                self._watch_over_hosts.leave()
            # A late notification must not write to a recycled file descriptor.
            doorbell, self.doorbell = self.doorbell, -1
            os.close(doorbell)
            self._over = True
            self._run_tasks()  # heaps that were handed over while the loop ended

    def _on_doorbell(self) -> None:
        # Reset before looking: a post after the look notifies again, so no block is left behind.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.doorbell)
        self._run_tasks()
        busy = False
        for service in list(self._services.values()):
            busy |= service.drain()
        self._run_tasks()
        if busy:
            self.notify()  # look again, but not before a death, a link or a connection has been looked at

    def _attend(self, service: Service, link: HostLink, read: Callable[[], bool]) -> None:
        fileno = link.fileno()

        def unwatch() -> None:
            self._selector.unregister(fileno)

        def readable() -> None:
            watched = self._unwatch.get(service.identity, [])
            if unwatch in watched and not read():
                watched.remove(unwatch)
                unwatch()

        if service.identity in self._services and fileno >= 0:
            self._unwatch.setdefault(service.identity, []).append(unwatch)
            self._selector.register(fileno, selectors.EVENT_READ, readable)

    def _watch(self, service: Service, member: int, handle: ProcessHandle) -> None:
        def unwatch() -> None:
            fileno = handle.fileno()
            if fileno is not None:
                self._selector.unregister(fileno)
            self._polled.pop(handle, None)
            handle.close()

        def died() -> None:
            watched = self._unwatch.get(service.identity, [])
            if unwatch not in watched:  # dismissed in this very round of the loop
                return
            watched.remove(unwatch)
            unwatch()
            service.peer_died(member)

        if service.identity not in self._services:
            handle.close()
            return
        self._unwatch.setdefault(service.identity, []).append(unwatch)
        fileno = handle.fileno()
        if fileno is None:
            self._polled[handle] = died
        else:
            self._selector.register(fileno, selectors.EVENT_READ, died)

    def _answer(self, request: dict[str, Any], peer: PeerCredentials) -> tuple[dict[str, Any], Sequence[int]]:
        if request.get("op") == "status":
            services = [service.status() for service in list(self._services.values())]
            return {"rank": self.rank, "pid": self.pid, "roots": services}, ()
        service = self._services.get(str(request.get("root")))
        if request.get("op") not in ("attach", "read") or service is None:
            return {"error": f"no root {request.get('root')!r} here"}, ()
        reading = request["op"] == "read"
        reply = service.answer_attach(request, reading=reading)
        if "error" in reply:
            return reply, ()
        heap = service.layout.heap
        # Peers write to each other's heaps: pushes, and ABORT on every board. Readers outside the job must not.
        return reply, (heap.read_only_fd,) if reading else (heap.fd, self.doorbell)


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
                said = f"rank {rank} cannot start its server daemon ({error}); {remedy(error, other)}"
                raise UnsupportedError(said) from error
        return _daemon


def await_departures() -> None:
    """Wait until no peer needs a root that this process has shut down; WaitTimeoutError if one had to be given up."""
    if _daemon is not None and _daemon.alive():
        _daemon.departures.wait()


def stop_daemon() -> None:
    """Stop the daemon of this process, if there is one. Roots must have been shut down before."""
    global _daemon
    with _lock:
        if _daemon is not None:
            _daemon.close()
            _daemon = None


def tell_hosts(reason: str, culprit: int) -> None:
    """As `Daemon.tell_hosts`, where this process has a daemon. Never raises, waits for nobody."""
    if _daemon is not None and _daemon.alive():
        _daemon.tell_hosts(reason, culprit)


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank: `roots` as in `Service.status`; `error` instead if it did not answer.

    Of a rank `elsewhere`, on another host, `pid` is that of the rank here with its index, which is told of it.
    """

    rank: int
    pid: int
    roots: list[dict[str, Any]]
    error: str | None = None
    elsewhere: bool = False


def ask_all(timeout_s: float = 2.0) -> list[RankStatus]:
    """The status of every odc rank of this user on this host, and of those on other hosts of their jobs, by rank.

    Ranks are found by the addresses of their listeners, and asked for at most `timeout_s` each. The daemon answers, so
    also while the rank computes.
    """
    found = []
    prefix = f"{LISTENER_PREFIX}{os.getuid()}."
    for address in list_listeners(prefix):
        named = _ADDRESS.fullmatch(address.removeprefix(prefix))
        if named is None:  # anybody may listen at any address
            continue
        rank, pid = int(named["rank"]), int(named["pid"])
        try:
            answer = ask(address, {"op": "status"}, timeout_s)
            found += _answered(rank, pid, list(answer.reply["roots"]))
        except (OSError, KeyError, TypeError) as error:  # no answer, or not one of odc's
            found.append(RankStatus(rank, pid, [], f"{type(error).__name__}: {error}"))
    return sorted(found, key=lambda status: (status.rank, status.pid))


def _answered(rank: int, pid: int, roots: list[dict[str, Any]]) -> list[RankStatus]:
    """The rank that answers, and those on other hosts that it tells of."""
    others: dict[int, list[dict[str, Any]]] = {}
    for root in roots:
        for other in root.pop("others", ()):
            others.setdefault(int(other["rank"]), []).append({"root": root["root"], "hosts": root["hosts"], **other})
    told = [RankStatus(other, pid, own, elsewhere=True) for other, own in others.items()]
    return [RankStatus(rank, pid, roots), *told]
