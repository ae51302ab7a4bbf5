from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odc.bench import compare, load
from odc.errors import ConfigError


def row(what: str, took: float, rival: float, size: int | None = 1 << 20) -> dict[str, Any]:
    def around(middle: float) -> dict[str, float]:
        return {"median": middle, "min": middle * 0.9, "max": middle * 1.1}

    return {
        "part": what,
        "what": what,
        "device": "cpu",
        "ranks": 2,
        "size": size,
        "nbytes": size or 0,
        "rounds": 3,
        "seconds": around(took),
        "rivals": {"memcpy": around(rival)},
    }


def saved(*rows: dict[str, Any], cores: int = 2) -> dict[str, Any]:
    return {
        "schema": "odc-bench-1",
        "command": "odc bench",
        "date": "2026-01-01",
        "machine": {"cores": cores},
        "load_1min": {"begin": cores / 7, "end": cores / 8},
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
        "left_out": [],
        "rows": list(rows),
    }


def cells(text: str, what: str) -> dict[str, str]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    (found,) = [line for line in lines if line[0] == what]
    return dict(zip(lines[0], found, strict=True))


def test_a_slower_machine_is_told_from_slower_code() -> None:
    """Everything takes twice as long, but `put` takes twice as long again against its rival."""
    before = saved(row("get", 1e-3, 1e-3), row("put", 1e-3, 1e-3))
    after = saved(row("get", 2e-3, 2e-3), row("put", 4e-3, 2e-3))
    text = compare(before, after)
    get, put = cells(text, "get"), cells(text, "put")
    assert (get["b/a"], get["b/a against rival"], get["beyond noise"]) == ("2", "1", "slower")
    assert (put["b/a"], put["b/a against rival"]) == ("4", "2")


@pytest.mark.parametrize(("factor", "said"), [(1.05, "no"), (0.95, "no"), (1.3, "slower"), (0.7, "faster")])
def test_a_difference_within_the_ranges_is_noise(factor: float, said: str) -> None:
    text = compare(saved(row("get", 1.0, 1.0)), saved(row("get", factor, 1.0)))
    assert cells(text, "get")["beyond noise"] == said


def test_times_of_a_device_are_compared_where_both_have_them() -> None:
    own = {"device_seconds": {"median": 2e-3, "min": 2e-3, "max": 2e-3}, "device_rivals": {}}
    a, b = row("get", 1.0, 1.0) | own, row("get", 9.0, 1.0) | own
    assert cells(compare(saved(a), saved(b)), "get")["b/a"] == "1"
    assert cells(compare(saved(a), saved(row("get", 9.0, 1.0))), "get")["b/a"] == "9", "of an older file"


def test_what_else_differs_is_said_and_a_load_is_not() -> None:
    text = compare(saved(row("get", 1.0, 1.0)), saved(row("get", 1.0, 1.0), cores=16))
    assert "cores: 2 in a, 16 in b" in text
    assert "load" not in text


def test_rows_of_one_run_alone_are_counted() -> None:
    text = compare(saved(row("get", 1.0, 1.0), row("put", 1.0, 1.0)), saved(row("get", 1.0, 1.0)))
    assert "only in a: 1 rows" in text
    assert "only in b" not in text


def test_another_size_is_another_row() -> None:
    with pytest.raises(ConfigError, match="no row in common"):
        compare(saved(row("get", 1.0, 1.0)), saved(row("get", 1.0, 1.0, size=1 << 16)))


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema": "odc-compare-1"}'])
def test_other_files_are_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"compare: .*other\.json"):
        load(path)
    path.write_text(json.dumps(saved()))
    assert load(path) == saved()
