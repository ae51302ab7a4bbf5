"""What the daemon does for one root: accumulate what was pushed, watch the peers, answer for the heap.

All that the service works on is in the heap itself, so it needs no lock against its own rank.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

from odc.hosts.links import Links
from odc.memory import Words
from odc.net.liveness import Loss
from odc.protocol.accumulate import Adder
from odc.protocol.device import DeviceDrain
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import abort
from odc.protocol.queue import progress
from odc.protocol.ring import Inbox
from odc.protocol.units import bytes_of
from odc.protocol.words import RootState, Word
from odc.trace import recorder


def reading_token(token: str) -> str:
    """What a reader outside the job shows instead of the peers' token, which cannot be derived from it."""
    return hashlib.sha256(f"odc reads {token}".encode()).hexdigest()[:32]


class Service:
    """One root's server side. All methods are called from the daemon's thread unless stated otherwise.

    `drains` are called in every turn of the loop, and again at once where one returns True; they do not wait. `links`
    go to other hosts.
    """

    def __init__(
        self,
        identity: str,
        layout: HeapLayout,
        drains: Sequence[Callable[[], bool]] = (),
        links: Links | None = None,
    ) -> None:
        self._drains, self._links = drains, links
        self.identity, self.layout, self.token = identity, layout, secrets.token_hex(16)
        self.rank = layout.grid.rank
        self.board = layout.mine.board
        self._inboxes: list[Inbox] = []
        if layout.stages:
            grid = layout.grid
            self._inboxes = [Inbox(layout, source) for source in grid.nodes.local_shard_group if source != grid.me]
        self._adder = Adder(layout)
        self._most = max(1, layout.ring.slots // 4)  # the rest of the ring is filled while a batch is added
        self._drain_device = DeviceDrain(layout, self._inboxes, self._most) if layout.heap.lanes.asynchronous else None

    def drain(self) -> bool:
        """Add at most a quarter of a ring of every source, in one batch each; True if it is to be called again: there
        was anything, or a device is still to add it.
        """
        found = False
        for drain in self._drains:
            found |= drain()
        return (self._drain_host() if self._drain_device is None else self._drain_device()) or found

    @torch.no_grad()
    def _drain_host(self) -> bool:
        found = False
        for inbox in self._inboxes:
            batch = inbox.peek(self._most)
            if batch is None:
                continue
            unit, blocks = batch
            begin = recorder().now_on("server")
            self._adder.add(self.layout.grid.me, unit, blocks)
            inbox.finish(unit, len(blocks), bytes_of(blocks), begin)
            found = True
        return found

    def settle(self) -> None:
        """Return once no device touches this rank's heap for `drain`, which is called no more. On any thread."""
        if self._drain_device is not None:
            self._drain_device.settle()

    def forget(self) -> None:
        """Drop the views of this rank's heap that `drain` keeps, so that its memory ends with the heap. On any thread,
        after `settle`, when the daemon serves the root no more.
        """
        self._inboxes.clear()
        self._drain_device = None

    def end_of(self, member: int) -> Loss | None:
        """What the end of the process of a member of this host means: its loss, unless it has shut this root down, or
        has stored why it ends.
        """
        peer = self.layout.peer(member)
        if aborted := peer.board.load(Word.ABORT):
            self.abort(peer.reason, aborted - 1)
        elif peer.board.load(Word.LEFT):
            self._mark_final(member)
        else:
            return Loss(peer.rank, peer.rank, f"rank {peer.rank} died", "")
        return None

    def lost(self, loss: Loss) -> None:
        """A rank of the job is lost: abort this root, if it is one of its members and has not shut it down."""
        grid = self.layout.grid
        if loss.rank not in grid.ranks or (member := grid.ranks.index(loss.rank)) == grid.me:
            return
        peer = self.layout.peer(member)
        if grid.is_remote(member):
            concerned = member in grid.partners and self._links is not None and not self._links.will_report(member)
        else:
            concerned = peer.attached and not peer.board.load(Word.LEFT)
        if not concerned:
            return
        board = peer.board
        reason = loss.text(f" in epoch {board.load(Word.PUBLISHED)} (done with {board.load(Word.DONE)})")
        if grid.is_remote(member):  # ranks of this host to which this rank is not attached see it in the mirror
            peer.set_reason(reason)
            board.store(Word.ABORT, 1 + loss.culprit)
        self.abort(reason, loss.culprit)

    def _mark_final(self, column: int) -> None:
        """Mark the mirrors of a member that an error ended: they receive no more updates; see `Links`."""
        grid, left = self.layout.grid, self.layout.peer(column).board.load(Word.LEFT)
        for member in grid.remote if column in grid.local else ():
            peer = self.layout.remote(member)
            if peer.column == column and not (peer.board.load(Word.LEFT) or peer.board.load(Word.ABORT)):
                peer.board.store(Word.LEFT, left)

    def abort(self, reason: str, culprit: int) -> None:
        """Set ABORT here and on every attached peer; may be called from any thread, never raises."""
        abort(self.layout, reason, culprit)

    def answer_attach(self, request: dict[str, Any], *, reading: bool = False) -> dict[str, Any]:
        """Reply to a process that wants the heap's descriptor: a peer, or a reader outside the job."""
        wanted = reading_token(self.token) if reading else self.token
        if not secrets.compare_digest(str(request.get("token", "")).encode(), wanted.encode()):
            return {"error": "wrong token"}
        heap = self.layout.heap
        return {"nbytes": os.fstat(heap.fd).st_size, "digest": heap.digest}

    def status(self) -> dict[str, Any]:
        """For `odc status`: plain values. May be called from any thread.

        `others` has, of the members on other hosts with this rank's index, what stands in the mirror of their words.
        """
        grid, layout = self.layout.grid, self.layout
        return {
            "root": self.identity,
            "ranks": len(grid.ranks),
            "hosts": grid.host_count,
            **_described(self.board, self.rank, grid.here),
            "slots": layout.ring.slots * len(self._inboxes),
            "slots_in_use": sum(inbox.waiting() for inbox in self._inboxes),
            "heap_bytes": layout.heap.nbytes,
            "queue": progress(layout),
            "others": [
                _described(layout.remote(member).board, grid.ranks[member], grid.host(member))
                for member in grid.partners
            ],
        }


def _described(board: Words, rank: int, host: int) -> dict[str, Any]:
    """What a member's board shows, here or in a mirror."""
    waiting = board.load(Word.WAITING)
    try:
        state = RootState(board.load(Word.STATE)).name.lower()
    except ValueError:
        state = "unknown"
    if board.load(Word.LEFT):
        state = "left"
    return {
        "rank": rank,
        "host": host,
        "epoch": board.load(Word.PUBLISHED),
        "done": board.load(Word.DONE),
        "state": "aborted" if board.load(Word.ABORT) else state,
        "microbatch": board.load(Word.MICROBATCH),
        "fetched_bytes": board.load(Word.FETCHED),
        "pushed_bytes": board.load(Word.PUSHED),
        "saved_bytes": board.load(Word.SAVED),
        "waits_for": waiting - 1 if waiting else None,
        "waits_in_epoch": board.load(Word.WAITING_EPOCH) if waiting else None,
    }
