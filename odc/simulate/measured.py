"""From a recorded trace to a cost model: the compute time of every microbatch against the lengths in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from odc.balance import Cost, Fit, Plan, fit, fit_scale
from odc.errors import TraceError
from odc.trace import COMPUTE, Span
from odc.trace.cover import cover, marked_epochs

Key = tuple[int, int, int]  # epoch, rank, microbatch


def microbatch_seconds(spans_by_rank: Mapping[int, Sequence[Span]]) -> dict[Key, float]:
    """Measured compute seconds by (epoch, rank, microbatch) of all marked microbatches.

    They include the copies that FSDP2 makes inside forward and backward, and no fetches.
    """
    marked = marked_epochs(spans_by_rank)
    nanoseconds: dict[Key, int] = {}
    for rank, spans in spans_by_rank.items():
        for piece in cover(spans, marked):
            if piece.category == COMPUTE and piece.microbatch >= 0:
                key = piece.epoch, rank, piece.microbatch
                nanoseconds[key] = nanoseconds.get(key, 0) + piece.end_ns - piece.start_ns
    return {key: value / 1e9 for key, value in sorted(nanoseconds.items())}


def fit_trace(
    spans_by_rank: Mapping[int, Sequence[Span]],
    plans: Mapping[int, Plan],
    lengths: Mapping[int, Sequence[int]],
    cost: Cost | None = None,
) -> Fit:
    """Fit a cost model to the microbatches of a trace.

    Args:
        spans_by_rank: all spans of every rank, as for `odc.trace.breakdown`.
        plans, lengths: by epoch, what was run and the tokens of each sample. Epochs without a plan, empty microbatches
            and dummies are left out.
        cost: fit only the scale of this cost model and the fixed seconds; otherwise linear and quadratic coefficients.

    Raises TraceError when no microbatch matches, PlanError as `fit`.
    """
    microbatches, seconds = [], []
    for (epoch, rank, m), second in microbatch_seconds(spans_by_rank).items():
        if epoch not in plans or rank >= len(plans[epoch].ranks):
            continue
        own = [samples for samples in plans[epoch].ranks[rank] if samples]
        if m < len(own):
            microbatches.append([lengths[epoch][i] for i in own[m]])
            seconds.append(second)
    if not seconds:
        raise TraceError("no microbatch of the trace belongs to one of the plans: were microbatches marked?")
    return fit(microbatches, seconds) if cost is None else fit_scale(cost, microbatches, seconds)
