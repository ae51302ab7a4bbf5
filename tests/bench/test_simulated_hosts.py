"""What the simulator predicts for measured exchanges is what is stored, with the bytes of the formulas."""

from __future__ import annotations

import pytest

from bench.simulated_hosts import NAME, bytes_rows, changed_shares, rows
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


def test_bytes_are_those_of_the_formulas() -> None:
    """(N-1)/N E (b c + a) with the share c of what changes, and 2(N-1)/N E g of hybrid sharding; N = b = 2."""
    measured = [
        {"link": link, "learning rate": rate, "arm": arm, "weights of whole": share}
        for link in ("1gbit", "not limited")
        for rate, arm, share in ((1e-5, "changes", 0.07), (1e-5, "whole", 1.0), (1e-4, "changes", 0.25))
    ]
    shares = changed_shares({"rows": measured})
    assert shares == {"whole": 1, "changed, lr 1e-05": 0.07, "changed, lr 0.0001": 0.25}
    made, bytes_of = bytes_rows(shares), {"fp32": 4, "bf16": 2}
    assert len(made) == 8
    for row in made:
        sums = bytes_of[row["sums"]]
        wanted = (2 * shares[row["weights"]] + sums) / 2 if row["arm"] == "odc" else sums
        assert row["bytes out a parameter"] == pytest.approx(wanted)
