"""One span: what one rank did from one moment to another.

Chose a flat tuple of nine plain values over an object with parents and attributes: appending one is the cheapest thing
Python can do from any thread, and nesting can be read back from the times. The price is that meaning lies in
conventions, all of them listed here.

Times are `time.monotonic_ns()`, i.e. CLOCK_MONOTONIC: nanoseconds on one clock for every process of a host. Spans of
different hosts must not be compared without aligning their clocks first.

Lanes: "main" is the training thread, and the only lane that counts in a breakdown. Other lanes ("fetch", "push",
"server") are background threads: drawn and exported, but not counted, since work that hides behind compute ends no step
later. It does compete for cores, which shows as longer spans of the main lane.
On the main lane spans may nest or abut; the innermost one says what the rank was doing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

COMPUTE: Final = "compute"
FETCH: Final = "fetch"
PUSH: Final = "push"
WAIT: Final = "wait"
OPTIMIZER: Final = "optimizer"
IDLE: Final = "idle"

#: What a moment can be counted as, in the order tables and pictures show it. COMPUTE and IDLE are derived from the
#: marks below, never recorded by the runtime.
CATEGORIES: Final = (COMPUTE, OPTIMIZER, FETCH, PUSH, WAIT, IDLE)

WINDOW: Final = "window"
MICROBATCH: Final = "microbatch"
#: Marks bound a stretch of time and say nothing about what was done in it. WINDOW: one minibatch, from begin to the
#: end of finish. MICROBATCH: one forward and backward.
MARKS: Final = (WINDOW, MICROBATCH)

MAIN: Final = "main"

NO_PEER: Final = -1
#: `peer` of a span in which all ranks meet (an all-gather, a reduce-scatter): its time holds waiting and transfer.
COLLECTIVE: Final = -2


class Span(NamedTuple):
    """What a rank did from `start_ns` to `end_ns`.

    Args:
        category: one of CATEGORIES or MARKS.
        lane: the thread it ran on, "main" for the training thread.
        start_ns: first nanosecond, on the host's monotonic clock.
        end_ns: the nanosecond after the last one.
        epoch: number of the minibatch, counted by every rank for itself; -1 before the first.
        microbatch: index of the microbatch within the rank's minibatch; -1 outside of one.
        unit: name of the `fully_shard`ed module, "" if it concerns none.
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
