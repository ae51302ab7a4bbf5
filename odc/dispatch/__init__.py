"""Post-balancing and node-wise rearrangement of OrchMLLM: pure planning. `odc.dispatch.exchange` moves tensors."""

from odc.dispatch.keep_local import keep_local
from odc.dispatch.lengths import check_lengths
from odc.dispatch.node_wise import NodeWise, node_wise
from odc.dispatch.policy import BalancePolicy, post_balance
from odc.dispatch.rearrangement import Rearrangement
from odc.dispatch.records import TEXT, Records
from odc.dispatch.step import EncoderPlan, Nodes, Phase, StepPlan, plan_step

__all__ = [
    "TEXT",
    "BalancePolicy",
    "EncoderPlan",
    "NodeWise",
    "Nodes",
    "Phase",
    "Rearrangement",
    "Records",
    "StepPlan",
    "check_lengths",
    "keep_local",
    "node_wise",
    "plan_step",
    "post_balance",
]
