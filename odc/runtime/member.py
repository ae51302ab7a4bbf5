"""One member of a job, built and closed: its heap, its protocol, its connections to the peers, its daemon's service.

Building calls no collective and does not wait; peers are attached when they are first needed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from odc.hosts.cache import NodeCache
from odc.hosts.heaps import RemoteHeaps, queue_answers
from odc.hosts.links import Links, Summed
from odc.hosts.sums import EarlySums, NodeSums
from odc.memory import SymmetricHeap, Words
from odc.net.engines import Engine
from odc.net.host_link import HostLink
from odc.protocol.device import DeviceRoute
from odc.protocol.device_changes import changes_of
from odc.protocol.fetch import PublishedShards
from odc.protocol.grid import RankGrid
from odc.protocol.heap_reader import HeapReader, MappedHeaps
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import HOME, MemberProtocol
from odc.protocol.push import HostRoute, Pusher
from odc.protocol.queue import Queue
from odc.protocol.reduction import OneOwner, Reduction, Replicas
from odc.protocol.units import UnitSpec
from odc.protocol.words import Outcome
from odc.runtime.connect import Rendezvous, RootEvents
from odc.runtime.daemon import daemon
from odc.runtime.linking import ExposedHeap, HostConnections
from odc.runtime.service import Service
from odc.runtime.shutdown import HeapRelease
from odc.settings import Settings
from odc.worker import Worker


class Endpoint:
    """What one member does over a heap that is laid out. A minibatch of it, in order:

        shards.publish      opens the epoch; peers fetch this rank's shards from now on
        shards.fetch        for each unit, as often as a forward or backward needs it
        pusher.push         each gradient, to its owners; the daemons add it up
        done                this rank fetches and pushes no more in this epoch
        reduction           once every rank is done: complete, gather, parts; its caller writes .grad
        protocol.read_all   lets the next minibatch overwrite what was read

    Where ranks share a `queue`, each offers after `publish` and claims until none is left; else it is None. `notify`
    wakes the daemon of a member. `engine` reads from other hosts, where all members expose their heap under its
    identity; `links` go there. `beside` is that of `MemberProtocol`.
    """

    def __init__(
        self,
        layout: HeapLayout,
        notify: Callable[[int], None],
        engine: Engine | None = None,
        links: Links | None = None,
        beside: Callable[[], Sequence[Words]] = tuple,
    ) -> None:
        self.layout, self.grid = layout, layout.grid
        self.protocol = protocol = MemberProtocol(layout, links, beside)
        self.heaps: HeapReader = MappedHeaps(protocol)
        if engine is not None:
            self.heaps = RemoteHeaps(layout.heap.identity, engine, protocol)
        ahead = Worker("odc-ahead")  # its thread reads shards, and sums of gradients, before they are needed
        self._cache = NodeCache(protocol, self.heaps, ahead) if self.grid.nodes.shards_span_hosts else None
        self.reduction = self._reduction(ahead, links)
        self.shards = self._published()
        host = HostRoute(protocol, notify)
        self.pusher = Pusher(protocol, notify, DeviceRoute(protocol, host) if layout.heap.lanes.asynchronous else host)
        self.queue = Queue(protocol, self.heaps) if layout.settings.queue_bytes else None

    def _published(self) -> PublishedShards:
        prefill, times = None, None
        if self._cache is not None:
            prefill, times = self._cache.fill, self._cache.reads
        return PublishedShards(self.protocol, prefill, changes_of(self.protocol, times))

    def _reduction(self, ahead: Worker, links: Links | None) -> Reduction:
        if self.layout.spans_hosts:
            return EarlySums(self.protocol, self.heaps, ahead, None if links is None else links.send_summed)
        if self.grid.nodes.shards_span_hosts:
            return NodeSums(self.protocol, self.heaps)
        return Replicas(self.protocol, self.heaps) if len(self.grid.replica_group) > 1 else OneOwner(self.protocol)

    def drains(self) -> list[Callable[[], bool]]:
        """What the daemon calls in every turn of its loop, beside adding what was pushed."""
        return [self.reduction.sums.announce] if isinstance(self.reduction, EarlySums) else []

    def summed(self) -> Summed | None:
        """What the daemon calls with every SUMMED that comes over a link."""
        return self.reduction.note_summed if isinstance(self.reduction, EarlySums) else None

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
                self.pusher.route.post_all()
                lanes.settle()  # also what a push had asked for that was cut short: the next begin zeroes the sums
            with lanes.lane("server"):
                lanes.settle()
            self.protocol.explain(reason)
        self.protocol.await_links()
        self.protocol.close(outcome)


class Member(Endpoint):
    """A rank's membership in the job of one root: an `Endpoint` that peers can find, and a service of its daemon.

    `identity` of the root's heap and `units` are the same on every rank; `fingerprint` is further text on which the
    layouts must agree; `open_heap` makes an unsealed heap whose peers are attached by the given rendezvous. `check` may
    end the wait of a thread that attaches to a peer, by raising.
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
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.identity, self._pid, self._check = identity, os.getpid(), check
        events = RootEvents(self._check_attaching, self._watch, self._abort)
        self.rendezvous = Rendezvous(store, identity, grid, settings.timeout_s, events)
        layout = HeapLayout(open_heap(self.rendezvous), grid, units, settings, fingerprint)
        self._exposed: ExposedHeap | None = None
        self._hosts: HostConnections | None = None
        try:
            self._serve(store, layout, settings)
        except BaseException:
            self._give_back(layout)
            raise

    def _give_back(self, layout: HeapLayout) -> None:
        """Of a member that could not be made, whose memory would stay for as long as the process."""
        if self._exposed is not None:
            self._exposed.close()
        layout.close()

    def _serve(self, store: Any, layout: HeapLayout, settings: Settings) -> None:
        """Have the daemon serve the heap, here and to other hosts."""
        identity, grid, rendezvous = self.identity, layout.grid, self.rendezvous
        self._daemon = server = daemon(grid.rank)
        listens = bool(grid.remote) or (settings.address != "" and layout.exports)
        self.network = network = server.network(store, settings, bool(grid.remote)) if listens else None

        def notify(member: int) -> None:
            server.notify() if member == grid.me else rendezvous.notify(member)

        links, engine = None, None
        if network is not None and grid.remote:
            engine, links = network.engine, Links(layout, server.liveness.report, network.lost_after_s)
        super().__init__(layout, notify, engine, links, functools.partial(server.boards_beside, identity))
        self._service = service = Service(identity, layout, self.drains(), links)
        if network is not None:
            at_home = settings.queue_bytes > 0 and grid.me == HOME
            answers = queue_answers(identity, self.protocol) if at_home else {}
            self._exposed = ExposedHeap(identity, layout, network, answers)
        if network is not None and links is not None:

            def attend(link: HostLink) -> None:
                server.attend(service, link, links.reader(link, self.summed()))

            self._hosts = HostConnections(identity, layout, network, links, attend)
        server.serve(service)

    # what the rendezvous asks, once the root is announced

    def _check_attaching(self, doing: str) -> None:
        self.protocol.waiter.check(doing)
        self._check()

    def _watch(self, member: int, pid: int) -> None:
        self._daemon.watch(self._service, member, pid)

    def _abort(self, reason: str, culprit: int) -> None:
        self._service.abort(reason, culprit)

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

    def shut_down(
        self,
        note: str = "",
        needed: bool = True,
        culprit: int | None = None,
        unread: Callable[[], list[int]] = list,
    ) -> Callable[[], None] | None:
        """Announce to the peers that this rank shuts down, and close the heap when no rank needs it any more.

        Does not wait: finalizers call it, on any thread. After an abort the heap is closed at once. `note` goes
        into the error of a peer that waits for this rank in vain, `culprit` is the rank to blame, if not this one;
        `needed` and `unread` are those of `HeapRelease`. Returns what `ReleaseQueue.add` does; None in a forked child,
        which only drops its copy.
        """
        if self.forked:
            return None
        self.protocol.leave(note, culprit)
        self.reduction.close()
        if self._cache is not None:
            self._cache.close()
        dismiss = functools.partial(self._daemon.dismiss, self._service)
        forget = self.pusher.route.forget
        release = HeapRelease(
            self._service, self.rendezvous, dismiss, self._hosts, self._exposed, needed, unread, forget
        )
        return self._daemon.releases.add(release)
