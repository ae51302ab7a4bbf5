"""Paragraphs and tables of bench/results/README.md: eight emulated ranks, fetch and push, overlap."""

from __future__ import annotations

from collections.abc import Callable

from bench.quoted import Result, below, command, find, load, note, prose
from odc.bench.report import table

REGIMES = {"longalign": "LongAlign-like", "swe_smith": "SWE-Smith-like"}


def emulated() -> str:
    """bench/results/README.md: eight ranks, compute slept."""
    results = {lengths: load(f"emulated_{name}") for name, lengths in REGIMES.items()}
    for result in results.values():
        least = min(row["step_s"] for row in result["rows"] if not row["arm"].startswith("odc"))
        for row in result["rows"]:
            row["over the best"] = least / row["step_s"]
    columns: dict[str, Callable[[Result], str]] = {
        f"step, s ({' / '.join(results)})": lambda row: f"{row['step_s']:.1f}",
        "speed-up": lambda row: f"{row['speed-up']:.2f}",
        "over the best of torch's": lambda row: f"{row['over the best']:.2f}",
        "bubble": lambda row: f"{row['bubble']:.0%}",
        "bound / step": lambda row: f"{row['bound / step']:.2f}",
    }
    lines = [
        {"arm": rows[0]["arm"], **{name: " / ".join(map(cell, rows)) for name, cell in columns.items()}}
        for rows in zip(*(result["rows"] for result in results.values()), strict=True)
    ]
    return "\n\n".join([table(lines), *(_emulated(*item) for item in results.items())])


def _emulated(lengths: str, result: Result) -> str:
    return prose(
        f"{lengths}: {result['lengths']} (`{command(result)}`). On a control with nothing "
        f"to balance, `fsdp2` takes {result['control'][-1]['fsdp2/odc']:.2f} times as long as `odc`.{note(result)}"
    )


def verbs() -> str:
    """bench/results/README.md: fetch and push."""
    fetch, push = load("fetch"), load("push")
    sizes = (1, 4, 16, 64)

    def fetched(figure: Callable[[Result], float], pages: str) -> list[str]:
        wanted = {"dtype": "float32", "parameters": 9, "pages": pages}
        return [f"{figure(find(fetch, unit_MiB=size, **wanted)):.2f}" for size in sizes]

    def pushed(figure: Callable[[Result], float], mode: str = "server") -> list[str]:
        return [f"{figure(find(push, accumulate=mode, chunk_MiB=s, dtype='float32')):.2f}" for s in sizes]

    cells = [
        ("`unshard()` of 9 parameters, share of memcpy's speed", *fetched(lambda r: r["ratio"], "kept")),
        ("the same into fresh pages", *fetched(lambda r: r["ratio"], "fresh")),
        ("its bookkeeping alone, ms", *fetched(lambda r: r["bookkeeping_ms"], "kept")),
        ("under FSDP2 with gloo: times as slow", *fetched(lambda r: r["gloo_ms"] / r["fetch_ms"], "kept")),
        ("push until the daemon has added it, share of a local `add_`", *pushed(lambda r: r["ratio"])),
        ("gloo's reduce-scatter of as much: times as slow", *pushed(lambda r: r["gloo_ms"] / r["push_ms"])),
        ('push with `accumulate="direct"`, share of a local `add_`', *pushed(lambda r: r["ratio"], "direct")),
    ]
    lines = [dict(zip(("", *(f"{size} MiB" for size in sizes)), row, strict=True)) for row in cells]
    small = find(fetch, dtype="float32", parameters=9, pages="kept", unit_MiB=1)
    lost = small["bookkeeping_ms"] / (small["fetch_ms"] - small["memcpy_ms"])
    return f"{table(lines)}{below(fetch) or below(push)}\n\n" + prose(
        f"Of what a fetch of 1 MiB loses to memcpy, {lost:.0%} is bookkeeping for each parameter."
    )


def overlap() -> str:
    """bench/results/README.md: fetching ahead and pushing behind backward."""
    result = load("overlap")

    def gain(compute: str, prefetch: int, push_overlap: bool) -> str:
        row = find(result, compute=compute, prefetch=prefetch, push_overlap=push_overlap)
        return f"{row['ratio'] - 1:+.0%}"

    both, ahead, behind = gain("emulated", 1, True), gain("emulated", 1, False), gain("emulated", 0, True)
    return prose(
        f"Where cores are free (compute *emulated*), both together change the speed by {both}, fetching ahead alone by "
        f"{ahead}, pushing behind backward alone by {behind}. Where training keeps every core busy (*measured*) it is "
        f"{gain('real', 1, True)}.{note(result)}"
    )
