"""The tables of `odc bench`: of one run, and of two saved runs beside each other.

Where the device's time was taken, bytes a second and ratios are of that. Two runs are compared by each row's ratio
to its baseline of the same run, besides the plain times: what slowed the machine down slowed both halves of the ratio.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from odc.bench.heaps import COPY_ENGINE, TORCH_KERNEL, TRITON_KERNEL
from odc.bench.report import cell, table
from odc.errors import ConfigError
from odc.provenance import other_work
from odc.settings import Settings

SCHEMA = "odc-bench-1"
MIB = 1 << 20

Row = dict[str, Any]


def text_of(nbytes: int) -> str:
    """64 KiB, 16 MiB."""
    size, unit = (nbytes / MIB, "MiB") if nbytes >= MIB else (nbytes / 1024, "KiB")
    return f"{size:.3g} {unit}"


def line_of(row: Row) -> Row:
    """A row as it is shown: "of limit" and "times as fast as" divide the limit and each baseline by the row's time."""
    waited, on_device = row["seconds"]["median"], (row["device_seconds"] or {}).get("median")
    faster = {name: _ratio(row, name, "device_" if name in row["device_rivals"] else "") for name in row["rivals"]}
    limit = faster.pop(row["limit"], None)
    line = {
        "what": row["what"],
        "ranks": row["ranks"],
        "size": text_of(row["size"]) if row["size"] else "",
        "ms": waited * 1e3,
        "GB/s": row["nbytes"] / (on_device or waited) / 1e9 if row["nbytes"] else "",
        "of limit": "" if limit is None else f"{limit:.0%} of {row['limit']}",
        "times as fast as": ", ".join(f"{name} {ratio:.3g}" for name, ratio in faster.items()),
    }
    if row["device"] == "cpu":
        return line
    asked = (row.get("host_seconds") or {}).get("median")
    return {
        **line,
        "device ms": "" if on_device is None else on_device * 1e3,
        "host us": "" if asked is None else asked * 1e6,
    }


def brief(row: Row) -> str:
    """A row as a line of progress."""
    line = line_of(row)
    on_device = f" ({cell(line['device ms'])} on the device)" if line.get("device ms") else ""
    return f"  {line['what']}: {cell(line['ms'])} ms{on_device}" + (f", {line['of limit']}" if line["of limit"] else "")


def _ratio(row: Row, baseline: str, clock: str) -> float:
    """How many times as fast as `baseline`, by the device's clock ("device_") or this process's ("")."""
    return float(row[f"{clock}rivals"][baseline]["median"] / row[f"{clock}seconds"]["median"])


def show(result: dict[str, Any]) -> str:
    """A whole result as text: machine, table, notes."""
    notes = [f"left out: {reason}" for reason in result["left_out"]]
    notes += [f"FAILED: {reason}" for reason in result["failed"]]
    where = ", ".join(f"{key} {value}" for key, value in {**result["machine"], **result["versions"]}.items())
    legend = (
        "ms: until the slowest rank is done, median of rounds. GB/s: of one rank. Of limit: its time over the row's."
    )
    if any(row["device_seconds"] for row in result["rows"]):
        legend += " Where there are device ms, GB/s and ratios are of them."
    rows = table([line_of(row) for row in result["rows"]])
    sections = [where, rows, legend, other_work(result), crossovers(result["rows"]), "\n".join(notes)]
    return "\n\n".join(section for section in sections if section)


def crossovers(rows: list[Row]) -> str:
    """From which size the copy engine is as fast as the better kernel, for each number of ranks; "" on the CPU."""
    by_case: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        kind, _, way = row["what"].partition(", ")
        if kind == "get" and way in (COPY_ENGINE, TORCH_KERNEL, TRITON_KERNEL) and row["device_seconds"]:
            by_case.setdefault((row["ranks"], row["size"]), {})[way] = row["device_seconds"]["median"]
    lines = []
    for ranks in dict.fromkeys(ranks for ranks, _ in by_case):
        sizes = sorted(size for each, size in by_case if each == ranks)
        wins = [_engine_wins(by_case[ranks, size]) for size in sizes]
        first = next((i for i in range(len(sizes)) if all(wins[i:])), None)
        sizes_won = f"from {text_of(sizes[first])} on" if first is not None else f"never, up to {text_of(sizes[-1])}"
        lines.append(f"One piece, {ranks} ranks: {COPY_ENGINE} is as fast as the better kernel {sizes_won}.")
    least = text_of(Settings().copy_engine_bytes)
    lines += [f"odc takes it from {least} on, or from Settings(copy_engine_bytes=...) on."] if lines else []
    return "\n".join(lines)


def _engine_wins(ways: dict[str, float]) -> bool:
    kernels = [took for way, took in ways.items() if way != COPY_ENGINE]
    return bool(kernels) and COPY_ENGINE in ways and ways[COPY_ENGINE] <= 1.02 * min(kernels)


def to_stderr(text: str) -> None:
    """Prints a line of progress."""
    print(f"odc bench: {text}", file=sys.stderr, flush=True)


def load(path: Path) -> dict[str, Any]:
    """A saved run; raises `ConfigError` when the file cannot be read or is no run of `odc bench`."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"compare: {path} cannot be read: {error}") from None
    if not isinstance(loaded, dict) or loaded.get("schema") != SCHEMA:
        raise ConfigError(f"compare: {path} was not written by `odc bench`")
    return loaded


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """A table of the rows that both have; "b/a" over 1 means that the second took longer.

    "beyond noise" means that the two runs' ranges of rounds (min to max) do not overlap.
    """
    before = {_key(row): row for row in first["rows"]}
    after = {_key(row): row for row in second["rows"]}
    common = [key for key in before if key in after]
    if not common:
        raise ConfigError("compare: the two runs have no row in common (part, ranks, size and device must be equal)")
    lines = [_compared(before[key], after[key]) for key in common]
    counts = {"a": len(before) - len(common), "b": len(after) - len(common)}
    alone = [f"only in {name}: {count} rows" for name, count in counts.items() if count]
    return "\n".join([*_differences(first, second), "", table(lines), *alone])


def _key(row: Row) -> tuple[Any, ...]:
    return row["what"], row["device"], row["ranks"], row["size"]


def _compared(a: Row, b: Row) -> dict[str, Any]:
    clock = "device_" if a.get("device_seconds") and b.get("device_seconds") else ""
    mine, theirs = a[f"{clock}seconds"], b[f"{clock}seconds"]
    # The first that both have is the limit, where there is one.
    baseline = next((name for name in a[f"{clock}rivals"] if name in b[f"{clock}rivals"]), None)
    return {
        "what": a["what"],
        "ranks": a["ranks"],
        "size": text_of(a["size"]) if a["size"] else "",
        "a ms": mine["median"] * 1e3,
        "b ms": theirs["median"] * 1e3,
        "b/a": theirs["median"] / mine["median"],
        "beyond noise": "slower" if theirs["min"] > mine["max"] else "faster" if theirs["max"] < mine["min"] else "no",
        "baseline": baseline or "",
        "b/a against baseline": _ratio(a, baseline, clock) / _ratio(b, baseline, clock) if baseline else "",
    }


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Lines about machines, versions and commits that differ; loads always do, and are left out."""
    found = [f"a: {first['date']} `{first['command']}`", f"b: {second['date']} `{second['command']}`"]
    if first.get("commit") != second.get("commit"):
        found.append(f"commit: {first.get('commit')} in a, {second.get('commit')} in b")
    for kind in ("machine", "versions"):
        for key in dict.fromkeys([*first[kind], *second[kind]]):
            mine, theirs = first[kind].get(key, "none"), second[kind].get(key, "none")
            if mine != theirs:
                found.append(f"{key}: {mine} in a, {theirs} in b")
    return found
