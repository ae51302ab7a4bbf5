"""What a root shows to the network: its heap, to members of other hosts and to readers outside the job."""

from __future__ import annotations

import functools
import socket
import struct
from collections.abc import Callable, Mapping

from odc.memory import ShmHeap
from odc.net.handshake import export_purpose
from odc.net.network import HostNetwork
from odc.protocol.layout import HeapLayout
from odc.protocol.words import Word

#: The words of the board that a reader outside the job needs, and receives.
READER_WORDS = (Word.PUBLISHED, Word.PUBLISHING, Word.PROGRESS, Word.ABORT, Word.LEFT)
#: These words and the digest of the heap's layout. Why the job ended follows as text.
BOARD = struct.Struct(f"!{len(READER_WORDS)}q64s")


def board_name(identity: str) -> str:
    """The name under which a member serves its board to readers."""
    return f"{identity}/board"


class ExposedHeap:
    """This rank's heap of one root, exposed under the root's identity until `close`.

    `answers` are functions by the name under which they answer members of other hosts. Weights in CPU memory are also
    exposed to readers outside the job, which are admitted by a secret of the root's own. They may read the published
    shards and receive `READER_WORDS`; every other byte of the heap is refused.
    """

    def __init__(
        self, identity: str, layout: HeapLayout, network: HostNetwork, answers: Mapping[str, Callable[[], bytes]]
    ) -> None:
        self._identity, self._network, self._names = identity, network, [*answers]
        self._readable = {identity: layout.published_range, board_name(identity): range(0)}
        for part, memory in layout.heap.parts().items():
            self._names.append(identity + part)
            network.engine.expose(identity + part, memory)
        for name, function in answers.items():
            network.engine.answer(name, function)
        if layout.units and isinstance(layout.heap, ShmHeap):
            self._names.append(board_name(identity))
            network.engine.answer(board_name(identity), functools.partial(_board, layout))
            network.expect(export_purpose(identity), self._accepted)

    def _accepted(self, connection: socket.socket, rank: int) -> None:
        """By a reader; on the daemon's thread."""
        self._network.engine.adopt(connection, rank, only=self._readable)

    def close(self) -> None:
        """Expose nothing any more; on the daemon's thread, or when there is none."""
        self._network.expect_no_more(export_purpose(self._identity))
        for name in self._names:
            self._network.engine.withdraw(name)


def _board(layout: HeapLayout) -> bytes:
    """On a thread of the engine."""
    words = {word: layout.mine.board.load(word) for word in READER_WORDS}
    reason = layout.mine.reason if words[Word.ABORT] or words[Word.LEFT] else ""
    return BOARD.pack(*words.values(), layout.heap.digest.encode()) + reason.encode()
