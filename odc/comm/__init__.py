"""The verbs over a heap: publish, fetch, push, done, wait."""

from odc.comm.abort import abort
from odc.comm.accumulator import accumulator_dtype, add
from odc.comm.geometry import Geometry
from odc.comm.push import Gradient, flatten
from odc.comm.space import Space
from odc.comm.staging import Inbox, Outbox
from odc.comm.units import ParamSpec, UnitSpec
from odc.comm.verbs import Verbs
from odc.comm.wait import Waiter
from odc.comm.words import State, Word

__all__ = [
    "Geometry",
    "Gradient",
    "Inbox",
    "Outbox",
    "ParamSpec",
    "Space",
    "State",
    "UnitSpec",
    "Verbs",
    "Waiter",
    "Word",
    "abort",
    "accumulator_dtype",
    "add",
    "flatten",
]
