"""A row of the sweep over kernels is of the kernel that it names."""

from __future__ import annotations

from pathlib import Path

from support.uninterpreted import run_uninterpreted


def test_the_warps_that_a_row_names_are_those_that_ran(tmp_path: Path) -> None:
    rows, _ = run_uninterpreted("swept.py", tmp_path)
    assert len({(row["kernel"], row["warps"]) for row in rows}) == 7 * 2
    assert all(row["of a copy"].endswith("%") for row in rows), rows
    wrong = [(row["kernel"], row["warps"], row["launched"]) for row in rows if row["launched"] != [row["warps"]]]
    assert not wrong
