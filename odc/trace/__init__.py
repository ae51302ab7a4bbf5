"""What each rank did when: recorded spans, and the breakdown, trace file and picture made from them."""

from odc.trace.breakdown import Breakdown, EpochBreakdown, Stat, breakdown
from odc.trace.collective_waits import SplitWaits, split_waits
from odc.trace.device_clock import DeviceClock
from odc.trace.perfetto import write_trace
from odc.trace.recorder import CAPACITY, Mark, Recorder, recorder
from odc.trace.spans import (
    CATEGORIES,
    COLLECTIVE,
    COLLECTIVE_LANES,
    COMPUTE,
    FETCH,
    IDLE,
    MAIN,
    MARKS,
    MICROBATCH,
    NO_PEER,
    OPTIMIZER,
    PUSH,
    WAIT,
    WINDOW,
    Span,
    load_spans,
    piece_of,
    rank_file,
    save_spans,
)
from odc.trace.timeline import draw, headline

__all__ = [
    "CAPACITY",
    "CATEGORIES",
    "COLLECTIVE",
    "COLLECTIVE_LANES",
    "COMPUTE",
    "FETCH",
    "IDLE",
    "MAIN",
    "MARKS",
    "MICROBATCH",
    "NO_PEER",
    "OPTIMIZER",
    "PUSH",
    "WAIT",
    "WINDOW",
    "Breakdown",
    "DeviceClock",
    "EpochBreakdown",
    "Mark",
    "Recorder",
    "Span",
    "SplitWaits",
    "Stat",
    "breakdown",
    "draw",
    "headline",
    "load_spans",
    "piece_of",
    "rank_file",
    "recorder",
    "save_spans",
    "split_waits",
    "write_trace",
]
