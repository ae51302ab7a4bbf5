"""Stored results by name, when and how they were taken, and what pages take from their rows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
REFERENCE = "demo"  #: the result whose commit and day the pages name
QUIET = 1.0  #: 1-minute load average before a measurement, above which its figures are marked

Result = dict[str, Any]


def load(name: str) -> Result:
    """The stored result `name`."""
    found: Result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def page(name: str) -> str:
    """The text of the stored page `name`."""
    return (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def find(result: Result, **wanted: object) -> Result:
    """The one row whose columns have these values."""
    (row,) = rows(result, **wanted)
    return row


def rows(result: Result, **wanted: object) -> list[Result]:
    """All rows whose columns have these values."""
    return [row for row in result["rows"] if all(row[key] == value for key, value in wanted.items())]


def command(result: Result) -> str:
    """How a benchmark was started, without what every command has and where it stored its result."""
    words = result["command"] if isinstance(result["command"], list) else shlex.split(result["command"])
    kept = [word for word in words if word != "OMP_NUM_THREADS=1"]
    for option in ("--results", "--json", "--output"):
        if option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    return shlex.join(kept)


def note(result: Result) -> str:
    """A sentence to put behind a figure that was taken at another commit, or on a busy machine; mostly empty."""
    found = ", ".join(filter(None, (_stale(result), _busy(result))))
    return f" (Taken {found}.)" if found else ""


def _stale(result: Result) -> str:
    commit = result.get("commit")
    if commit == load(REFERENCE)["commit"]:
        return ""
    return f"at commit {commit[:7]}" if commit else "at an unknown commit"


def _busy(result: Result) -> str:
    """By the load before the ranks started: they make load themselves. No load changes what is simulated."""
    if not result.get("measured", True):
        return ""
    load_1min = result.get("load_1min", {}).get("begin")
    if load_1min is None:
        return "at an unknown load"
    return f"on a busy machine: load {load_1min:.1f} before it began" if load_1min > QUIET else ""


def cells(values: Iterable[Any], form: str = "") -> str:
    """Several cells of a table's row."""
    return " | ".join(format(value, form) for value in values)


def column(found: Iterable[Result], key: str, form: str = "") -> str:
    """A column of rows, as cells of one row."""
    return cells((row[key] for row in found), form)


def span(values: Sequence[float], form: str = ".2f") -> str:
    """The least and the most."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def best(seconds: Mapping[str, float], but: str = "odc") -> str:
    """The fastest arm whose name does not begin with `but`."""
    return min((name for name in seconds if not name.startswith(but)), key=seconds.__getitem__)


def cases(result: Result) -> list[tuple[str, dict[str, Result]]]:
    """Each case of `bench.hosts` with its rows by arm."""
    found: dict[str, dict[str, Result]] = {}
    for row in result["rows"]:
        case = f"{row['hosts x ranks']}, {row['microbatches']}, {row['link']}"
        found.setdefault(case + (", demo" if row.get("work") == "demo" else ""), {})[row["arm"]] = row
    return list(found.items())
