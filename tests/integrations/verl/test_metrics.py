"""Collapsed metrics against what they stand for: one pass over all microbatches of all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.verl import import_verl, needs_verl

pytestmark = needs_verl

microbatches = st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)), min_size=1, max_size=5)


@given(st.lists(microbatches, min_size=1, max_size=4))
def test_verls_merge_of_collapsed_metrics_is_that_of_all_microbatches(ranks: list[list[tuple[int, int]]]) -> None:
    import_verl()
    from verl.utils.metric import Metric

    from odc.integrations.verl.engine import collapse

    kinds = ("mean", "sum", "min", "max")
    tokens = sum(weight for rank in ranks for _, weight in rank)
    reported = [
        collapse(
            [{kind: Metric(kind, value) for kind in kinds} | {"loss": value, "max_len": value} for value, _ in rank],
            [weight for _, weight in rank],
            len(ranks) / tokens if tokens else 0.0,
        )
        for rank in ranks
    ]
    merged = {kind: Metric.aggregate_dp([one[kind] for one in reported]) for kind in kinds}
    values = [value for rank in ranks for value, _ in rank]
    mean = sum(value * weight for rank in ranks for value, weight in rank) / tokens if tokens else 0
    assert merged["mean"] == pytest.approx(mean, abs=1e-9)
    assert merged["sum"] == pytest.approx(sum(values) / len(ranks))
    assert (merged["min"], merged["max"]) == (min(values), max(values))
    plain = [value for one in reported for value in one["loss"]]
    assert sum(plain) / len(plain) == pytest.approx(mean, abs=1e-9)
    assert max(value for one in reported for value in one["max_len"]) == max(values)


def test_a_metric_may_hold_several_values() -> None:
    import_verl()
    from verl.utils.metric import Metric

    from odc.integrations.verl.engine import collapse

    several = Metric("sum")
    several.extend([1, 2])
    found = collapse([{"a": several, "b": [1.0, 3.0]}, {"a": Metric("sum", 4), "b": 5.0}], [1, 3], 1 / 4)
    assert found["a"].values == [7.0] and found["b"] == [(2 * 1 + 5 * 3) / 4]
    none = collapse([{"loss": float("nan")}, {"loss": 3.0}], [0, 4], 1 / 4)
    assert none == {"loss": [3.0]}, "a mean over no tokens does not count"
