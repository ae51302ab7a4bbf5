from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odc.bench.tables import compare, crossovers, line_of, load, show
from odc.errors import ConfigError


def around(middle: float) -> dict[str, float]:
    return {"median": middle, "min": middle * 0.9, "max": middle * 1.1}


def row(what: str, waited: float, own: float, size: int = 16 << 20, ranks: int = 2) -> dict[str, Any]:
    """On a device, whose copies take 1 ms, 0.5 ms of them on the device."""
    return {
        "part": "get",
        "what": what,
        "device": "cuda",
        "ranks": ranks,
        "size": size,
        "nbytes": size,
        "rounds": 3,
        "seconds": around(waited),
        "device_seconds": around(own),
        "limit": "device copy",
        "rivals": {"device copy": around(1e-3), "gloo all_gather (via host)": around(1.0)},
        "device_rivals": {"device copy": around(0.5e-3)},
    }


def test_ratios_are_of_the_device_where_both_were_timed_there() -> None:
    line = line_of(row("get", 2e-3, 0.625e-3))
    assert line["of limit"] == "80% of device copy"
    assert line["times as fast as"] == "gloo all_gather (via host) 500"
    assert (line["ms"], line["device ms"]) == (2.0, 0.625)
    assert line["GB/s"] == pytest.approx((16 << 20) / 0.625e-3 / 1e9)


def test_a_row_that_waits_for_the_device_has_the_time_of_waiting_alone() -> None:
    waits = row("publish", 2e-3, 1.0) | {"device_seconds": None, "device_rivals": {}}
    line = line_of(waits)
    assert line["of limit"] == "50% of device copy" and line["device ms"] == ""


WAYS = ("cuMemcpyAsync", "torch's kernel", "Triton kernel")


def gets(ranks: int, took: dict[int, tuple[float, float, float]]) -> list[dict[str, Any]]:
    return [
        row(f"get, {way}", 9.0, seconds, size << 20, ranks)
        for size, each in took.items()
        for way, seconds in zip(WAYS, each, strict=True)
    ]


def test_the_crossover_is_where_the_copy_engine_stays_ahead() -> None:
    took = {1: (1.0, 2.0, 2.0), 16: (3.0, 1.0, 4.0), 64: (1.0, 2.0, 1.0), 256: (1.0, 3.0, 2.0)}
    text = crossovers([row("get", 1.0, 1.0), *gets(2, took), *gets(4, {1: (3.0, 2.0, 4.0)})])
    assert "2 ranks: cuMemcpyAsync is as fast as the better kernel from 64 MiB on." in text
    assert "4 ranks: cuMemcpyAsync is as fast as the better kernel never, up to 1 MiB." in text
    assert "odc takes it from 1 MiB on, or from Settings(copy_engine_bytes=...) on." in text


def test_there_is_none_without_a_device() -> None:
    assert crossovers([row("get", 1.0, 1.0) | {"device_seconds": None, "device": "cpu"}]) == ""


def test_what_was_left_out_and_what_failed_end_the_text() -> None:
    result = {"machine": {"cores": 2}, "versions": {}, "rows": [], "left_out": ["put"], "failed": ["get: OSError"]}
    assert show(result).splitlines()[-2:] == ["left out: put", "FAILED: get: OSError"]
    busy = {**result, "machine": {"cores": 2}, "load_1min": {"begin": 5.0, "end": 0.0}}
    assert "busy" not in show(result) and "The machine was busy: its load was 5.0, on 2 cores" in show(busy)


def on_cpu(what: str, took: float, baseline: float, size: int | None = 1 << 20) -> dict[str, Any]:
    return {
        "part": what,
        "what": what,
        "device": "cpu",
        "ranks": 2,
        "size": size,
        "nbytes": size or 0,
        "rounds": 3,
        "seconds": around(took),
        "rivals": {"memcpy": around(baseline)},
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


def test_a_slower_machine_is_not_slower_code() -> None:
    """Everything takes twice as long, but `put` takes twice as long again against its baseline."""
    before = saved(on_cpu("get", 1e-3, 1e-3), on_cpu("put", 1e-3, 1e-3))
    after = saved(on_cpu("get", 2e-3, 2e-3), on_cpu("put", 4e-3, 2e-3))
    text = compare(before, after)
    get, put = cells(text, "get"), cells(text, "put")
    assert (get["b/a"], get["b/a against baseline"], get["beyond noise"]) == ("2", "1", "slower")
    assert (put["b/a"], put["b/a against baseline"]) == ("4", "2")


@pytest.mark.parametrize(("factor", "verdict"), [(1.05, "no"), (0.95, "no"), (1.3, "slower"), (0.7, "faster")])
def test_a_difference_within_the_ranges_is_noise(factor: float, verdict: str) -> None:
    text = compare(saved(on_cpu("get", 1.0, 1.0)), saved(on_cpu("get", factor, 1.0)))
    assert cells(text, "get")["beyond noise"] == verdict


def test_times_of_a_device_are_compared_where_both_have_them() -> None:
    own = {"device_seconds": {"median": 2e-3, "min": 2e-3, "max": 2e-3}, "device_rivals": {}}
    a, b = on_cpu("get", 1.0, 1.0) | own, on_cpu("get", 9.0, 1.0) | own
    assert cells(compare(saved(a), saved(b)), "get")["b/a"] == "1"
    assert cells(compare(saved(a), saved(on_cpu("get", 9.0, 1.0))), "get")["b/a"] == "9", "of an older file"


def test_what_else_differs_is_named_and_a_load_is_not() -> None:
    text = compare(saved(on_cpu("get", 1.0, 1.0)), saved(on_cpu("get", 1.0, 1.0), cores=16))
    assert "cores: 2 in a, 16 in b" in text
    assert "load" not in text


def test_rows_of_one_run_alone_are_counted() -> None:
    text = compare(saved(on_cpu("get", 1.0, 1.0), on_cpu("put", 1.0, 1.0)), saved(on_cpu("get", 1.0, 1.0)))
    assert "only in a: 1 rows" in text
    assert "only in b" not in text


def test_another_size_is_another_row() -> None:
    with pytest.raises(ConfigError, match="no row in common"):
        compare(saved(on_cpu("get", 1.0, 1.0)), saved(on_cpu("get", 1.0, 1.0, size=1 << 16)))


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema": "odc-compare-1"}'])
def test_other_files_are_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"compare: .*other\.json"):
        load(path)
    path.write_text(json.dumps(saved()))
    assert load(path) == saved()
