"""Writes the figures of the README and of docs/ from what the benchmarks stored: `python -m bench.readme`.

A figure in the README is the figure that was measured, and a test compares them. What the figures mean is text here,
and has to be read again when they change. The pages of docs/ have theirs in `bench.pages`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import pages
from bench.quoted import RESULTS, busy, find, load, prose
from odc.bench.report import table
from odc.experiments.table import between_passes

README = Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- measured:begin (made by `python -m bench.readme`) -->", "<!-- measured:end -->"


def section(results: Path = RESULTS) -> str:
    """The text between the marks, marks included."""
    demo, fetch, push, overlap, order = (load(name, results) for name in ("demo", "fetch", "push", "overlap", "order"))
    emulated = {name: load(f"emulated_{name}", results) for name in ("longalign", "swe_smith")}
    ranks = {"demo": demo["job"]["ranks"], "emulated_longalign": 8, "emulated_swe_smith": 8}
    ranks |= dict.fromkeys(("fetch", "push", "overlap", "order"), 2)
    parts = [
        _BEGIN,
        _where(demo),
        _demo(demo),
        _EMULATED,
        *map(_emulated, emulated.values()),
        _resident(demo, emulated),
    ]
    parts += [_verbs(fetch, push), _overlap(overlap), _order(order), _loads(results, ranks), _END]
    return "\n\n".join(part for part in parts if part)


def replaced(text: str) -> str:
    """The README with its section made anew."""
    pattern = re.compile(r"<!-- measured:begin.*?<!-- measured:end -->", re.DOTALL)
    if not pattern.search(text):
        raise ValueError("the README has no section of figures")
    return pattern.sub(lambda _: section(), text)


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
        ("bubble, bound for any plan (predicted)", lambda arm: f"{arm['plan']['bound']:.1%}"),
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


_EMULATED = prose(
    "**Eight ranks, emulated.** These are results about scheduling. The model is four units of 64 KiB; their "
    "communication runs for real, but compute is slept, and the sleep is scaled up until communication hardly shows in "
    "a step. They show what balancing and barriers do and nothing about how fast bytes move. The first row plans under "
    "LB-Micro's published constraint, equal samples a rank, with our planner; the second may give ranks unequal "
    "numbers of samples, too. The bound is what no plan can beat, whatever the transport. Steps differ, so figures are "
    "means over all of them; the pictures in `bench/results` show two steps, and medians."
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


def _resident(demo: dict[str, Any], emulated: dict[str, dict[str, Any]]) -> str:
    """A remark on results that were taken before the resident arm was improved, and before commits were stored."""
    old = ["the demo"] if "commit" not in demo else []
    old += [f"`emulated_{name}`" for name, result in emulated.items() if "commit" not in result]
    if not old:
        return ""
    return prose(
        f"In the runs of {', '.join(old)} above, `fsdp2-resident` still met the other ranks at every unit of its first "
        "forward and of its last backward; since then it meets them twice a minibatch."
    )


def _verbs(fetch: dict[str, Any], push: dict[str, Any]) -> str:
    sizes = (1, 4, 16, 64)

    def fetched(figure: Callable[[dict[str, Any]], float], pages: str) -> list[str]:
        wanted = {"dtype": "float32", "parameters": 9, "pages": pages}
        return [f"{figure(find(fetch, unit_MiB=size, **wanted)):.2f}" for size in sizes]

    def pushed(mode: str) -> list[str]:
        return [f"{find(push, accumulate=mode, chunk_MiB=s, dtype='float32')['ratio']:.2f}" for s in sizes]

    cells = [
        ("`unshard()` of 9 parameters, share of memcpy's speed", *fetched(lambda r: r["ratio"], "kept")),
        ("the same where every page is fresh", *fetched(lambda r: r["ratio"], "fresh")),
        ("its bookkeeping alone, ms", *fetched(lambda r: r["bookkeeping_ms"], "kept")),
        ("under FSDP2 with gloo: times as slow", *fetched(lambda r: r["gloo_ms"] / r["fetch_ms"], "kept")),
        ("push until the server has added it, share of a local `add_`", *pushed("server")),
        ('push with `accumulate="direct"`, share of a local `add_`', *pushed("direct")),
    ]
    lines = [dict(zip(("", *(f"{size} MiB" for size in sizes)), row, strict=True)) for row in cells]
    small = find(fetch, dtype="float32", parameters=9, pages="kept", unit_MiB=1)
    lost = small["bookkeeping_ms"] / (small["fetch_ms"] - small["memcpy_ms"])
    head = prose(
        "**Fetch and push, measured** (`make bench`; fp32, all rows and commands in `bench/results`). A fetch of a "
        f"large unit copies at about memcpy's speed. Of what a unit of 1 MiB loses, {lost:.0%} is bookkeeping for each "
        "parameter:"
    )
    return f"{head}\n\n{table(lines)}"


def _overlap(overlap: dict[str, Any]) -> str:
    def gain(compute: str, prefetch: int, push_overlap: bool) -> str:
        row = find(overlap, compute=compute, prefetch=prefetch, push_overlap=push_overlap)
        return f"{row['ratio'] - 1:+.0%}"

    both, ahead, behind = gain("emulated", 1, True), gain("emulated", 1, False), gain("emulated", 0, True)
    return prose(
        "**Overlap** (`bench/bench_overlap.py`, 2 ranks): fetching one unit ahead and pushing behind backward are on "
        f"by default. Where cores are free (compute *emulated*) both together change the speed by {both}, fetching "
        f"ahead alone by {ahead}, pushing behind backward alone by {behind}. Where training keeps every core busy "
        f"(*measured*) it is {gain('real', 1, True)}: set `Settings(prefetch=0, push_overlap=False)` there."
    )


def _order(order: dict[str, Any]) -> str:
    def times(dtype: str) -> str:
        return f"{find(order, what='push, reproducible', dtype=dtype)['times_default']:.1f}"

    default, fp64 = (find(order, what=what, dtype="float32") for what in ("push, default", "push, reproducible"))
    return prose(
        f"**Order of arrival** (`python -m bench.order`, one interleaved run, {order['machine']['cpu']}, 2 ranks, "
        f"{default['MiB']} MiB): the default adds pushed gradients in fp32 in the order in which they arrive, so the "
        "last bits of sums differ between runs. `Settings(reproducible=True)` adds in fp64, which makes the order "
        f"practically not matter. A push that waits until the owner has added it then takes {times('float32')} times "
        f"as long for fp32 gradients and {times('bfloat16')} times for bf16, and the accumulators take "
        f"{fp64['accumulator_bytes'] // default['accumulator_bytes']} times the memory."
    )


def _loads(results: Path, ranks: dict[str, int]) -> str:
    said = {name: busy(load(name, results), count) for name, count in ranks.items()}
    known = [f"`{name}`: {text}" for name, text in said.items() if text]
    return prose(
        f"**Load of the machine.** {'; '.join(known)}. At the end of every other run the 1-minute load average was not "
        "above the number of ranks."
    )


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    for page in sorted(pages.DOCS.glob("*.md")):
        page.write_text(pages.replaced(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the figures of {RESULTS.name} into {README.name} and {pages.DOCS.name}/")
