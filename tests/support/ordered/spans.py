"""The last accesses to every byte of one piece of physical memory, in spans that were accessed alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

from support.ordered.log import Mode


class Access(NamedTuple):
    """One access: by which thread or stream (its number), at which of its own times, and what it was, for a report."""

    agent: int
    time: int
    what: Any


class _Span:
    __slots__ = ("atomics", "reads", "write")

    def __init__(
        self, write: Access | None, reads: dict[int, Access] | None = None, atomics: dict[int, Access] | None = None
    ) -> None:
        self.write, self.reads, self.atomics = write, reads or {}, atomics or {}


class Spans:
    """`known(access)` is whether an earlier access happened before the one that is being made."""

    def __init__(self) -> None:
        self._starts: list[int] = [0]
        self._spans: list[_Span] = [_Span(None)]

    def access(
        self, start: int, end: int, mode: int, access: Access, known: Callable[[Access], bool]
    ) -> list[tuple[Access, int, int]]:
        """Note that [start, end) is accessed; returns earlier accesses that conflict with it, and where: start, end."""
        first, last = self._cut(start), self._cut(end)
        found = []
        for at in range(first, last):
            for other in self._conflicts(self._spans[at], mode):
                if not known(other):
                    found.append((other, self._starts[at], self._starts[at + 1]))
        if mode == Mode.WRITE:
            self._starts[first:last] = [start]
            self._spans[first:last] = [_Span(access)]
            return found
        for span in self._spans[first:last]:
            (span.reads if mode == Mode.READ else span.atomics)[access.agent] = access
        return found

    def _conflicts(self, span: _Span, mode: int) -> list[Access]:
        others = [] if span.write is None else [span.write]
        if mode != Mode.READ:
            others += span.reads.values()
        if mode != Mode.ATOMIC:
            others += span.atomics.values()
        return others

    def _cut(self, place: int) -> int:
        """Index of the span that begins at `place`, which is cut off from the one before if need be."""
        at = bisect_left(self._starts, place)
        if at == len(self._starts) or self._starts[at] != place:
            before = self._spans[at - 1]
            self._starts.insert(at, place)
            self._spans.insert(at, _Span(before.write, dict(before.reads), dict(before.atomics)))
        return at
