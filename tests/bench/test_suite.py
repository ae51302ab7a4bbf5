"""The suite runs whole, on real ranks; no figure is asserted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from odc.bench import heaps
from odc.bench import suite as module
from odc.bench.parts import Effort
from odc.bench.ranks import alone
from odc.bench.rounds import Action
from odc.bench.suite import fitting_ranks, parts_of, run
from odc.bench.tables import compare, show, text_of
from odc.errors import ConfigError
from odc.memory import FreeMemory

ONCE = Effort(nbytes=0, least=1, most=1, warm=0)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    lines: list[str] = []
    found = run([part for part in parts_of("cpu") if part != "planners"], [2], [64 << 10], "cpu", ONCE, lines.append)
    assert [line for line in lines if line[0] != " "] == [
        f"{part}, 2 ranks" + ("" if part in ("signal", "host") else ", 64 KiB")
        for part in parts_of("cpu")
        if part != "planners"
    ]
    assert [line.split(":")[0].strip() for line in lines if line[0] == " "] == [row["what"] for row in found["rows"]]
    return found


def test_every_part_has_rows_with_baselines(result: dict[str, Any]) -> None:
    assert {row["part"] for row in result["rows"]} == {*parts_of("cpu")} - {"planners"}
    for row in result["rows"]:
        assert row["rivals"], row["what"]
        assert all(one["median"] > 0 for one in (row["seconds"], *row["rivals"].values())), row["what"]
    assert not result["left_out"] and not result["failed"]


def test_bytes_are_those_that_moved(result: dict[str, Any]) -> None:
    moved = {row["what"]: row["nbytes"] for row in result["rows"] if row["nbytes"]}
    assert moved["get"] == moved["put"] == moved["accumulate"] == 64 << 10
    # A unit of seven matrices and two vectors cannot be any size.
    assert all(0.85 * (64 << 10) <= moved[name] <= 64 << 10 for name in ("unit gather", "push of a unit", "publish"))
    assert moved["exchange"] == 64 << 10
    assert moved["begin (publishes)"] == moved["unit gather"] // 2


def test_facts_and_table(result: dict[str, Any]) -> None:
    assert result["schema"] == "odc-bench-1"
    assert result["versions"].keys() >= {"python", "torch", "numpy"}
    assert result.keys() >= {"commit", "date"} and result["load_1min"].keys() == {"begin", "end"}
    text = show(result)
    for row in result["rows"]:
        assert f"| {row['what']} " in text
    assert "gloo all_gather" in text and "FSDP2 on gloo" in text
    assert "% of memcpy" in text and "device" not in text


def test_it_compares_with_itself(result: dict[str, Any]) -> None:
    text = compare(result, result)
    assert "slower" not in text and "faster" not in text
    assert len([line for line in text.splitlines() if line[:1] == "|"]) == 2 + len(result["rows"])


@pytest.mark.thorough
def test_what_does_not_fit_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_memory", lambda: FreeMemory(8 << 20, "a test"))
    found = run(["get"], [2], [64 << 10, 1 << 20], "cpu", ONCE)
    assert [row["size"] for row in found["rows"]] == [64 << 10]
    assert found["left_out"] == ["get, 2 ranks, 1 MiB: needs about 12 MiB, 8 MiB are free"]


def fails(nbytes: int, device: str) -> list[Action]:
    raise OSError("no such luck")


@pytest.mark.thorough
def test_a_case_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "put", fails)
    found = run(["get", "put", "signal"], [2], [64 << 10], "cpu", ONCE)
    assert {row["part"] for row in found["rows"]} == {"get", "signal"}
    (failed,) = found["failed"]
    assert failed.startswith("put, 2 ranks, 64 KiB: OSError: no such luck")
    assert f"FAILED: {failed}" in show(found)


@pytest.mark.thorough
def test_where_all_fails_not_all_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps, "put", fails)
    found = run(["put"], [2], [4096 * count for count in range(1, 6)], "cpu", ONCE)
    assert len(found["failed"]) == 3 and not found["rows"]
    assert found["left_out"] == ["2 cases with 2 ranks: too many others failed"]


@pytest.mark.thorough
def test_on_a_device_every_world_has_a_fresh_process() -> None:
    """What it takes on a device, on the CPU: arguments and results pass between processes."""
    found, left = alone(module._measured, 2, [("signal", 64)], "cpu", ONCE, str)
    assert [row["what"] for row in found.rows] == ["signal there and back"] and not left


def test_planners_need_no_ranks() -> None:
    found = run(["planners"], [2], [], "cpu", replace(ONCE, planned=(64,)))
    assert [row["what"] for row in found["rows"]] == [
        "partition, 64 samples",
        "lb_micro, 64 samples",
        "lb_mini, 64 samples",
    ]
    assert {row["ranks"] for row in found["rows"]} == {8}


def test_an_unknown_part_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="only: gett is none of get, put"):
        run(["get", "gett"], [2], [4096], "cpu")


def test_rounds_are_bounded() -> None:
    effort = Effort(nbytes=100, least=2, most=10)
    assert [effort.rounds(nbytes) for nbytes in (0, 1, 25, 1000)] == [10, 10, 4, 2]
    assert replace(effort, nbytes=0).rounds(64) == 2


def test_worlds_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, worlds in ((1, [2]), (2, [2]), (4, [2, 4]), (64, [2, 4, 8])):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert fitting_ranks("cpu") == worlds
    for devices, worlds in ((1, [2, 4]), (2, [2]), (8, [2, 4, 8])):
        monkeypatch.setattr(module.torch.cuda, "device_count", lambda devices=devices: devices)
        assert fitting_ranks("cuda") == worlds


def test_sizes_as_text() -> None:
    assert [text_of(size) for size in (4096, 64 << 10, 1 << 20, 256 << 20)] == ["4 KiB", "64 KiB", "1 MiB", "256 MiB"]


def test_a_part_may_be_of_one_device_only() -> None:
    with pytest.raises(ConfigError, match="add needs a CUDA device"):
        run(["add"], [2], [4096], "cpu")
    with pytest.raises(ConfigError, match="planners is measured on the CPU"):
        run(["planners"], [2], [4096], "cuda")
    assert "exchange" in parts_of("cpu") and "exchange" not in parts_of("cuda")
