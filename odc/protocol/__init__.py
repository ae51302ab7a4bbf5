"""The words that ranks store, where they lie and which ranks wait for them: no socket, no thread."""

from __future__ import annotations

from odc.protocol.accumulate import Adder, accumulator_dtype
from odc.protocol.grid import RankGrid
from odc.protocol.layout import HeapLayout
from odc.protocol.protocol import MemberProtocol
from odc.protocol.push import Gradient, HostRoute, Pusher, flatten
from odc.protocol.ring import Inbox, Outbox
from odc.protocol.units import Piece, UnitSpec
from odc.protocol.wait import Waiter
from odc.protocol.words import Outcome, RootState, Word

__all__ = [
    "Adder",
    "Gradient",
    "HeapLayout",
    "HostRoute",
    "Inbox",
    "MemberProtocol",
    "Outbox",
    "Outcome",
    "Piece",
    "Pusher",
    "RankGrid",
    "RootState",
    "UnitSpec",
    "Waiter",
    "Word",
    "accumulator_dtype",
    "flatten",
]
