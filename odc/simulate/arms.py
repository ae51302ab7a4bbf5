"""The arms: which plan, which transport, and where parameters are sharded.

Chose three switches an arm over a class each, so that a difference between two arms can be put down to one of them. The
names are those of `odc.train.arms` where both have the arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from odc.balance import Cost, Plan, lb_micro, lb_mini, local_sort
from odc.errors import ConfigError

Balance = Literal["local_sort", "lb_micro", "lb_mini"]
Transport = Literal["collectives", "resident", "on demand", "dynamic"]


@dataclass(frozen=True)
class Arm:
    """One way to run a minibatch.

    Args:
        name: as in tables and files.
        balance: the planner. LB-Micro is the published one, with equal sample counts.
        transport: "collectives" in every layer of every microbatch, counts padded with dummies; "resident": parameters
            gathered once and gradients reduced once a minibatch; "on demand"; or "dynamic": on demand, and a rank takes
            the costliest microbatch left whenever it is free.
        within_node: parameters and gradients sharded over the node's ranks only, the optimizer over all (hybrid
            sharding, paper: appendix E): gradients and parameters cross nodes once a minibatch.
        about: one line for tables.
    """

    name: str
    balance: Balance
    transport: Transport
    within_node: bool = False
    about: str = ""

    def plan(self, lengths: Sequence[int], ranks: int, max_tokens: int, cost: Cost, seed: int) -> Plan:
        """The plan of one minibatch by the arm's planner; raises PlanError for bad input."""
        if self.balance == "lb_micro":
            return lb_micro(lengths, ranks, max_tokens, cost=cost, seed=seed, equal_samples=True)
        policy = local_sort if self.balance == "local_sort" else lb_mini
        return policy(lengths, ranks, max_tokens, cost=cost, seed=seed)


_ALL = (
    Arm("fsdp2-sort", "local_sort", "collectives", about="one sample a microbatch, each rank's sorted; collectives"),
    Arm("fsdp2", "lb_micro", "collectives", about="LB-Micro, collectives in every layer"),
    Arm("fsdp2-padded", "lb_mini", "collectives", about="LB-Mini, counts padded, collectives in every layer"),
    Arm("fsdp2-resident", "lb_mini", "resident", about="LB-Mini, parameters resident, one sync a minibatch"),
    Arm("fsdp2-hybrid", "lb_micro", "collectives", True, about="LB-Micro, collectives within each node"),
    Arm("odc-sort", "local_sort", "on demand", about="one sample a microbatch, each rank's sorted; on demand"),
    Arm("odc-equal", "lb_micro", "on demand", about="LB-Micro, on demand"),
    Arm("odc", "lb_mini", "on demand", about="LB-Mini, on demand"),
    Arm("odc-dynamic", "lb_mini", "dynamic", about="LB-Mini's microbatches, costliest first to whoever is free"),
    Arm("odc-hybrid", "lb_mini", "on demand", True, about="LB-Mini, on demand within each node"),
)
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ALL}


def arm_named(name: str) -> Arm:
    """The arm called `name`; raises `ConfigError` listing the names."""
    if name not in ARMS:
        raise ConfigError(f"there is no arm {name!r} to simulate; there are {', '.join(ARMS)}")
    return ARMS[name]
