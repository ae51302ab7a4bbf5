"""Names of groups, lengths from files of every kind, and saved data sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from odc.balance import lb_mini
from odc.balance.inputs import read_lengths
from odc.errors import DataError


def test_groups_of_a_tensor():
    names = [7, 8, 7, 8, 7, 8]
    plan = lb_mini([30, 1, 1, 1, 1, 30], 2, 100, groups=torch.tensor(names))
    assert plan == lb_mini([30, 1, 1, 1, 1, 30], 2, 100, groups=names)


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("3 14\n15,9\n", "length", [3, 14, 15, 9]),
        ("[3, 14]", "length", [3, 14]),
        ("\ufeff3 14", "length", [3, 14]),
        ('\ufeff{"length": 3}', "length", [3]),
        ('[{"n": 3}, {"n": 14}]', "n", [3, 14]),
        ('{"length": 3, "x": 1}\n\n{"length": 14}\n', "length", [3, 14]),
        ('{"input_ids": [5, 6, 7]}\n', "input_ids", [3]),
    ],
)
def test_formats(tmp_path: Path, text: str, field: str, expected: list[int]):
    path = tmp_path / "lengths"
    path.write_text(text, encoding="utf-8")
    assert read_lengths(path, field) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no lengths"),
        ("three", "neither integers, nor a JSON list"),
        ("[1, 2", "neither integers, nor a JSON list"),
        ("[1, 2.5]", "element 1 is 2.5"),
        ("[true]", "element 0 is True"),
        ("[" * 100_000, "neither integers, nor a JSON list"),
        ('{"size": 3}', "element 0 has no field 'length'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_lengths(path)


def test_no_file(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read"):
        read_lengths(tmp_path / "none")
