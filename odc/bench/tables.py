"""The tables of `odc bench`.

Chose one line a row, the share of the limit in a column of its own: "does a get run at a copy's speed" is then read,
not computed. Where the device's own time was taken, bytes a second and ratios are of that; the time that a caller would
wait stands beside it.
"""

from __future__ import annotations

import sys
from typing import Any

from odc.bench.heaps import COPY_ENGINE, TORCH_KERNEL, TRITON_KERNEL
from odc.bench.report import cell, table
from odc.runtime.movers import cuda as by_cuda

Row = dict[str, Any]
MIB = 1 << 20


def text_of(nbytes: int) -> str:
    """64 KiB, 16 MiB."""
    size, unit = (nbytes / MIB, "MiB") if nbytes >= MIB else (nbytes / 1024, "KiB")
    return f"{size:.3g} {unit}"


def line_of(row: Row) -> Row:
    """A row as it is shown: "of limit" is the limit's time over its own, "times as fast as" each rival's."""
    waited, own = row["seconds"]["median"], (row["device_seconds"] or {}).get("median")
    faster = {name: _ratio(row, name) for name in row["rivals"]}
    limit = faster.pop(row["limit"], None)
    line = {
        "what": row["what"],
        "ranks": row["ranks"],
        "size": text_of(row["size"]) if row["size"] else "",
        "ms": waited * 1e3,
        "GB/s": row["nbytes"] / (own or waited) / 1e9 if row["nbytes"] else "",
        "of limit": "" if limit is None else f"{limit:.0%} of {row['limit']}",
        "times as fast as": ", ".join(f"{name} {ratio:.3g}" for name, ratio in faster.items()),
    }
    return line if row["device"] == "cpu" else {**line, "device ms": "" if own is None else own * 1e3}


def brief(row: Row) -> str:
    """A row as progress tells it."""
    line = line_of(row)
    own = f" ({cell(line['device ms'])} on the device)" if line.get("device ms") else ""
    return f"  {line['what']}: {cell(line['ms'])} ms{own}" + (f", {line['of limit']}" if line["of limit"] else "")


def _ratio(row: Row, rival: str) -> float:
    """How many times as fast as `rival`: on the device, where both were timed there."""
    if rival in row["device_rivals"]:
        return float(row["device_rivals"][rival]["median"] / row["device_seconds"]["median"])
    return float(row["rivals"][rival]["median"] / row["seconds"]["median"])


def show(result: dict[str, Any]) -> str:
    """Everything as text: machine, table, notes."""
    notes = [f"left out: {reason}" for reason in result["left_out"]]
    notes += [f"FAILED: {reason}" for reason in result["failed"]]
    where = ", ".join(f"{key} {value}" for key, value in {**result["machine"], **result["versions"]}.items())
    legend = (
        "ms: until the slowest rank is done, median of rounds. GB/s: of one rank. Of limit: its time over the row's."
    )
    if any(row["device_seconds"] for row in result["rows"]):
        legend += " Where there are device ms, GB/s and ratios are of them."
    rows = table([line_of(row) for row in result["rows"]])
    sections = [where, rows, legend, crossovers(result["rows"]), "\n".join(notes)]
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
        said = f"from {text_of(sizes[first])} on" if first is not None else f"never, up to {text_of(sizes[-1])}"
        lines.append(f"One piece, {ranks} ranks: {COPY_ENGINE} is as fast as the better kernel {said}.")
    if lines:
        lines.append(
            f"odc takes it from {text_of(by_cuda.COPY_ENGINE_BYTES)} on (odc.runtime.movers.cuda.COPY_ENGINE_BYTES, "
            "see docs/gpu.md)."
        )
    return "\n".join(lines)


def _engine_wins(ways: dict[str, float]) -> bool:
    kernels = [took for way, took in ways.items() if way != COPY_ENGINE]
    return bool(kernels) and COPY_ENGINE in ways and ways[COPY_ENGINE] <= 1.02 * min(kernels)


def to_stderr(text: str) -> None:
    """Progress of the command."""
    print(f"odc bench: {text}", file=sys.stderr, flush=True)
