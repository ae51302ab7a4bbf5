"""`stability`: how much the scores of one sample vary over repeated runs (k-samples mode).

Each sample's figures are computed on the rank that ran all its repeats. If they are spread over ranks, gather them
first (`gather_metrics` with (sample, repeat) as index) and call `sample_stability` on the first rank.
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
    """Scores of one sample over its runs, of which there are 2 or more.

    `variance` is unbiased (divided by runs - 1); `consistency` is the share of runs with the most frequent score.
    """

    runs: int
    mean: float
    variance: float
    consistency: float


@dataclass(frozen=True)
class Stability:
    """Scores of all samples. Every sample weighs the same, except in `mean`, where every run does.

    `consensus` is the share of samples whose mean is over one half (right by majority vote, for scores of 0 and 1),
    `variance` the mean of the samples' variances, and `consistent` the share of samples whose runs all agree.
    """

    samples: dict[Any, SampleStability]
    mean: float
    consensus: float
    variance: float
    consistent: float


def sample_stability(scores: Sequence[float]) -> SampleStability:
    """Stability of one sample from the scores of its runs. Raises ValueError unless they are 2 or more and finite."""
    scores = [float(score) for score in scores]  # of a tensor's elements no two have one hash
    if len(scores) < 2 or not all(math.isfinite(score) for score in scores):
        raise ValueError(f"stability needs 2 or more finite scores of a sample, not {scores!r}")
    runs, mean = len(scores), math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (runs - 1)
    return SampleStability(runs, mean, variance, Counter(scores).most_common(1)[0][1] / runs)


def stability(scores: Mapping[Any, Sequence[float]], peers: Peers) -> Stability | None:
    """Stability of all ranks' samples, on the group's first rank; None on the others. Every rank calls it.

    `scores` holds the scores of each run, by index of the sample; a rank may have none. Raises ValueError as
    `sample_stability` does or if no rank has a sample, ResultsError if two ranks have the same sample.
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
