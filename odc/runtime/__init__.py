"""What the ranks of a job say to each other. Begin with `protocol`; then `fetch`, `push`, `service` and `member`."""

from __future__ import annotations

from odc.runtime.accumulate import Adder, accumulator_dtype
from odc.runtime.arena import Arena, abort_arenas, leave_arenas
from odc.runtime.arena_protocol import AbsentMember
from odc.runtime.connect import Rendezvous
from odc.runtime.daemon import Daemon, await_departures, daemon, stop_daemon, tell_hosts
from odc.runtime.fetch import PublishedShards
from odc.runtime.grid import RankGrid
from odc.runtime.hosts import locate
from odc.runtime.layout import HeapLayout
from odc.runtime.member import Endpoint, Member
from odc.runtime.protocol import MemberProtocol
from odc.runtime.push import Gradient, Inbox, Outbox, Pusher, flatten
from odc.runtime.queue import Claimed, Queue
from odc.runtime.reading import MappedMember, ReadOnlyMember, RemoteMember, WeightEngine
from odc.runtime.replicas import parts
from odc.runtime.service import Service, reading_token
from odc.runtime.store import JobStore, KeyValueStore, announce_failure, announce_process, host_identity
from odc.runtime.units import Piece, UnitSpec
from odc.runtime.wait import Backoff, Deadline, Waiter, last_in_chain
from odc.runtime.words import Outcome, RootState, Word

__all__ = [
    "AbsentMember",
    "Adder",
    "Arena",
    "Backoff",
    "Claimed",
    "Daemon",
    "Deadline",
    "Endpoint",
    "Gradient",
    "HeapLayout",
    "Inbox",
    "JobStore",
    "KeyValueStore",
    "MappedMember",
    "Member",
    "MemberProtocol",
    "Outbox",
    "Outcome",
    "Piece",
    "PublishedShards",
    "Pusher",
    "Queue",
    "RankGrid",
    "ReadOnlyMember",
    "RemoteMember",
    "Rendezvous",
    "RootState",
    "Service",
    "UnitSpec",
    "Waiter",
    "WeightEngine",
    "Word",
    "abort_arenas",
    "accumulator_dtype",
    "announce_failure",
    "announce_process",
    "await_departures",
    "daemon",
    "flatten",
    "host_identity",
    "last_in_chain",
    "leave_arenas",
    "locate",
    "parts",
    "reading_token",
    "stop_daemon",
    "tell_hosts",
]
