from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.together import run_together

from odc.errors import ResultsError
from odc.eval import Peers, sample_stability, stability

SCORES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=9)


@given(SCORES)
def test_against_the_statistics_module(scores):
    found = sample_stability(scores)
    assert found.runs == len(scores)
    assert found.mean == pytest.approx(statistics.fmean(scores))
    assert found.variance == pytest.approx(statistics.variance(scores))
    assert found.consistency == max(scores.count(one) for one in scores) / len(scores)


def test_scores_of_a_tensor():
    assert sample_stability(torch.tensor([1.0, 1.0, 0.0])) == sample_stability([1.0, 1.0, 0.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("scores", [[], [1.0], [1.0, float("nan")]])
def test_what_has_no_stability(scores: list[float]):
    with pytest.raises(ValueError, match="2 or more finite scores"):
        sample_stability(scores)


def test_computed_where_it_was_run_and_gathered():
    mine: list[dict[int, list[float]]] = [{0: [1, 1, 1], 3: [0, 1]}, {}, {1: [0, 0, 1], 2: [1, 1, 0, 1]}]
    first, *others = run_together(3, lambda peers: stability(mine[peers.me], peers))
    assert others == [None, None]
    every = {**mine[0], **mine[2]}
    assert list(first.samples) == [0, 1, 2, 3]
    assert first.samples == {at: sample_stability(every[at]) for at in sorted(every)}
    assert first.mean == pytest.approx(8 / 12)
    assert first.consensus == 2 / 4  # samples 0 and 2; 3 is a tie
    assert first.consistent == 1 / 4
    assert first.variance == pytest.approx(statistics.fmean(statistics.variance(runs) for runs in every.values()))


def test_no_sample_twice_and_not_none_at_all():
    def twice(peers: Peers) -> Any:
        return stability({5: [0.0, 1.0]}, peers)

    assert "stability of ranks 4, 7 do not fit: 1 doubled: 5" in str(run_together(2, twice)[0])
    assert isinstance(run_together(2, twice)[0], ResultsError)
    assert "stability of no samples" in str(run_together(2, lambda peers: stability({}, peers))[0])
