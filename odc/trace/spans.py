"""Spans: what one rank did from one moment to another, and the file in which a rank saves them.

The lane "main" is the training thread, and the only one that counts in a breakdown. Its spans may nest or abut; the
innermost one is what the rank was doing. Other lanes ("fetch", "push", "plan", "server") are background threads: they
are drawn and exported but not counted, because work that hides behind compute delays no step. So is "hosts", whichever
thread reads from other hosts; its spans say in `unit` what did not have to be read. Clocks of hosts differ: spans
of several hosts can be compared once they are on one clock (`odc.experiments.clock`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from odc.errors import TraceError

COMPUTE: Final = "compute"
FETCH: Final = "fetch"
PUSH: Final = "push"
WAIT: Final = "wait"
OPTIMIZER: Final = "optimizer"
IDLE: Final = "idle"

#: What a moment can be counted as, in the order of tables and pictures. The runtime never records COMPUTE and IDLE;
#: they are derived from the marks below.
CATEGORIES: Final = (COMPUTE, OPTIMIZER, FETCH, PUSH, WAIT, IDLE)

WINDOW: Final = "window"
MICROBATCH: Final = "microbatch"
#: Marks bound a stretch of time without saying what was done in it. WINDOW: one minibatch, from begin to the end of
#: finish. MICROBATCH: one forward and backward.
MARKS: Final = (WINDOW, MICROBATCH)

RECOVERY: Final = "recovery"
GIVEN_UP: Final = "given up"
#: What a rank spent on deaths of others, and in a new process on its own, on the lane RECOVERY. RECOVERY: from the loss
#: until the ranks have met and gone back; `unit` says where to and why, `peer` is the rank that was lost. GIVEN_UP: a
#: minibatch of which nothing counts, because it was done again.
RECOVERIES: Final = (GIVEN_UP, RECOVERY)

_PIECE: Final = "piece of sample "
MAIN: Final = "main"

NO_PEER: Final = -1
#: `peer` of a span of all ranks together (an all-gather, a reduce-scatter): its time holds waiting and transfer.
COLLECTIVE: Final = -2

#: On a device the lanes of collectives, by what they do: a span begins when the rank's stream comes to the collective.
COLLECTIVE_LANES: Final = {FETCH: "gathers", PUSH: "reductions"}

_FORMAT = "odc-spans-1"


class Span(NamedTuple):
    """What a rank did from `start_ns` up to `end_ns`, in nanoseconds on one clock of the host (`time.monotonic_ns`).

    Args:
        category: one of CATEGORIES, MARKS or RECOVERIES.
        lane: the thread it ran on, "main" for the training thread.
        epoch: number of the minibatch; -1 before the first.
        microbatch: index of the microbatch within the rank's minibatch; -1 outside of one.
        unit: name of the `fully_shard`ed module, "" if it concerns none; of a MICROBATCH mark around a piece of a split
            sample, `piece_of` it.
        peer: global rank it was done with or waited for; NO_PEER, or COLLECTIVE for all ranks together.
        nbytes: bytes moved.
    """

    category: str
    lane: str
    start_ns: int
    end_ns: int
    epoch: int = -1
    microbatch: int = -1
    unit: str = ""
    peer: int = NO_PEER
    nbytes: int = 0


def piece_of(sample: int) -> str:
    """The `unit` of a MICROBATCH mark around a piece of split sample `sample` of the minibatch."""
    return f"{_PIECE}{sample}"


def is_piece(span: Span) -> bool:
    """Whether a mark, or the compute derived from it, is that of a piece of a split sample."""
    return span.unit.startswith(_PIECE)


def gone_back(spans: Iterable[Span], epoch: int) -> list[Span]:
    """The spans of a rank that has gone back to the end of minibatch `epoch`: later ones are marked as given up."""
    return [
        span._replace(category=GIVEN_UP, lane=RECOVERY, unit=f"minibatch {span.epoch}")
        if span.category == WINDOW and span.epoch > epoch
        else span
        for span in spans
    ]


def rank_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """The file of one rank's spans among those of a run."""
    return Path(folder) / f"rank-{rank}.jsonl"


def save_spans(path: str | os.PathLike[str], spans: Iterable[Span]) -> None:
    """Write spans to `path` as JSON lines, about 65 bytes a span; creates the folder if needed.

    The file is replaced as a whole: a rank that is killed never leaves half of one.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    encode = json.JSONEncoder(separators=(",", ":")).encode
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"format": _FORMAT, "fields": Span._fields}) + "\n")
            file.writelines(encode(span) + "\n" for span in spans)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def load_spans(path: str | os.PathLike[str]) -> list[Span]:
    """What `save_spans` wrote, in the same order. Raises TraceError for another kind or version, or a damaged line."""
    with Path(path).open(encoding="utf-8") as file:
        try:
            header = json.loads(file.readline())
        except ValueError:
            header = None
        if header != {"format": _FORMAT, "fields": list(Span._fields)}:
            raise TraceError(f"{path} is not a file of spans ({_FORMAT})")
        try:
            return [Span(*json.loads(line)) for line in file]
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path} is damaged: {error}") from error
