"""One member of a job, built and closed: its heap, its protocol, its connections to the peers, its daemon's service.

Building calls no collective and does not wait; peers are attached when they are first needed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from odc.hosts.links import Links
from odc.hosts.node import NodeCache, RemoteHeaps, gather_sums, queue_answers
from odc.hosts.sums import HostSums, SumsReader
from odc.memory import ShmHeap, SymmetricHeap
from odc.net.engines import Engine
from odc.net.host_link import HostLink
from odc.protocol.device import DevicePusher
from odc.protocol.grid import RankGrid
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import HOME, MemberProtocol
from odc.protocol.push import Pusher
from odc.protocol.units import UnitSpec
from odc.protocol.words import Outcome
from odc.runtime.connect import Rendezvous
from odc.runtime.daemon import daemon
from odc.runtime.fetch import PublishedShards
from odc.runtime.linking import ExposedHeap, HostConnections
from odc.runtime.queue import Queue
from odc.runtime.replicas import gather_replicas
from odc.runtime.service import Service
from odc.runtime.shutdown import HeapRelease
from odc.settings import Settings


class Endpoint:
    """What one member does over a heap that is laid out: protocol, published shards, pushes, queue.

    `notify` wakes the daemon of a member. `queue` is None unless the settings have `queue_bytes`. `engine` reads from
    other hosts, where all members expose their heap under its identity.
    """

    def __init__(self, layout: HeapLayout, notify: Callable[[int], None], engine: Engine | None = None) -> None:
        self.layout, self.grid = layout, layout.grid
        self.protocol = MemberProtocol(layout)
        self.heaps = RemoteHeaps(layout.heap.identity, engine, self.protocol)
        self._cache = NodeCache(self.protocol, self.heaps) if self.grid.nodes.shards_span_hosts else None
        self.sums = HostSums(self.protocol) if layout.spans_hosts else None
        self.reader = SumsReader(self.protocol, self.heaps) if layout.spans_hosts else None
        self.shards = PublishedShards(self.protocol, self._cache)
        on_device = layout.heap.lanes.asynchronous
        self.pusher: Pusher = (DevicePusher if on_device else Pusher)(self.protocol, notify)
        self.queue = Queue(self.protocol, self.heaps) if layout.settings.queue_bytes else None

    def done(self, outcome: Outcome, reason: str = "") -> None:
        """Close this rank's part of the epoch, in which everything pushed is posted. `reason` is for an abandoned one.

        Waits only for peers to begin the epoch, and only where something was pushed in it.
        """
        lanes = self.layout.heap.lanes
        if self._cache is not None:
            self._cache.settle()
        with lanes.lane("fetch"):
            lanes.settle()  # this rank's reads of peers' shards; pushes settled before their owners were notified
        if outcome is Outcome.TRAINED:
            self.pusher.end(self.layout.units)
        if outcome is Outcome.EVALUATED:
            self.protocol.skip_collect()
        elif self.pusher.epoch == self.protocol.epoch:
            self.protocol.share_counts(self.pusher.counts)
        if outcome is Outcome.ABANDONED:
            with lanes.lane("push"):
                self.pusher.post_all()
                lanes.settle()  # also what a push had asked for that was cut short: the next begin zeroes the sums
            with lanes.lane("server"):
                lanes.settle()
            self.protocol.explain(reason)
        self.protocol.await_links()
        self.protocol.close(outcome)

    def complete(self, used: Sequence[bool], *, gather: bool) -> None:
        """Announce that what this rank holds of others' gradients is complete, of the units that are `used`; then bring
        what others hold of its own, unless `gather` is False. When all ranks are DONE.
        """
        if self.sums is not None and self.reader is not None:
            self.sums.complete(used)
            self.protocol.complete(wait=False)
            self.reader.collect(used) if gather else self.reader.drop()
            return
        self.protocol.complete()
        if not gather:
            return
        if self.grid.nodes.shards_span_hosts:
            gather_sums(self.layout, self.heaps, used)
        else:
            gather_replicas(self.protocol, self.heaps, used)


class Member(Endpoint):
    """A rank's membership in the job of one root: an `Endpoint` that peers can find, and a service of its daemon.

    `identity` of the root's heap and `units` are the same on every rank; `fingerprint` is further text on which the
    layouts must agree; `open_heap` makes an unsealed heap whose peers are attached by the given rendezvous.
    """

    def __init__(
        self,
        store: Any,
        identity: str,
        grid: RankGrid,
        units: Sequence[UnitSpec],
        settings: Settings,
        fingerprint: str,
        open_heap: Callable[[Rendezvous], SymmetricHeap],
    ) -> None:
        self.identity, self._pid = identity, os.getpid()
        self.rendezvous = rendezvous = Rendezvous(store, identity, grid, settings.timeout_s)
        layout = HeapLayout(open_heap(rendezvous), grid, units, settings, fingerprint)
        self._daemon = server = daemon(grid.rank)
        listens = bool(grid.remote) or (settings.address != "" and isinstance(layout.heap, ShmHeap))
        self.network = network = server.network(store, settings) if listens else None

        def notify(member: int) -> None:
            server.notify() if member == grid.me else rendezvous.notify(member)

        super().__init__(layout, notify, network.engine if network is not None and grid.remote else None)
        self._hosts: HostConnections | None = None
        if network is not None and grid.remote:
            self._hosts = HostConnections(identity, layout, network, server.liveness.report, self._attend)
            self.protocol.links = self._hosts.links
            if self.reader is not None:
                self._hosts.links.summed = self.reader.told
        self._service = service = Service(identity, self.layout, self.sums, self.links)
        self._exposed: ExposedHeap | None = None
        if network is not None:
            at_home = settings.queue_bytes > 0 and grid.me == HOME
            answers = queue_answers(identity, self.protocol) if at_home else {}
            self._exposed = ExposedHeap(identity, layout, network, answers)
        rendezvous.check = self.protocol.waiter.check
        rendezvous.on_attach = lambda member, pid: server.watch(service, member, pid)
        rendezvous.on_failure = service.abort
        server.serve(service)

    def _attend(self, link: HostLink, read: Callable[[], bool]) -> None:
        self._daemon.attend(self._service, link, read)

    @property
    def links(self) -> Links | None:
        """Those to other hosts, if there are any."""
        return None if self._hosts is None else self._hosts.links

    def unread_by(self, readers: Callable[[], list[int]]) -> None:
        """Have the heap stay for `readers()`, members of other hosts, when this rank shuts down; on any thread."""
        if self._hosts is not None:
            self._hosts.unread = readers

    def announce(self, settings: str, calls: Sequence[int] = ()) -> None:
        """Let peers attach from now on; arguments as in `Rendezvous.announce`."""
        layout = self.layout
        self.rendezvous.announce(
            self._daemon.address, self._service.token, layout.heap.digest, layout.units, settings, calls
        )
        if self._hosts is not None:
            self._hosts.connect(self.rendezvous)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the member's (DataLoader worker)."""
        return os.getpid() != self._pid

    def shut_down(self, note: str = "", needed: bool = True, culprit: int | None = None) -> Callable[[], None] | None:
        """Announce to the peers that this rank shuts down, and close the heap when no rank needs it any more.

        Does not wait: finalizers call it, on any thread. After an abort the heap is closed at once. `note` goes
        into the error of a peer that waits for this rank in vain, `culprit` is the rank to blame, if not this one;
        `needed` is that of `HeapRelease`. Returns `HeapRelease.wait`; None in a forked child, which only drops its
        copy.
        """
        if self.forked:
            return None
        self.protocol.leave(note, culprit)
        for threads in (self._cache, self.reader):
            if threads is not None:
                threads.close()
        dismiss = functools.partial(self._daemon.dismiss, self._service)
        release = HeapRelease(self._service, self.rendezvous, dismiss, self._hosts, self._exposed, needed)
        self._daemon.releases.add(release)
        return release.wait
