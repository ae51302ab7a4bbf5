"""What the ranks of a job say to each other: publish, fetch, push, meet, and the daemon behind every rank."""

from __future__ import annotations

from odc.runtime.abort import abort, read_reason, write_text
from odc.runtime.accumulate import Adder, accumulator_dtype
from odc.runtime.connect import Rendezvous, summary
from odc.runtime.daemon import DOOR_PREFIX, Daemon, await_departures, daemon, stop_daemon
from odc.runtime.geometry import Geometry
from odc.runtime.layout import Space
from odc.runtime.presence import announce_failure, announce_process
from odc.runtime.push import Gradient, flatten
from odc.runtime.queue import Claimed, Queue, progress
from odc.runtime.service import Service, reading_token
from odc.runtime.shutdown import leave
from odc.runtime.staging import Inbox, Outbox
from odc.runtime.store import JobStore
from odc.runtime.units import ParamSpec, Piece, UnitSpec
from odc.runtime.verbs import Verbs
from odc.runtime.wait import Waiter
from odc.runtime.words import Outcome, State, Word

__all__ = [
    "DOOR_PREFIX",
    "Adder",
    "Claimed",
    "Daemon",
    "Geometry",
    "Gradient",
    "Inbox",
    "JobStore",
    "Outbox",
    "Outcome",
    "ParamSpec",
    "Piece",
    "Queue",
    "Rendezvous",
    "Service",
    "Space",
    "State",
    "UnitSpec",
    "Verbs",
    "Waiter",
    "Word",
    "abort",
    "accumulator_dtype",
    "announce_failure",
    "announce_process",
    "await_departures",
    "daemon",
    "flatten",
    "leave",
    "progress",
    "read_reason",
    "reading_token",
    "stop_daemon",
    "summary",
    "write_text",
]
