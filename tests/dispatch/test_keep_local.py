"""Trading places between examples of equal length."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc.dispatch import keep_local
from odc.errors import PlanError


def made(instances: int, n: int, seed: int, kinds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, instances, n), draw.integers(0, instances, n), draw.integers(1, kinds + 1, n)


@given(st.integers(1, 8), st.integers(0, 60), st.integers(1, 4), st.integers(1, 6), st.integers(0, 1 << 20))
def test_every_instance_keeps_its_lengths(instances: int, n: int, per_node: int, kinds: int, seed: int) -> None:
    owners, homes, lengths = made(instances, n, seed, kinds)
    found = keep_local(owners, homes, lengths, instances, per_node)
    for i in range(instances):
        assert Counter(lengths[found == i].tolist()) == Counter(lengths[owners == i].tolist())
    for divisor in (1, per_node):
        best = 0
        for length in set(lengths.tolist()):
            here = Counter((homes[lengths == length] // divisor).tolist())
            there = Counter((owners[lengths == length] // divisor).tolist())
            best += sum((here & there).values())
        assert (found // divisor == homes // divisor).sum() == best, "no dealing out keeps more"


@given(st.integers(2, 6), st.integers(1, 80), st.sampled_from([0.01, 0.1, 0.5]), st.integers(0, 1 << 20))
def test_a_tolerance_gives_up_no_more_than_it_says(instances: int, n: int, tolerance: float, seed: int) -> None:
    owners, homes, lengths = made(instances, n, seed, 3000)
    found = keep_local(owners, homes, lengths, instances, 2, tolerance=tolerance)
    assert np.array_equal(np.bincount(found, minlength=instances), np.bincount(owners, minlength=instances))
    for i in range(instances):
        before, after = lengths[owners == i], lengths[found == i]
        assert after.sum() <= before.sum() * (1 + tolerance)
        assert after.max(initial=0) <= before.max(initial=0) * (1 + tolerance)


def test_the_same_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    owners, homes, lengths = made(12, 400, 1, 30)
    expected = keep_local(owners, homes, lengths, 12, 4, tolerance=0.1)
    monkeypatch.setattr(sys.modules["odc.balance.compiled"], "loops_of", lambda source, samples: (source, False))
    assert np.array_equal(expected, keep_local(owners, homes, lengths, 12, 4, tolerance=0.1))


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_bad_tolerance_is_refused(tolerance: float) -> None:
    with pytest.raises(PlanError, match="a tolerance is a share"):
        keep_local(np.array([0]), np.array([0]), np.array([1]), 1, 1, tolerance=tolerance)
