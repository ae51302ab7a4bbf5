"""Planning of OrchMLLM: post-balancing and node-wise rearrangement. `odc.dispatch.exchange` moves tensors."""

from odc.dispatch.node_wise import NodeWise, keep_local, node_wise
from odc.dispatch.policy import BalancePolicy, check_lengths, post_balance
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
