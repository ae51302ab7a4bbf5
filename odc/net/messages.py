"""Messages that one host sends another over a link, in order: frozen dataclasses, and one code for all of them.

    kind, bytes that follow | the integers of a message | its text, or its tuple of integers

The reader bounds what it buffers. Whether the values make sense is for the receiver to check, as it matches them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import numpy as np

_HEAD = struct.Struct("!BI")
_INTEGERS = ">i8"


@dataclass(frozen=True, slots=True)
class StoredWord:
    """A word of the sender's board has this value now."""

    index: int
    value: int


@dataclass(frozen=True, slots=True)
class GivenReason:
    """Why the sender ends; before the word that shows it."""

    text: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Why the sender abandons an epoch; before the epoch's outcome."""

    epoch: int
    text: str


@dataclass(frozen=True, slots=True)
class PushCounts:
    """The sender's push counts from parameter `first` on; before the word by which they are complete."""

    first: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EntryWords:
    """Words of the sender's table of entries, from word `first` on."""

    first: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakenWords:
    """The words for what the sender has copied of others' entries, from word `first` on."""

    first: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadableSums:
    """The sums of the sender's host in an epoch that can be read: pairs of a unit and the pushes in its sum."""

    epoch: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardVersions:
    """Which versions of its shards the sender publishes: words of all its units; before PUBLISHED."""

    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank of the job, which may not be the sender, has ended because of `culprit`."""

    rank: int
    culprit: int
    text: str


@dataclass(frozen=True, slots=True)
class Watching:
    """The sender watches the receiver, or, with `until_now`, shuts down and does so no more."""

    until_now: int


Message = (
    StoredWord
    | GivenReason
    | GivenUp
    | PushCounts
    | EntryWords
    | TakenWords
    | ReadableSums
    | ShardVersions
    | RankEnded
    | Watching
)


class MalformedMessageError(ValueError):
    """Bytes, or values, that no rank of this job would send."""


class _Code:
    """How the fields of a class are sent: so many integers, then what its last field is."""

    def __init__(self, kind: int, of: type[Message]) -> None:
        self._names, last = [field.name for field in fields(of)], str(fields(of)[-1].type)
        self.kind, self.of, self.has_text, self.has_values = kind, of, last == "str", last.startswith("tuple")
        self.integers = struct.Struct(f"!{len(self._names) - (self.has_text or self.has_values)}q")

    def encode(self, message: Message) -> bytes:
        values: tuple[Any, ...] = tuple(getattr(message, name) for name in self._names)
        tail = b""
        if self.has_text:
            tail, values = values[-1].encode(), values[:-1]
        elif self.has_values:
            tail, values = np.array(values[-1], _INTEGERS).tobytes(), values[:-1]
        return _HEAD.pack(self.kind, self.integers.size + len(tail)) + self.integers.pack(*values) + tail

    def decode(self, body: bytes) -> Message:
        values: tuple[Any, ...] = self.integers.unpack_from(body)
        tail = body[self.integers.size :]
        if self.has_text:
            values = *values, tail.decode("utf-8", "replace")
        elif self.has_values:
            values = *values, tuple(np.frombuffer(tail, _INTEGERS).tolist())
        return self.of(*values)


_CODES: dict[type[Message], _Code] = {of: _Code(kind, of) for kind, of in enumerate(get_args(Message), start=1)}


def encode(*messages: Message) -> bytes:
    """The messages as they are sent, one after the other."""
    return b"".join(_CODES[type(message)].encode(message) for message in messages)


class MessageReader:
    """Cuts a stream into messages. `limits` are the classes that may come, each with the most bytes of its text, or the
    most integers of its tuple. `heard` is whether anything has come yet.
    """

    def __init__(self, limits: Mapping[type[Message], int]) -> None:
        self._limits = {_CODES[of].kind: (_CODES[of], limit) for of, limit in limits.items()}
        self._buffer, self.heard = bytearray(), False

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes; raises MalformedMessageError at the first that no rank would send."""
        self._buffer += data
        self.heard = self.heard or bool(data)
        while len(self._buffer) >= _HEAD.size:
            kind, nbytes = _HEAD.unpack_from(self._buffer)
            code = self._code(kind, nbytes)
            end = _HEAD.size + nbytes
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield code.decode(body)

    def _code(self, kind: int, nbytes: int) -> _Code:
        code, limit = self._limits.get(kind, (None, 0))
        if code is not None:
            tail, each = nbytes - code.integers.size, 8 if code.has_values else 1
            if 0 <= tail <= limit * each and tail % each == 0 and (code.has_text or code.has_values or not tail):
                return code
        raise MalformedMessageError(f"a message of kind {kind} with {nbytes} bytes")
