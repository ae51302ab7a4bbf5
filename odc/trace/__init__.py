"""What each rank did when: spans, and what is made of them."""

from odc.trace.breakdown import Breakdown, EpochBreakdown, Stat, breakdown
from odc.trace.collect import load_spans, save_spans
from odc.trace.collectives import SplitWaits, split_waits
from odc.trace.perfetto import read_trace, write_trace
from odc.trace.recorder import CAPACITY, Mark, Recorder, recorder
from odc.trace.span import (
    CATEGORIES,
    COLLECTIVE,
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
)
from odc.trace.timeline import draw

__all__ = [
    "CAPACITY",
    "CATEGORIES",
    "COLLECTIVE",
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
    "EpochBreakdown",
    "Mark",
    "Recorder",
    "Span",
    "SplitWaits",
    "Stat",
    "breakdown",
    "draw",
    "load_spans",
    "read_trace",
    "recorder",
    "save_spans",
    "split_waits",
    "write_trace",
]
