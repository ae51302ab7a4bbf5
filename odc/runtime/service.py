"""What the daemon does for one root: accumulate what was pushed, watch the peers, answer for the heap.

Chose to keep every fact the service works on in the heap itself (rings, counters, board) and nothing in Python state
that training also writes: the service needs no lock against its own rank, whichever thread or process runs it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch

from odc.errors import OdcError
from odc.runtime.abort import abort, read_reason
from odc.runtime.accumulate import Adder
from odc.runtime.layout import Space
from odc.runtime.queue import progress
from odc.runtime.staging import Inbox
from odc.runtime.words import State, Word
from odc.trace import PUSH, recorder


def reading_token(token: str) -> str:
    """What a reader outside the job shows instead of the peers' token, which cannot be had back from it."""
    return hashlib.sha256(f"odc reads {token}".encode()).hexdigest()[:32]


class Service:
    """One root's server side. All methods are called from the daemon's thread unless said otherwise.

    Args:
        identity: of the root's heap.
        space: the root's heaps, own one sealed.
    """

    def __init__(self, identity: str, space: Space) -> None:
        self.identity, self.space, self.token = identity, space, secrets.token_hex(16)
        self.rank = space.geometry.ranks[space.geometry.me]
        self._board = space.board(space.geometry.me)
        self._inboxes: list[Inbox] = []
        if space.settings.accumulate == "server":
            geometry = space.geometry
            self._inboxes = [Inbox(space, source) for source in geometry.row if source != geometry.me]
        self._adder = Adder(space)
        self._most = max(1, space.ring.slots // 4)  # the rest of the ring is filled while a batch is added

    @torch.no_grad()
    def drain(self) -> bool:
        """Add at most a quarter of a ring of every source; True if there was anything.

        Blocks are added in batches, so that an owner whose training holds the GIL is asked for it once a batch.
        """
        found = False
        for inbox in self._inboxes:
            batch = inbox.peek(self._most)
            if batch is None:
                continue
            unit, blocks = batch
            begin = recorder().now()
            with self.space.heap.lanes.lane("server"):
                self._adder.add(self.space.geometry.me, unit, blocks)
            inbox.take(len(blocks))
            source = self.space.geometry.ranks[inbox.source]
            nbytes = sum(block.values.nbytes for block in blocks)
            recorder().add(PUSH, begin, unit=unit.name, peer=source, nbytes=nbytes, lane="server")
            found = True
        return found

    def peer_died(self, member: int) -> None:
        """Spread ABORT, with the member's own reason if it gave one; nothing if it had left in good order."""
        rank = self.space.geometry.ranks[member]
        board = self.space.board(member)
        if board.load(Word.ABORT):
            self.abort(read_reason(self.space, member), board.load(Word.ABORT) - 1)
            return
        if board.load(Word.LEFT):
            return
        epoch = board.load(Word.PUBLISHED)
        self.abort(f"rank {rank} died in epoch {epoch} (done with {board.load(Word.DONE)})", rank)

    def abort(self, reason: str, culprit: int) -> None:
        """Set ABORT here and on every attached peer; may be called from any thread, never raises."""
        abort(self.space, reason, culprit)

    def answer_attach(self, request: dict[str, Any], token: str | None = None) -> dict[str, Any]:
        """Reply to a visitor that wants the heap's descriptor; it must know `token` (default: the peers' own)."""
        wanted = self.token if token is None else token
        if not secrets.compare_digest(str(request.get("token", "")).encode(), wanted.encode()):
            return {"error": "wrong token"}
        heap = self.space.heap
        return {"nbytes": os.fstat(heap.fd).st_size, "digest": heap.digest}

    def answer_read(self, request: dict[str, Any]) -> tuple[dict[str, Any], Sequence[int]]:
        """Reply to a reader outside the job, and the heap's descriptor. Nobody watches the reader or waits for it."""
        reply = self.answer_attach(request, reading_token(self.token))
        return reply, () if "error" in reply else (self.space.heap.fd,)

    def status(self) -> dict[str, Any]:
        """For `odc status`: plain values. May be called from any thread."""
        board, geometry = self._board, self.space.geometry
        waiting = board.load(Word.WAITING)
        try:
            state = State(board.load(Word.STATE)).name.lower()
        except ValueError:
            state = "unknown"
        return {
            "root": self.identity,
            "rank": self.rank,
            "ranks": len(geometry.ranks),
            "epoch": board.load(Word.PUBLISHED),
            "done": board.load(Word.DONE),
            "state": "aborted" if board.load(Word.ABORT) else state,
            "microbatch": board.load(Word.MICROBATCH),
            "fetched_bytes": board.load(Word.FETCHED),
            "pushed_bytes": board.load(Word.PUSHED),
            "slots": self.space.ring.slots * len(self._inboxes),
            "slots_in_use": sum(inbox.waiting() for inbox in self._inboxes),
            "waits_for": waiting - 1 if waiting else None,
            "waits_in_epoch": board.load(Word.WAITING_EPOCH) if waiting else None,
            "heap_bytes": self.space.heap.nbytes,
            "queue": progress(self.space),
        }

    def unreachable(self) -> bool:
        """True once the root was abandoned; its heap may be closed."""
        try:
            return bool(self._board.load(Word.LEFT))
        except (OdcError, ValueError):
            return True
