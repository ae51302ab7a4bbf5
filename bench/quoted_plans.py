"""Paragraphs and tables of docs/ about planners, dispatch and the simulator, made from stored results."""

from __future__ import annotations

import re
import textwrap

from bench.quoted import Result, below, command, find, load, note, prose, span
from odc.bench.report import table


def _e4(text: str) -> str:
    return f"{float(text) * 1e4:.2g}e-4" if float(text) < 0.1 else f"{float(text):.2f}"


def _ms(text: str) -> str:
    return f"{float(text):.0f} ms" if float(text) >= 100 else f"{float(text):.2g} ms"


def planners() -> str:
    """bench/results/README.md: milliseconds, and how far the fullest part lies above the mean."""
    result = load("planners")
    columns = {"odc": "odc", "LPT": "LPT", "verl 0.9.1's Karmarkar-Karp": "verl_KK"}
    lines = []
    for row in result["rows"]:
        equal = row["sizes"] == "equal"
        if row["sizes"] not in ("equal", "unequal") or (equal and row["samples"] != 512):
            continue
        name = f"{row['samples']:,} on {row['parts']}" + (", equal counts" if equal else "")
        cells = {
            title: f"{_ms(row[f'{key}_ms'])}, {_e4(row[f'{key}_above_mean'])}" if row.get(f"{key}_ms") else "-"
            for title, key in columns.items()
        }
        lines.append({"samples on parts": name, **cells})
    return table(lines) + below(result)


def policies() -> str:
    """bench/results/README.md: first calls and whole policies."""
    result = load("planners")

    def seconds(**wanted: object) -> str:
        took = float(find(result, **wanted)["odc_ms"])
        return f"{took / 1e3:.2g} s" if took >= 200 else f"{took:.2g} ms"

    return prose(
        f"The first call takes {seconds(sizes='first call, filled cache')} with numba's cache filled, and "
        f"{seconds(sizes='first call, empty cache')} on an empty one, which is filled once. Whole policies: `lb_mini` "
        f"{seconds(sizes='lb_mini', samples=64)} for 64 samples on 8 ranks, {seconds(sizes='lb_mini', samples=512)} "
        f"for 512 on 64, {seconds(sizes='lb_mini', samples=153600)} for 153,600 on 2560; `lb_micro` "
        f"{seconds(sizes='lb_micro', samples=64)}, {seconds(sizes='lb_micro', samples=512)}, and "
        f"{seconds(sizes='lb_micro', samples=4096)} for 4096 on 64."
    )


def post_balancing() -> str:
    """bench/results/README.md: planning one phase."""
    result = load("dispatch")
    names = {
        "1 packed": ("algorithm 1", ""),
        "2 padded": ("algorithm 2", " (exact; the bound ignores padding)"),
        "4 packed, quadratic": ("algorithm 4, by cost", ""),
        "4 with tolerance": ("algorithm 4, with tolerance", ""),
        "5 attention padded": ("algorithm 5", " (as above)"),
    }
    lines = []
    for name, (title, remark) in names.items():
        small, large = (find(result, what=f"algorithm {name}", instances=n) for n in (64, 2560))
        lines.append(
            {
                "post-balancing, ms": title,
                "64 instances": f"{small['ms']:.2f}",
                "2560": f"{large['ms']:.1f}",
                "greatest cost above a lower bound, 64 / 2560": " / ".join(r["above_bound"] for r in (small, large))
                + remark,
            }
        )
    return table(lines) + below(result)


def node_wise() -> str:
    """bench/results/README.md: exchanges, against bounds and against the optimum."""
    result = load("dispatch")
    rows = [find(result, what="node-wise, exchanges", instances=n) for n in (64, 128, 2560)]
    lines = [
        {"node-wise, exchanges": "ms", **{str(r["instances"]): r["ms"] for r in rows}},
        {"node-wise, exchanges": "above a lower bound", **{str(r["instances"]): r["above_bound"] for r in rows}},
    ]
    exact = [r for r in result["rows"] if "HiGHS" in r["what"]]
    said = "; ".join(f"{r['instances']} instances {r['above_bound']}, {r['ms'] / 1e3:.2g} s" for r in exact)
    return f"{table(lines)}\n\n{prose(f'Above the optimum, and the time HiGHS took for it, one seed each: {said}.')}"


def node_exact() -> str:
    """bench/results/README.md: why the exact method is not the default."""
    groups: dict[int, list[Result]] = {}
    result = load("node_exact")
    for row in result["rows"]:
        groups.setdefault(row["instances"], []).append(row)
    lines: list[dict[str, object]] = [
        {"instances": name} for name in ("HiGHS, ms", "exchanges, ms, at most", "exchanges above the optimum, at most")
    ]
    for instances, rows in groups.items():
        least, most = min(row["exact_ms"] for row in rows), max(row["exact_most_ms"] for row in rows)
        exchanges = f"{max(row['exchange_most_ms'] for row in rows):.1f}"
        above = max((row["gap"] for row in rows), key=lambda gap: float(gap.rstrip("%")))
        for line, cell in zip(lines, (f"{least:.0f}-{most:.0f}", exchanges, above), strict=True):
            line[str(instances)] = cell
    return table(lines) + below(result)


def overhead() -> str:
    """bench/results/README.md: three phases, beside the paper's row."""
    rows = [r for r in load("dispatch")["rows"] if r["what"].startswith("three phases")]
    lines: list[dict[str, object]] = [
        {"instances": name} for name in ("paper, ms", "balancing three phases, ms", "placing them node-wise, ms")
    ]
    for row in rows:
        balancing, _, placing = row["ms"].partition(" + ")
        paper = re.findall(r"[\d.]+", row["target_ms"])[0]
        for line, value in zip(lines, (paper, balancing, placing), strict=True):
            line[str(row["instances"])] = value
    return table(lines)


def volume() -> str:
    """bench/results/README.md: what crosses nodes."""
    result = load("dispatch")
    titles = {
        "node-wise": "node-wise (algorithm 3)",
        "and equal lengths traded, within 0%": "and equal lengths traded",
        "and equal lengths traded, within 2%": "... lengths within 2%",
    }
    heads = {"images": "images, few resolutions, packed", "audio": "audio, padded", "text": "text, packed"}
    lines = []
    for name, title in titles.items():
        line = {"": title}
        for modality, head in heads.items():
            row = find(result, what=f"volume between nodes, {modality}: {name}")
            cost = "" if row["above_bound"] == "cost +0.00%" else f", {row['above_bound']}"
            line[head] = f"{row['mean_sent']} ({row['most_sent']}){cost}"
        lines.append(line)
    return table(lines)


def exchange() -> str:
    """bench/results/README.md: the exchanges, and planning ahead."""
    result = load("dispatch")

    def speeds(mib: int, kind: str) -> list[float]:
        found = [r for r in result["rows"] if r["what"] == f"exchange of {mib} MiB a rank, fp32: {kind}"]
        return [float(r["above_bound"].split()[0]) for r in found]

    def times(mib: int) -> str:
        ours, best = speeds(mib, "on demand"), speeds(mib, "all-to-all")
        over = " and ".join(f"{a / b:.1f}" for a, b in zip(ours, best, strict=True))
        return f"{over} ({' and '.join(f'{a:.1f}' for a in ours)})"

    (ahead,) = [r for r in result["rows"] if r["what"].startswith("planning a step")]
    between = find(result, what="the same, planned between steps")["ms"]
    planned, waited = re.findall(r"[\d.]+", ahead["ms"])
    moving = (
        "Exchange on demand on 2 and 4 ranks (of two cores), fp32, times as fast as the all-to-all (as the "
        f"all-gather) in the same run: 16 MiB a rank {times(16)}; 1 MiB {times(1)}."
    )
    planning = (
        "Planning ahead (`PlannedLoader.overlap`), 2 ranks on demand, 60 examples of three modalities, compute "
        f"*emulated* by 50 ms of sleep: {planned} ms a step of gathering and planning, of which the loop waited "
        f"{waited}; between steps it took {between}."
    )
    return f"{prose(moving)}\n\n{prose(planning)}"


def trust() -> str:
    """bench/results/README.md: simulated against emulated."""
    beside = load("simulated_vs_emulated")
    ratios = [row["simulated/emulated"] for row in beside["rows"]]
    ranks = sorted({row["ranks"] for row in beside["rows"]})
    simulated = (
        f"Against the real runtime with *emulated* compute on {', '.join(map(str, ranks))} ranks, also with one rank "
        f"slowed 1.5 times (`{command(beside)}`), simulated step times are "
        f"{span(ratios)} of the emulated ones.{note(beside)}"
    )
    said = []
    for name, lengths in (("longalign", "LongAlign-like"), ("swe_smith", "SWE-Smith-like")):
        result = load(f"emulated_{name}")
        best = max(result["rows"], key=lambda row: row["speed-up"])
        said.append(f"{best['bound / step']:.3f} of its step for {lengths} lengths" + note(result))
    emulated = (
        "In [emulated runs](#eight-emulated-ranks) on 8 ranks the bound that no plan can "
        "beat is, for `odc`, "
        f"{' and '.join(said)}."
    )
    return "\n".join(textwrap.indent(prose(one), "  ").replace("  ", "* ", 1) for one in (simulated, emulated))
