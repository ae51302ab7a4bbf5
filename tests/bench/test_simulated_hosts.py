"""What the simulator predicts for measured exchanges is what is stored, with the bytes of the formulas."""

from __future__ import annotations

import pytest

from bench.simulated_hosts import NAME, rows
from bench.stored import find, load


def test_stored_predictions_are_those_of_the_simulator() -> None:
    measured, stored = load("hosts"), load(NAME)["rows"]
    made = rows(measured)
    assert len(made) == len(stored) > 10
    case = ("hosts x ranks", "microbatches", "link", "arm")
    for row, kept in zip(made, stored, strict=True):
        same = {key: row[key] for key in case}
        assert same == {key: kept[key] for key in case}
        figures = {key: value for key, value in row.items() if key not in case}
        again = "run `python -m bench.simulated_hosts --results bench/results`"
        assert figures == pytest.approx({key: kept[key] for key in figures}, rel=1e-6), again
        known = find(measured, work="exchange", **same)
        assert row["simulated bytes out / parameters"] == pytest.approx(known["formula"])
