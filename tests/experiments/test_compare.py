"""Comparisons without ranks: their config, and figures of runs whose every nanosecond is known."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_job import tiny_job

from odc.arms import ARM_NAMES
from odc.errors import ConfigError, OdcError, TraceError
from odc.experiments.compare import (
    CompareConfig,
    measure,
    refuse_skipped,
    spans_folder,
    typical_windows,
    write_pictures,
)
from odc.experiments.config import DEFAULT_ARMS
from odc.experiments.preflight import new_file
from odc.experiments.report import report, write_report
from odc.experiments.results import ArmRun, JobResult, SkippedStep
from odc.experiments.table import table, tables
from odc.experiments.text.step import TextStep, TextWorkload
from odc.trace import (
    COLLECTIVE,
    COMPUTE,
    FETCH,
    MICROBATCH,
    OPTIMIZER,
    WINDOW,
    Breakdown,
    EpochBreakdown,
    Span,
    save_spans,
)

MS = 1_000_000


def job(tmp_path: Path, **changes: object) -> TextWorkload:
    return TextWorkload(tiny_job(tmp_path, output=str(tmp_path / "out"), **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ("odc", "zero")}, "arms must be different ones of"),
        ({"arms": ("odc", "odc")}, "arms must be different ones of"),
        ({"arms": ()}, "arms must be different ones of"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"skip": 3}, "skip must leave a step to measure: it is 3, steps is 3"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompareConfig(job(tmp_path), **change)


def test_a_comparison_needs_a_folder_and_has_defaults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs an output folder"):
        CompareConfig(TextWorkload(tiny_job(tmp_path)))
    with pytest.raises(ConfigError, match="neither resumes, exports nor saves"):
        CompareConfig(job(tmp_path, save_every=1))
    assert CompareConfig(job(tmp_path)).arms == ("fsdp2", "fsdp2-resident", "odc-equal", "odc")
    assert CompareConfig(job(tmp_path), arms=("odc", "fsdp2")).reference == "fsdp2"
    assert CompareConfig(job(tmp_path), arms=("odc", "odc-equal")).reference == "odc"


def spans_of(compute_ms: Sequence[int], gather_ms: int = 0) -> list[Span]:
    """One rank's spans: step k computes for `compute_ms[k]`, gathers inside, its minibatch ends after 100 ms; then the
    optimizer runs for 10 ms.
    """
    spans = []
    for step, milliseconds in enumerate(compute_ms, start=1):
        at = step * 1000 * MS
        if gather_ms:
            spans.append(Span(FETCH, "main", at, at + gather_ms * MS, step, 0, "unit", COLLECTIVE, 8))
        spans.append(Span(MICROBATCH, "main", at, at + milliseconds * MS, step, 0))
        spans.append(Span(WINDOW, "main", at, at + 100 * MS, step))
        spans.append(Span(OPTIMIZER, "main", at + 100 * MS, at + 110 * MS, step))
    return spans


def result(rank: int, losses: Sequence[float]) -> JobResult[TextStep]:
    steps = [
        TextStep(
            step=number,
            loss=loss,
            norm=1.0,
            lr=0.1,
            samples=4,
            tokens=110 * number,
            label_tokens=100 * number,
            counts=[1, 2],
            dummies=0,
            step_s=0.11,
            plan_bubble=0.25,
            bound_bubble=0.125,
        )
        for number, loss in enumerate(losses, start=1)
    ]
    return JobResult(
        rank, steps, peak_bytes=(300 + rank) << 20, held_bytes=(120 - rank) << 20, baseline_bytes=100 << 20
    )


def run_of(computes: Sequence[Sequence[int]], losses: Sequence[float], steal: float | None = None) -> ArmRun:
    measured = measure({rank: spans_of(own) for rank, own in enumerate(computes)}, 1, len(computes[0]))
    return ArmRun([result(rank, losses) for rank in range(len(computes))], measured, steal)


@pytest.fixture
def figures(tmp_path: Path) -> dict:
    config = CompareConfig(job(tmp_path), arms=("fsdp2", "odc"), repeats=3)
    slow = [run_of([[99, 60, extra], [99, 100, 100]], [3.0, 2.5, 2.0]) for extra in (20, 80, 60)]
    fast = [
        run_of([[99, 100, 100], [99, 100, 100]], [3.0, 2.5 + gap, 2.0], steal)
        for gap, steal in ((0.0, 0.5), (-1e-6, 0.01), (0.0, 0.02))
    ]
    return report(config, {"fsdp2": slow, "odc": fast}, ["odc", "compare"])


def test_figures_are_medians_over_repeats_then_over_steps(figures: dict) -> None:
    fsdp2, odc = figures["arms"]["fsdp2"], figures["arms"]["odc"]
    assert fsdp2["step_s"] == pytest.approx({"median": 0.11, "min": 0.11, "max": 0.11})
    # Steps 2 and 3 count; in both one rank computes 60 ms in the median repeat, the other 100: busy is 70 and 110 ms.
    assert fsdp2["bubble"]["median"] == pytest.approx(1 - (70 + 110) / 2 / 110)
    assert fsdp2["bubble"]["min"] == pytest.approx(fsdp2["bubble"]["max"])
    assert odc["bubble"]["median"] == pytest.approx(0.0)
    assert fsdp2["breakdown"]["compute"]["median"] == pytest.approx(0.08)
    assert fsdp2["breakdown"]["optimizer"]["median"] == pytest.approx(0.01)
    assert [run["bubble"][1] for run in fsdp2["runs"]] == pytest.approx(
        [1 - (30 + 110) / 220, 1 - 200 / 220, 1 - 180 / 220]
    )


def test_speed_losses_memory_and_plan_are_there(figures: dict) -> None:
    odc = figures["arms"]["odc"]
    assert odc["tokens_per_s"] == pytest.approx({"median": 2500.0, "min": 2000.0, "max": 3000.0})
    assert odc["total"] == pytest.approx({"seconds": 0.22, "samples_per_s": 8 / 0.22, "tokens_per_s": 550 / 0.22})
    assert odc["loss"]["final"] == 2.0
    assert odc["loss"]["largest_difference"] == pytest.approx(1e-6)
    assert figures["arms"]["fsdp2"]["loss"]["largest_difference"] == 0.0
    assert (odc["peak_bytes"], odc["held_bytes"], odc["baseline_bytes"]) == (301 << 20, 120 << 20, 100 << 20)
    assert odc["plan"] == {
        "bubble": 0.25,
        "bound": 0.125,
        "microbatches": [[1, 2], [1, 2]],
        "pieces": [0, 0],
        "dummies": 0,
    }
    assert (odc["steal"], figures["arms"]["fsdp2"]["steal"]) == (0.02, None), "median over repeats; not known"
    assert {"machine", "versions", "seed", "command", "job", "schema"} <= figures.keys()


def test_the_json_comes_back_and_every_key_is_documented(figures: dict, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_report(path, figures)
    assert json.loads(path.read_text()) == figures
    documented = set(re.findall(r"`([a-z_.<>]+)`", (Path(__file__).parents[2] / "docs" / "compare.md").read_text()))
    named = {part for entry in documented for part in entry.split(".")}
    assert figures.keys() | figures["arms"]["odc"].keys() <= named


def test_a_device_stays_a_device(figures: dict, tmp_path: Path) -> None:
    """--json /dev/stdout, or /dev/null: as root a rename would replace it."""
    redirected, folder = tmp_path / "out.json", tmp_path / "dev"
    redirected.touch()
    folder.mkdir()
    for name, target in (("null", "/dev/null"), ("stdout", redirected)):
        (folder / name).symlink_to(target)
        new_file(folder / name, "json")
        write_report(folder / name, figures)
        assert (folder / name).is_symlink()
    assert json.loads(redirected.read_text()) == figures and len(list(folder.iterdir())) == 2


def test_what_is_no_number_in_json_is_null(figures: dict, tmp_path: Path) -> None:
    write_report(tmp_path / "figures.json", figures | {"seed": float("nan")})
    assert json.loads((tmp_path / "figures.json").read_text()) == figures | {"seed": None}


def shown(*tables: Any) -> str:
    """What a terminal of 80 columns shows of them, with no cell cut."""
    console, text = pytest.importorskip("rich.console", reason="needs the cli extra"), io.StringIO()
    for one in tables:
        console.Console(file=text, width=80).print(one)
    assert "…" not in text.getvalue()
    return text.getvalue()


def test_the_table_fits_80_columns(figures: dict) -> None:
    figures["arms"] = dict.fromkeys(DEFAULT_ARMS, figures["arms"]["odc"]) | {"fsdp2": figures["arms"]["fsdp2"]}
    text = shown(table(figures))
    assert re.search(r"bubble, measured +18.2% +0.0% +0.0% +0.0%", text)
    assert re.search(r"peak memory, MiB +201 +201", text)
    assert re.search(r"between passes +20 +20", text)
    assert re.search(r"steal by the host +- +2.0% +2.0%", text)
    assert "each the median of 3 runs" in " ".join(text.split())
    figures["arms"]["odc-dynamic"] = figures["arms"]["odc"]
    figures["job"] |= {"slow": "1:1.5,0:2", "device": "cuda"}
    stated = " ".join(shown(table(figures)).split())
    for text in ("odc-dynamic", "fp32, on CUDA", "wait ends when the last rank's stream comes to the collective"):
        assert text in stated
    assert "rank 1 slowed 1.5x and rank 0 slowed 2x (emulated: it sleeps after every microbatch)" in stated


@pytest.mark.parametrize(("load", "stated"), [(0.9, False), (1.0, True), (7.25, True)])
def test_a_busy_machine_is_named_beside_the_table(figures: dict, load: float, stated: bool) -> None:
    figures |= {"machine": {"cores": 2}, "load_1min": {"begin": load, "end": 9.0}}
    text = " ".join(shown(*tables(figures, 80)).split())
    assert (f"The machine was busy: its load was {load:.1f}, on 2 cores" in text) == stated


def test_many_arms_are_spread_over_tables_that_fit(figures: dict) -> None:
    figures["arms"] = dict.fromkeys(ARM_NAMES, figures["arms"]["odc"])
    text = shown(*tables(figures, 80))
    assert max(map(len, text.splitlines())) <= 80
    headings = " ".join(re.findall("^ +(?:fsdp2|odc).*$", text, re.MULTILINE))
    assert headings.split() == list(ARM_NAMES)
    assert text.count("Medians over") == 1 and text.count("final loss") > 1
    assert len(tables(figures, 300)) == 1


def test_pictures_and_traces_are_written_from_the_ranks_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    config = CompareConfig(job(tmp_path), arms=("fsdp2", "odc"))
    for arm in config.arms:
        for rank in range(2):
            spans = spans_of([90, 90, 90], gather_ms=10 + 10 * rank if arm == "fsdp2" else 0)
            save_spans(spans_folder(config, arm, 0) / f"rank-{rank}.jsonl", spans)
    run = run_of([[90, 90, 90], [90, 90, 90]], [3.0, 2.5, 2.0])
    written = write_pictures(config, {"fsdp2": [run], "odc": [run]})
    assert list(written) == ["timeline", "trace fsdp2", "trace odc"]
    assert written["timeline"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(gzip.decompress(written["trace fsdp2"].read_bytes()))["traceEvents"]
    assert {event.get("cat") for event in events} >= {"fetch", "optimizer"}


def test_the_windows_drawn_are_the_most_typical_of_all_repeats() -> None:
    def lasting(*seconds: float) -> ArmRun:
        steps = [
            EpochBreakdown(epoch, 0, int(step_s * 1000) * MS, {0: {COMPUTE: 0, OPTIMIZER: 0}})
            for epoch, step_s in enumerate(seconds, start=2)
        ]
        return ArmRun([], Breakdown(tuple(steps), (0,)))

    # Medians over windows and repeats: 3 s and 2 s, which only windows 3 and 4 of the second repeat have in both arms.
    slow = [lasting(9.0, 9.0, 9.0, 9.0), lasting(3.0, 3.0, 3.0, 3.0), lasting(3.0, 3.0, 3.0, 3.0)]
    fast = [lasting(2.0, 2.0, 2.0, 2.0), lasting(9.0, 2.0, 2.0, 9.0), lasting(1.0, 2.0, 1.0, 2.0)]
    assert typical_windows({"fsdp2": slow, "odc": fast}, 2) == (1, [3, 4])
    assert typical_windows({"odc": fast}, 1) == (0, [2])
    assert typical_windows({"fsdp2": [lasting(1.0)]}, 2) == (0, [2])


def test_waiting_inside_collectives_is_separated() -> None:
    early = Span(FETCH, "main", 1000 * MS, 1050 * MS, 1, 0, "unit", COLLECTIVE, 8)
    late = early._replace(start_ns=1040 * MS)
    rest = spans_of([90])
    (step,) = measure({0: [early, *rest], 1: [late, *rest]}, 0, 1).steps
    assert (step.nanoseconds[0]["wait"], step.nanoseconds[0]["fetch"]) == (40 * MS, 10 * MS)
    assert step.nanoseconds[1]["wait"] == 0


def test_a_step_that_was_not_recorded_whole_is_an_error() -> None:
    spans = {rank: spans_of([40, 50, 60]) for rank in range(2)}
    assert len(measure(spans, 1, 3).steps) == 2
    spans[1] = [span for span in spans[1] if span.epoch != 2 or span.category != WINDOW]
    with pytest.raises(TraceError, match="1 of 3 steps cannot be measured: .* newest 200,000 spans"):
        measure(spans, 1, 3)


def test_a_skipped_step_ends_a_comparison() -> None:
    whole = JobResult(rank=0, steps=[], peak_bytes=0, held_bytes=None, baseline_bytes=0)
    refuse_skipped("odc", [whole])
    lacking = replace(whole, skipped=[SkippedStep(3, "rank 1: out of memory in a microbatch of 4096 tokens")])
    with pytest.raises(OdcError, match=r"arm odc skipped step 3 \(rank 1: out of memory .*--max-tokens"):
        refuse_skipped("odc", [lacking, lacking])


def test_a_job_without_a_step_says_what_steps_counts() -> None:
    resumed = JobResult(rank=0, steps=[], peak_bytes=0, held_bytes=None, baseline_bytes=0)
    assert resumed.summary() == "no step was left to do: --steps counts those before the checkpoint, too"
