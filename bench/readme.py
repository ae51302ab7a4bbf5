"""Writes the README's section of figures from what the benchmarks stored: `python -m bench.readme`.

Chose to generate it over typing it in: a figure in the README then is the figure that was measured, and a test says so.
What the figures mean is text here, and has to be read again when they change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odc.bench.report import table
from odc.train.table import between_passes

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- measured:begin (made by `python -m bench.readme`) -->", "<!-- measured:end -->"


def section(results: Path = RESULTS) -> str:
    """The text between the marks, marks included."""
    demo, fetch, push, overlap = (_load(results, name) for name in ("demo", "fetch", "push", "overlap"))
    emulated = [_emulated(_load(results, f"emulated_{name}")) for name in ("longalign", "swe_smith")]
    parts = [_BEGIN, _where(demo), _demo(demo), _EMULATED, *emulated, _verbs(fetch, push), _overlap(overlap), _END]
    return "\n\n".join(parts)


def replaced(text: str) -> str:
    """The README with its section made anew."""
    pattern = re.compile(r"<!-- measured:begin.*?<!-- measured:end -->", re.DOTALL)
    if not pattern.search(text):
        raise ValueError("the README has no section of figures")
    return pattern.sub(lambda _: section(), text)


def _load(results: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def _where(demo: dict[str, Any]) -> str:
    machine, versions = demo["machine"], demo["versions"]
    return (
        f"*{machine['processor']}, {machine['cores']} cores, torch {versions['torch']}, CPU ranks on one host: read "
        "ratios, not speeds.*"
    )


def _demo(demo: dict[str, Any]) -> str:
    arms = demo["arms"]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("tokens/s", lambda arm: f"{arm['total']['tokens_per_s']:,.0f}"),
        ("step, s (median)", lambda arm: f"{arm['step_s']['median']:.2f}"),
        ("bubble, measured", lambda arm: f"{arm['bubble']['median']:.1%}"),
        ("bubble, bound for any plan", lambda arm: f"{arm['plan']['bound']:.1%}"),
        ("memory between microbatches, MiB", between_passes),
        ("largest loss gap to fsdp2", lambda arm: f"{arm['loss']['largest_difference']:.0e}".replace("0e+00", "0")),
    ]
    lines = [{"": name, **{arm: cell(figures) for arm, figures in arms.items()}} for name, cell in rows]
    steps = demo["job"]["steps"] - demo["skipped_steps"]
    head = (
        f"**The demo, measured**: {demo['job']['ranks']} ranks, {steps} steps, each the median of {demo['repeats']} "
        "interleaved runs (`odc compare --demo --repeats 5`):"
    )
    return f"{head}\n\n{table(lines)}"


_EMULATED = (
    "**Eight ranks, emulated**: compute is slept, communication is real. The first row is LB-Micro as published, with "
    "equal samples a rank; ours balances sample counts too. The bound is what no plan can beat, whatever the transport."
    " Steps differ, so figures are means over all of them; the pictures in `bench/results` show two steps, and medians."
)


def _emulated(emulated: dict[str, Any]) -> str:
    lines = [
        {
            "arm": row["arm"],
            "step, s (mean)": f"{row['step_s']:.1f}",
            "speed-up": f"{row['speed-up']:.2f}",
            "bubble": f"{row['bubble']:.0%}",
            "bound / step": f"{row['bound / step']:.2f}",
        }
        for row in emulated["rows"]
    ]
    head = (
        f"Lengths: {emulated['lengths']} (`{emulated['command']}`). On a control with nothing to balance, `fsdp2` "
        f"takes {emulated['control'][-1]['fsdp2/odc']:.2f} times as long as `odc`:"
    )
    return f"{head}\n\n{table(lines)}"


def _verbs(fetch: dict[str, Any], push: dict[str, Any]) -> str:
    sizes = (1, 4, 16, 64)

    def fetched(figure: Callable[[dict[str, Any]], float], pages: str) -> list[str]:
        wanted = {"dtype": "float32", "parameters": 9, "pages": pages}
        return [f"{figure(_find(fetch, unit_MiB=size, **wanted)):.2f}" for size in sizes]

    def pushed(mode: str) -> list[str]:
        return [f"{_find(push, accumulate=mode, chunk_MiB=s, dtype='float32')['ratio']:.2f}" for s in sizes]

    cells = [
        ("`unshard()` of 9 parameters, share of memcpy's speed", *fetched(lambda r: r["ratio"], "kept")),
        ("the same where every page is fresh", *fetched(lambda r: r["ratio"], "fresh")),
        ("its bookkeeping alone, ms", *fetched(lambda r: r["bookkeeping_ms"], "kept")),
        ("under FSDP2 with gloo: times as slow", *fetched(lambda r: r["gloo_ms"] / r["fetch_ms"], "kept")),
        ("push until the server has added it, share of a local `add_`", *pushed("server")),
        ('push with `accumulate="direct"`, share of a local `add_`', *pushed("direct")),
    ]
    lines = [dict(zip(("", *(f"{size} MiB" for size in sizes)), row, strict=True)) for row in cells]
    head = (
        "**Fetch and push, measured** (`make bench`; fp32, all rows and commands in `bench/results`). A fetch copies "
        "at memcpy's speed; what small units lose is the bookkeeping for each parameter, most of it torch's own, which "
        "FSDP2 pays too:"
    )
    return f"{head}\n\n{table(lines)}"


def _overlap(overlap: dict[str, Any]) -> str:
    def gain(compute: str, prefetch: int, push_overlap: bool) -> str:
        row = _find(overlap, compute=compute, prefetch=prefetch, push_overlap=push_overlap)
        return f"{row['ratio'] - 1:+.0%}"

    both, ahead, behind = gain("emulated", 1, True), gain("emulated", 1, False), gain("emulated", 0, True)
    return (
        "**Overlap** (`bench/bench_overlap.py`, 2 ranks): fetching one unit ahead and pushing behind backward are on "
        f"by default. Where cores are free (compute *emulated*) both together change the speed by {both}, fetching "
        f"ahead alone by {ahead}, pushing behind backward alone by {behind}. Where training keeps every core busy "
        f"(*measured*) it is {gain('real', 1, True)}: set `Settings(prefetch=0, push_overlap=False)` there."
    )


def _find(result: dict[str, Any], **wanted: object) -> dict[str, Any]:
    found: list[dict[str, Any]] = [r for r in result["rows"] if all(r[key] == value for key, value in wanted.items())]
    (row,) = found
    return row


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the figures of {RESULTS.name} into {README.name}")
