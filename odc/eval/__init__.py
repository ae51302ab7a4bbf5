"""Evaluation on many ranks: unequal requests, padded only where a model needs it; results gathered in order."""

from odc.eval.gather import gather_metrics, gather_results
from odc.eval.pad import Padded, pad_requests
from odc.eval.peers import Peers
from odc.eval.plan import RequestPlan, plan_requests
from odc.eval.run import run_requests
from odc.eval.session import session, unsynced
from odc.eval.stability import SampleStability, Stability, sample_stability, stability

__all__ = [
    "Padded",
    "Peers",
    "RequestPlan",
    "SampleStability",
    "Stability",
    "gather_metrics",
    "gather_results",
    "pad_requests",
    "plan_requests",
    "run_requests",
    "sample_stability",
    "session",
    "stability",
    "unsynced",
]
