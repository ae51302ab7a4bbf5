"""What every member publishes: words on a board, and texts beside them; wherever this host keeps them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from odc.memory import SymmetricHeap, Words

REASON_BYTES = 1024


class PeerBoard(ABC):
    """The words and texts that a member publishes. May be read from any thread."""

    member: int
    rank: int  # global
    column: int  # the member of this host in whose heap it lies
    _heap: SymmetricHeap

    @property
    def attached(self) -> bool:
        """Whether every question can be answered without waiting."""
        return self._heap.attached(self.column)

    def attach(self) -> None:
        """Attach to that heap, which may wait."""
        self._heap.words(self.column, "board")

    @property
    @abstractmethod
    def board(self) -> Words:
        """Its words (`odc.protocol.words.Word`)."""

    @abstractmethod
    def _texts(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Of region `name`, "reason" or "abandoned", from `offset` on.

        Not by torch: the garbage collector may close a root while torch traces a model, in a mode that takes no tensor.
        """

    @property
    def reason(self) -> str:
        """Why the job was aborted, or what the member noted as it shut down; empty if it noted nothing."""
        return _read(self._texts("reason", 0, REASON_BYTES))

    def set_reason(self, text: str) -> None:
        """Write `reason`, before ABORT or LEFT; of a long text the first bytes are kept."""
        _write(self._texts("reason", 0, REASON_BYTES), text)

    def abandonment(self, epoch: int) -> str:
        """Why the member abandoned `epoch`, of its newest two."""
        return _read(self._texts("abandoned", epoch % 2 * REASON_BYTES, REASON_BYTES))

    def set_abandonment(self, epoch: int, text: str) -> None:
        """Write `abandonment`, before the epoch's outcome; of a long text the first bytes are kept."""
        _write(self._texts("abandoned", epoch % 2 * REASON_BYTES, REASON_BYTES), text)


def clipped(text: str) -> str:
    """As much of `text` as its place holds: whole characters, fewer than REASON_BYTES bytes of UTF-8.

    A name of a file may have surrogates, which have no encoding; each becomes a question mark.
    """
    return text.encode("utf-8", "replace")[: REASON_BYTES - 1].decode("utf-8", "ignore")


def _write(region: memoryview, text: str) -> None:
    raw = clipped(text).encode() + b"\0"
    region[: len(raw)] = raw


def _read(region: memoryview) -> str:
    return bytes(region).split(b"\0", 1)[0].decode("utf-8", "replace")


def words_at(heap: SymmetricHeap, member: int, name: str, first: int, count: int) -> Words:
    """Some words of region `name` of a member on this host."""
    keepalive = heap.words(member, name)
    return Words(heap.address(member, name) + 8 * first, count, keepalive)
