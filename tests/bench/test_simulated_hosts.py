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
    """(N-1)/N E (b c + a) with the share c of what changes, 2(N-1)/N E g of hybrid sharding, and of FSDP2 over all
    ranks by gloo (NG-1)/NG E (2Mb + 2g) or, reduced in every microbatch, (2Mb + 2Mg), by rings over ranks of the same
    number on each host (N-1)/N E (2Mb + g) or (2Mb + Mg); N = G = b = 2, M = 8.
    """
    measured = [
        {"link": link, "learning rate": rate, "arm": arm, "weights of whole": share}
        for link in ("1gbit", "not limited")
        for rate, arm, share in ((1e-5, "changes", 0.07), (1e-5, "whole", 1.0), (1e-4, "changes", 0.25))
    ]
    shares = changed_shares({"rows": measured})
    assert shares == {"whole": 1, "changed, lr 1e-05": 0.07, "changed, lr 0.0001": 0.25}
    bytes_of = {"fp32": 4, "bf16": 2, "int8": 1.1}
    made = bytes_rows(shares, bytes_of)
    assert len(made) == 15
    assert made == sorted(made, key=lambda row: row["bytes out a parameter"])
    for row in made:
        sums = bytes_of[row["sums"]]
        wanted = {
            "odc": (2 * shares.get(row["weights"], 0) + sums) / 2,
            "fsdp2-hybrid": sums,
            "fsdp2 by gloo, 8 microbatches, reduced in the last": 3 / 4 * (2 * 8 * 2 + 2 * 4),
            "fsdp2 by gloo, 8 microbatches, reduced in each": 3 / 4 * (2 * 8 * 2 + 2 * 8 * 4),
            "fsdp2 by rings that know hosts, 8 microbatches, reduced in the last": 1 / 2 * (2 * 8 * 2 + 4),
            "fsdp2 by rings that know hosts, 8 microbatches, reduced in each": 1 / 2 * (2 * 8 * 2 + 8 * 4),
        }[row["arm"]]
        assert row["bytes out a parameter"] == pytest.approx(wanted)
