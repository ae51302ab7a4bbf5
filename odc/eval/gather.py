"""`gather_results` and `gather_metrics`: every rank's results on the first rank, in their original order.

Each rank sends its rows sorted, in chunks, and the first rank merges the streams. It holds one chunk of each rank
beyond what the caller keeps, and notices doubled or missing results where they belong.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from odc.errors import ResultsError
from odc.eval import plain
from odc.eval.peers import Peers

T = TypeVar("T")
_NAMED = 10  # doubled or missing indices that a message lists
_END: Any = object()


def gather_results(
    rows: Sequence[T],
    index: Sequence[Any],
    peers: Peers,
    *,
    expected: int | Iterable[Any] | None = None,
    allow_missing: bool = False,
    into: Callable[[T], object] | None = None,
    chunk_bytes: int = 256 << 10,
    what: str = "results",
    named: Callable[[Any], str] = repr,
) -> list[T] | None:
    """All ranks' rows on the group's first rank, sorted by index. Every rank calls it; it returns on all together.

    Args:
        rows: any number of rows of this rank, made of plain values (see `plain.PlainMessage.add`).
        index: index of each row: numbers, strings or tuples of them that compare with each other on all ranks.
            Tuples such as (task, doc_id, filter, repeat) distinguish the rows of one document.
        expected: all indices there should be; n stands for 0 to n - 1. None only checks for doubled ones. Read on the
            first rank.
        allow_missing: accept that expected rows are missing (a budget ran out).
        into: takes the rows one by one, in order, on the first rank, as a file's writer does; then None is returned.
            If an error follows, it has received the rows that are right.
        chunk_bytes: rows are sent in messages of about this size, at least one row each.
        what: names the rows in messages.
        named: gives the text for an index there.

    Returns the rows in order on the first rank (None with `into`), None on the others. Raises ResultsError for rows
    that are not plain values (names the type) and for indices that do not compare, are doubled, missing or not expected
    (names the first of them and their ranks). Inside a session it reaches the other ranks as a PeerLostError.
    """
    if len(rows) != len(index):
        raise ResultsError(f"rank {peers.rank}: {len(rows)} {what}, but {len(index)} indices")
    own = ((index[i], peers.me, rows[i]) for i in _in_order(index, f"rank {peers.rank}: an index of the {what}"))
    if peers.me:
        _send(own, peers, chunk_bytes, what)
        peers.meet(f"the end of gathering {what}")
        return None
    one = f"rank {peers.rank}: one of the {what}"
    checked = ((at, me, plain.sent(row, one)) for at, me, row in own)
    streams = [checked, *(_received(peers, member, what) for member in range(1, peers.world))]
    report = _Report(what, peers.ranks, named)
    everything: list[T] = []
    take = everything.append if into is None else into
    wanted = None if expected is None else iter(sorted(expected) if isinstance(expected, Iterable) else range(expected))
    for _, _, row in _comparable(report.checked(heapq.merge(*streams, key=lambda entry: entry[0]), wanted), what):
        take(row)
    report.raise_if_wrong(allow_missing)
    peers.meet(f"the end of gathering {what}")
    return everything if into is None else None


def _in_order(index: Sequence[Any], one: str) -> list[int]:
    """Places in `index`, by what is there. ResultsError for what has no place in an order; `one` names it."""
    for at in index:
        if any(part != part for part in (at if isinstance(at, tuple) else (at,))):
            raise ResultsError(f"{one} is {at!r}, which does not equal itself")
    try:
        return sorted(range(len(index)), key=index.__getitem__)
    except TypeError as error:
        raise ResultsError(f"{one} does not compare with another: {error}") from None


def _comparable(entries: Iterator[T], what: str) -> Iterator[T]:
    try:
        yield from entries
    except TypeError as error:
        raise ResultsError(f"indices of the {what} do not compare over ranks, or with the expected: {error}") from None


def gather_metrics(
    scores: Mapping[Hashable, Iterable[tuple[Any, Any]]], peers: Peers
) -> dict[Any, list[tuple[Any, Any]]] | None:
    """Scores by metric, from ranks that may have different metrics and numbers of scores. Every rank calls it.

    `scores` holds (index, score) of each document, by metric (a string, or a tuple such as (task, metric, filter)).
    Returns on the first rank every metric that any rank has, sorted by its `repr`, with all its (index, score) in order
    of index; None on the others. Raises ResultsError where a metric has two scores of one index.
    """
    metrics = sorted({key for keys in peers.exchange(list(scores), "metrics of scores") for key in keys}, key=repr)
    place = {metric: number for number, metric in enumerate(metrics)}
    rows = [(metric, (at, score)) for metric, pairs in scores.items() for at, score in pairs]
    index = [(place[metric], pair[0]) for metric, pair in rows]
    gathered = gather_results(rows, index, peers, what="scores", named=lambda at: f"{at[1]!r} of {metrics[at[0]]!r}")
    if gathered is None:
        return None
    result: dict[Any, list[tuple[Any, Any]]] = {metric: [] for metric in metrics}
    for metric, pair in gathered:
        result[metric].append(pair)
    return result


def _send(entries: Iterable[tuple[Any, int, Any]], peers: Peers, chunk_bytes: int, what: str) -> None:
    """Send entries in messages of about `chunk_bytes`; an empty message ends them."""
    one = f"rank {peers.rank}: one of the {what}"
    message = plain.PlainMessage(one)
    for at, _, row in entries:
        message.add([at, row])
        if message.nbytes >= chunk_bytes:
            peers.send(0, message.encode(), what)
            message = plain.PlainMessage(one)
            peers.tick()
    if message.nbytes:
        peers.send(0, message.encode(), what)
    peers.send(0, b"", what)


def _received(peers: Peers, member: int, what: str) -> Iterator[tuple[Any, int, Any]]:
    sender = f"{what} of rank {peers.ranks[member]}"
    while message := peers.receive(member, sender):
        for entry in plain.loads(message, sender):
            if type(entry) is not list or len(entry) != 2:
                raise ResultsError(f"{sender} cannot be read: a value is not an index and a row")
            yield entry[0], member, entry[1]


class _Report:
    """Counts the mistakes in a sorted stream of entries, and remembers the first of each kind."""

    def __init__(self, what: str, ranks: Sequence[int], named: Callable[[Any], str]) -> None:
        self._what, self._ranks, self._named_as = what, ranks, named
        self._counts = {"doubled": 0, "missing": 0, "not expected": 0}
        self._named: dict[str, list[str]] = {kind: [] for kind in self._counts}

    def checked(
        self, entries: Iterable[tuple[Any, int, Any]], wanted: Iterator[Any] | None
    ) -> Iterator[tuple[Any, int, Any]]:
        """The correct entries, checked against the sorted indices that are wanted, if any."""
        last, want = _END, _END if wanted is None else next(wanted, _END)
        source = -1
        for entry in entries:
            at, member, _ = entry
            if last is not _END and at == last:
                self._note(
                    "doubled", f"{self._named_as(at)} from ranks {self._ranks[source]} and {self._ranks[member]}"
                )
                continue
            last, source = at, member
            while wanted is not None and want is not _END and want < at:
                self._note("missing", self._named_as(want))
                want = next(wanted, _END)
            if wanted is not None and want != at:
                self._note("not expected", f"{self._named_as(at)} from rank {self._ranks[member]}")
                continue
            if wanted is not None:
                want = next(wanted, _END)
            yield entry
        while wanted is not None and want is not _END:
            self._note("missing", self._named_as(want))
            want = next(wanted, _END)

    def raise_if_wrong(self, allow_missing: bool) -> None:
        counts = {kind: n for kind, n in self._counts.items() if n and not (allow_missing and kind == "missing")}
        if counts:
            parts = [
                f"{n} {kind}: {', '.join(self._named[kind])}{', ...' if n > _NAMED else ''}"
                for kind, n in counts.items()
            ]
            raise ResultsError(
                f"{self._what} of ranks {', '.join(map(str, self._ranks))} do not fit: " + "; ".join(parts)
            )

    def _note(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= _NAMED:
            self._named[kind].append(text)
