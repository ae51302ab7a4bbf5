"""The table of arms: how a minibatch is planned, how its ranks communicate, and over which ranks the model is sharded.

docs/compare.md describes every arm. Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from odc.balance import Cost, Plan, lb_dynamic, lb_micro, lb_mini, lb_split, local_sort, queue_of
from odc.balance.lb_split import FLOOR
from odc.errors import ConfigError

ArmName = Literal[
    "fsdp2-localsort",
    "fsdp2-equal-samples",
    "fsdp2",
    "fsdp2-padded",
    "fsdp2-resident",
    "fsdp2-hybrid",
    "odc-localsort",
    "odc-equal-samples",
    "odc-equal",
    "odc",
    "odc-split",
    "odc-dynamic",
    "odc-hybrid",
]
Balance = Literal["local_sort", "lb_micro_equal_samples", "lb_micro", "lb_mini", "lb_split", "lb_dynamic"]
Transport = Literal["collectives", "resident", "on demand", "dynamic"]

_POLICIES: dict[Balance, Callable[..., Plan]] = {
    "local_sort": local_sort,
    "lb_micro_equal_samples": partial(lb_micro, equal_samples=True),
    "lb_micro": lb_micro,
    "lb_mini": lb_mini,
    "lb_split": lb_split,
    "lb_dynamic": lb_dynamic,
}


@dataclass(frozen=True)
class Arm:
    """One way to run a minibatch. "lb_micro_equal_samples" is LB-Micro restricted to equal sample counts.

    The transport "resident" gathers all parameters before the first microbatch and reduces all gradients after the
    last; "dynamic" is on demand with one queue of microbatches for all ranks. `within_node` shards parameters and
    gradients over the ranks of one node and replicates them across nodes.
    """

    name: ArmName
    balance: Balance
    transport: Transport
    within_node: bool = False
    about: str = ""

    @property
    def dynamic(self) -> bool:
        """Whether ranks claim microbatches from a queue. A plan then only predicts which rank computes what."""
        return self.transport == "dynamic"

    @property
    def on_demand(self) -> bool:
        return self.transport in ("on demand", "dynamic")

    @property
    def splits(self) -> bool:
        """Whether long samples run as pieces on several ranks (`Plan.splits`), before all microbatches."""
        return self.balance == "lb_split"

    def plan(
        self,
        lengths: Sequence[int],
        ranks: int,
        max_tokens: int,
        cost: Cost,
        seed: int,
        *,
        node: int | None = None,
        floor: int = FLOOR,
    ) -> Plan:
        """The plan of one minibatch, the same on every rank without communication. Raises PlanError for bad input.

        `node` and `floor` limit the pieces of split samples, as in `lb_split`.
        """
        limits = {"node": node, "floor": floor} if self.splits else {}
        return _POLICIES[self.balance](lengths, ranks, max_tokens, cost=cost, seed=seed, **limits)

    def loads(self, plan: Plan, rank: int) -> list[tuple[list[int], float]]:
        """(sample indices, predicted cost) of each microbatch that a rank builds, and computes unless it is dynamic."""
        if self.dynamic:
            return queue_of(plan)[rank :: len(plan.ranks)]
        return [(mb, cost) for mb, cost in zip(plan.ranks[rank], plan.costs[rank], strict=True) if mb]

    def counts(self, plan: Plan) -> list[int]:
        """Microbatches that each rank runs, dummies included, without pieces; predicted if the arm is dynamic."""
        own = [sum(1 for microbatch in microbatches if microbatch) for microbatches in plan.ranks]
        return counts_with_dummies(self.transport, own)

    def predicted_bubble(self, plan: Plan, per_node: int) -> float:
        """The bubble that the plan's cost model predicts for this arm's barriers, `per_node` ranks to a node."""
        if self.transport != "collectives":
            return plan.bubble
        return plan.bubble_within(per_node) if self.within_node else plan.bubble_per_microbatch


def counts_with_dummies(transport: Transport, own: Sequence[int]) -> list[int]:
    """Microbatches that each rank runs when the plan gives it `own`: collectives pad every rank to the maximum, and a
    resident arm adds one dummy, whose backward reduces the gradients.
    """
    if transport == "collectives":
        return [max(own)] * len(own)
    return [count + 1 for count in own] if transport == "resident" else list(own)


_ALL = (
    Arm("fsdp2-localsort", "local_sort", "collectives", about="LocalSort, collectives in every unit"),
    Arm("fsdp2-equal-samples", "lb_micro_equal_samples", "collectives", about="LB-Micro with equal sample counts"),
    Arm("fsdp2", "lb_micro", "collectives", about="LB-Micro, collectives in every unit"),
    Arm("fsdp2-padded", "lb_mini", "collectives", about="LB-Mini padded with dummies, collectives in every unit"),
    Arm("fsdp2-resident", "lb_mini", "resident", about="LB-Mini, one gather and one reduction a minibatch"),
    Arm("fsdp2-hybrid", "lb_micro", "collectives", True, about="LB-Micro, collectives within each node"),
    Arm("odc-localsort", "local_sort", "on demand", about="LocalSort, on demand"),
    Arm("odc-equal-samples", "lb_micro_equal_samples", "on demand", about="as fsdp2-equal-samples, on demand"),
    Arm("odc-equal", "lb_micro", "on demand", about="LB-Micro, on demand"),
    Arm("odc", "lb_mini", "on demand", about="LB-Mini, on demand"),
    Arm("odc-split", "lb_split", "on demand", about="LB-Split: long samples as pieces, on demand"),
    Arm("odc-dynamic", "lb_dynamic", "dynamic", about="LB-Dynamic: one queue for all ranks, on demand"),
    Arm("odc-hybrid", "lb_mini", "on demand", True, about="LB-Mini, on demand within each node"),
)
ARMS: dict[ArmName, Arm] = {arm.name: arm for arm in _ALL}
ARM_NAMES: tuple[ArmName, ...] = get_args(ArmName)
#: The ways to plan a minibatch on demand, as users name them, and the arm of each.
PLANS: dict[str, ArmName] = {"lb-mini": "odc", "lb-micro": "odc-equal", "dynamic": "odc-dynamic", "split": "odc-split"}


def arm_named(name: str) -> Arm:
    """The arm called `name`; raises `ConfigError` listing the names."""
    for arm in _ALL:
        if arm.name == name:
            return arm
    raise ConfigError(f"there is no arm {name!r}; there are {', '.join(ARMS)}")
