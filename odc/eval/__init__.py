"""Evaluation on many ranks: unequal requests, padded only for models that need it, and results gathered in order."""

from odc.eval.gather import gather_metrics, gather_results
from odc.eval.peers import Peers
from odc.eval.requests import PaddedRequests, RequestPlan, pad_requests, plan_requests, run_requests
from odc.eval.session import session, unsynced
from odc.eval.stability import SampleStability, Stability, sample_stability, stability

__all__ = [
    "PaddedRequests",
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
