from __future__ import annotations

from typing import Any

import pytest

from odc.bench.tables import crossovers, line_of, show


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
    assert "COPY_ENGINE_BYTES" in text


def test_there_is_none_without_a_device() -> None:
    assert crossovers([row("get", 1.0, 1.0) | {"device_seconds": None, "device": "cpu"}]) == ""


def test_what_was_left_out_and_what_failed_end_the_text() -> None:
    result = {"machine": {"cores": 2}, "versions": {}, "rows": [], "left_out": ["put"], "failed": ["get: OSError"]}
    assert show(result).splitlines()[-2:] == ["left out: put", "FAILED: get: OSError"]
