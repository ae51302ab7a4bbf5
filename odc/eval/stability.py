"""`stability`: how much the scores of one sample vary over repeated runs of it (k-samples mode).

Chose to compute each sample's figures on the rank that ran it and gather those over gathering all scores: three numbers
a sample, whatever k is. Repeats of one sample therefore belong on one rank; where they are spread, gather them first
(`gather_metrics` with (sample, repeat) as index) and call `sample_stability` on the first rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odc.eval.gather import gather_results
from odc.eval.peers import Peers


@dataclass(frozen=True)
class SampleStability:
    """Of one sample over its runs.

    Attributes:
        runs: how many, at least 2.
        mean: score.
        variance: unbiased (divided by runs - 1).
        consistency: share of the runs that have the most frequent score; 1 when all agree.
    """

    runs: int
    mean: float
    variance: float
    consistency: float


@dataclass(frozen=True)
class Stability:
    """Of all samples, each weighing the same but in `mean`, where each run does.

    Attributes:
        samples: by index, in order.
        mean: over all runs (expected accuracy, for scores of 0 and 1).
        consensus: share of samples whose mean is over one half (right by majority vote, for scores of 0 and 1).
        variance: mean of the samples' variances.
        consistent: share of samples whose runs all agree.
    """

    samples: dict[Any, SampleStability]
    mean: float
    consensus: float
    variance: float
    consistent: float


def sample_stability(scores: Sequence[float]) -> SampleStability:
    """Of one sample's scores, one a run. Raises ValueError for fewer than 2, or one that is not finite."""
    if len(scores) < 2 or not all(math.isfinite(score) for score in scores):
        raise ValueError(f"stability needs 2 or more finite scores of a sample, not {list(scores)!r}")
    runs, mean = len(scores), math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (runs - 1)
    return SampleStability(runs, mean, variance, Counter(scores).most_common(1)[0][1] / runs)


def stability(scores: Mapping[Any, Sequence[float]], peers: Peers) -> Stability | None:
    """Stability of all ranks' samples, on the group's first rank; None on the others. Every rank calls it.

    Args:
        scores: by index of the sample: its scores, one a run. Each sample on one rank; none at all is fine.

    Raises:
        ValueError: see `sample_stability`, or no rank has a sample.
        ResultsError: two ranks have the same sample.
    """
    own = {at: sample_stability(runs) for at, runs in scores.items()}
    rows = [(at, one.runs, one.mean, one.variance, one.consistency) for at, one in own.items()]
    gathered = gather_results(rows, list(own), peers, what="stability")
    if gathered is None:
        return None
    if not gathered:
        raise ValueError("stability of no samples at all")
    samples, count = {row[0]: SampleStability(*row[1:]) for row in gathered}, len(gathered)
    ones = samples.values()
    return Stability(
        samples,
        mean=math.fsum(one.mean * one.runs for one in ones) / sum(one.runs for one in ones),
        consensus=sum(one.mean > 0.5 for one in ones) / count,
        variance=math.fsum(one.variance for one in ones) / count,
        consistent=sum(one.consistency == 1 for one in ones) / count,
    )
