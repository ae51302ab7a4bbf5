"""Where each named region of a heap lies.

Ranks that ask for the same regions in the same order get the same offsets, without negotiating; a digest over what they
asked for is compared when they attach. Regions start on cache lines and large ones on pages, so neither false sharing
nor a page's first touch crosses regions.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

LINE = 64
LARGE = 64 << 10


@dataclass(frozen=True)
class Request:
    """A region asked for: its name and its size in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes of all regions of a heap, in order; make it with `build`.

    `fingerprint` is text that ranks must agree on beyond names and sizes; `nbytes`, the size of the whole heap, is a
    multiple of the page size; `digest` is the sha256 in hex over names, sizes and fingerprint.
    """

    requests: tuple[Request, ...]
    fingerprint: str
    nbytes: int
    digest: str
    _places: dict[str, tuple[int, int]] = field(repr=False)  # offset and size by name

    @classmethod
    def build(cls, requests: Sequence[Request], fingerprint: str = "") -> Layout:
        """Place `requests` one after the other. Raises ValueError for what `check` refuses and for names that occur
        twice.
        """
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for request in requests:
            check(request)
            if request.name in places:
                raise ValueError(f"region {request.name!r} was allocated twice")
            start = round_up(end, mmap.PAGESIZE if request.nbytes >= LARGE else LINE)
            places[request.name], end = (start, request.nbytes), start + request.nbytes
        digest = hashlib.sha256(describe(requests, fingerprint).encode()).hexdigest()
        return cls(tuple(requests), fingerprint, max(round_up(end, mmap.PAGESIZE), mmap.PAGESIZE), digest, places)

    def offset(self, name: str) -> int:
        """Bytes from the heap's base to region `name`, the same on every rank."""
        return self._place(name)[0]

    def size(self, name: str) -> int:
        """Bytes of region `name`, as asked for."""
        return self._place(name)[1]

    def extent(self, name: str, dtype: torch.dtype, offset: int, numel: int | None) -> tuple[int, int]:
        """(bytes from the heap's base, elements) of `numel` elements of a region from element `offset` on.

        Raises ValueError where the region does not hold them; None asks for all that are left.
        """
        room = self.size(name) // dtype.itemsize
        count = room - offset if numel is None else numel
        if offset < 0 or count < 0 or offset + count > room:
            raise ValueError(
                f"elements {offset} to {offset + count} of region {name!r}: it holds {room} elements of {dtype}"
            )
        return self.offset(name) + offset * dtype.itemsize, count

    def _place(self, name: str) -> tuple[int, int]:
        if name not in self._places:
            raise KeyError(f"no region {name!r} in this heap; it has {', '.join(self._places) or 'none'}")
        return self._places[name]


def check(request: Request) -> None:
    """Raise ValueError for a request that no layout can hold."""
    if not request.name or any(mark in request.name for mark in "\n\r\t\0"):
        raise ValueError(f"a region's name must be text without tabs and line breaks, not {request.name!r}")
    if request.nbytes <= 0:
        raise ValueError(f"region {request.name!r} must have a positive size, not {request.nbytes} bytes")


def describe(requests: Sequence[Request], fingerprint: str) -> str:
    """The text that the digest is computed from: one line for each region, then the fingerprint."""
    return "".join(f"{request.nbytes}\t{request.name}\n" for request in requests) + f"fingerprint\t{fingerprint}"


def difference(mine: str, theirs: str) -> str:
    """The first difference between two descriptions, in words ("mine" first)."""
    for number, (one, other) in enumerate(zip(mine.splitlines(), theirs.splitlines(), strict=False)):
        if one != other:
            return f"region {number}: {_line(one)} against {_line(other)}"
    return f"{mine.count(chr(10))} regions against {theirs.count(chr(10))}" if mine != theirs else "nothing"


def _line(text: str) -> str:
    first, _, rest = text.partition("\t")
    if first == "fingerprint":
        return f"the end, fingerprint {rest!r}"
    return f"{rest!r} of {first} bytes"


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return -(-value // step) * step
