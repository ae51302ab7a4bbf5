"""Post-balancing and node-wise rearrangement of OrchMLLM: pure planning. `odc.dispatch.exchange` moves tensors."""

from odc.dispatch.lengths import check_lengths
from odc.dispatch.node_wise import NodeWise, node_wise
from odc.dispatch.policy import BalancePolicy, post_balance
from odc.dispatch.rearrangement import Rearrangement, flatten
from odc.dispatch.records import TEXT, Records
from odc.dispatch.step import EncoderPlan, Phase, StepPlan, plan_step

__all__ = [
    "TEXT",
    "BalancePolicy",
    "EncoderPlan",
    "NodeWise",
    "Phase",
    "Rearrangement",
    "Records",
    "StepPlan",
    "check_lengths",
    "flatten",
    "node_wise",
    "plan_step",
    "post_balance",
]
