"""What one host tells another over a link: short frames, in order. The receiver bounds and checks every field."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

_HEAD = struct.Struct("!BxHIq")  # kind, index, bytes that follow, value


class FrameKind(IntEnum):
    """What a frame carries, about the rank that sends it."""

    WORD = 1  # word `index` of its board is `value` now
    REASON = 2  # body: its reason, as text; before ABORT or LEFT
    ABANDONMENT = 3  # body: why it abandons epoch `value`; before the epoch's outcome
    COUNTS = 4  # body: its push counts from parameter `value` on, int64 in network order; before DONE
    ENTRIES = 5  # body: words of its table of entries from word `value` on, int64 in network order
    TAKEN = 6  # the same of its words that say what it has copied of others' entries
    SUMMED = 7  # body: its host's sums of epoch `value` that can be read: pairs (unit, pushes in it) of such numbers


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a link."""

    kind: FrameKind
    index: int = 0
    value: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        return _HEAD.pack(self.kind, self.index, len(self.body), self.value) + self.body


class MalformedFrameError(ValueError):
    """Bytes that no rank of this job would send."""


class FrameReader:
    """Cuts a stream into frames. `limits` are the longest body of each kind and the number of words of a board."""

    def __init__(self, limits: Mapping[FrameKind, int], words: int) -> None:
        self._limits, self._words = limits, words
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes; raises MalformedFrameError at the first that no rank would send."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            kind, index, nbytes, value = _HEAD.unpack_from(self._buffer)
            self._refuse(kind, index, nbytes)
            end = _HEAD.size + nbytes
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield Frame(FrameKind(kind), index, value, body)

    def _refuse(self, kind: int, index: int, nbytes: int) -> None:
        limit = self._limits.get(kind, -1)  # type: ignore[call-overload]  # an int is looked up like the member it equals
        if nbytes > limit:
            raise MalformedFrameError(f"a frame of kind {kind} with {nbytes} bytes")
        if kind == FrameKind.WORD and index >= self._words:
            raise MalformedFrameError(f"word {index} of {self._words}")
