"""The verbs over a heap: publish, fetch, push, claim, done, wait."""

from odc.comm.abort import abort, read_reason, write_text
from odc.comm.accumulator import Adder, accumulator_dtype
from odc.comm.geometry import Geometry
from odc.comm.push import Gradient, flatten
from odc.comm.queue import Claimed, Queue, progress
from odc.comm.space import Space
from odc.comm.staging import Inbox, Outbox
from odc.comm.store import JobStore
from odc.comm.units import ParamSpec, Piece, UnitSpec
from odc.comm.verbs import Verbs
from odc.comm.wait import Waiter
from odc.comm.words import Outcome, State, Word

__all__ = [
    "Adder",
    "Claimed",
    "Geometry",
    "Gradient",
    "Inbox",
    "JobStore",
    "Outbox",
    "Outcome",
    "ParamSpec",
    "Piece",
    "Queue",
    "Space",
    "State",
    "UnitSpec",
    "Verbs",
    "Waiter",
    "Word",
    "abort",
    "accumulator_dtype",
    "flatten",
    "progress",
    "read_reason",
    "write_text",
]
