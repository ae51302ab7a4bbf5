"""What a rank reports of its microbatches, as one value a metric.

Chose to collapse on the rank: verl merges the ranks' values microbatch by microbatch and raises where ranks had
different numbers of them. A mean is weighted by tokens and scaled so that verl's mean over ranks gives the mean over
all tokens of the minibatch, whoever computed which; verl's own mean over equal numbers of microbatches weighs tokens
of full microbatches less. The price is that a metric which a loss leaves out of some microbatches counts as 0 there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.metric import AggregationType, Metric


def collapse(microbatches: Sequence[Mapping[str, Any]], weights: Sequence[float], scale: float) -> dict[str, Any]:
    """One value a metric of this rank's microbatches.

    Args:
        microbatches: what the loss function returned for each: verl's `Metric`s, scalars, or lists of them.
        weights: predicted tokens of each microbatch.
        scale: data-parallel ranks / predicted tokens of all ranks. 0 where nobody has a token: then all means are 0.

    Returns a `Metric` of the same aggregation, or a list of one number (verl's form) where there was a plain number:
    the largest or smallest if "max" or "min" is in the name, as verl reads names, else the mean.
    """
    found: dict[str, list[tuple[Any, float]]] = {}
    for metrics, weight in zip(microbatches, weights, strict=True):
        for name, value in metrics.items():
            found.setdefault(name, []).append((value, weight))
    return {name: _one(name, values, scale) for name, values in found.items()}


def _one(name: str, values: list[tuple[Any, float]], scale: float) -> Any:
    first = values[0][0]
    if isinstance(first, Metric):
        kind = first.aggregation
    else:
        kind = next((AggregationType(word) for word in ("max", "min") if word in name), AggregationType.MEAN)
    each = [(float(_metric(kind, value).aggregate()), weight) for value, weight in values]
    if kind is AggregationType.MEAN:
        whole = scale * sum(value * weight for value, weight in each)
    else:
        whole = float(_metric(kind, [value for value, _ in each]).aggregate())
    return Metric(kind, whole) if isinstance(first, Metric) else [whole]


def _metric(kind: AggregationType, value: Any) -> Any:
    if isinstance(value, Metric):
        return value
    metric = Metric(kind)
    metric.extend(value if isinstance(value, list) else [value])
    return metric
