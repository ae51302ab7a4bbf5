"""Stored results as the README and the pages of docs/ quote them, and when and how they were taken."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Result = dict[str, Any]
REFERENCE = "demo"  #: the result whose commit and day the pages name
QUIET = 1.0  #: 1-minute load average before a measurement, above which its figures are marked


def load(name: str, results: Path = RESULTS) -> Result:
    """The stored result `name`."""
    found: Result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return found


def find(result: Result, **wanted: object) -> Result:
    """The one row whose columns have these values."""
    found: list[Result] = [r for r in result["rows"] if all(r[key] == value for key, value in wanted.items())]
    (row,) = found
    return row


def busy(result: Result) -> str:
    """What to know about the load before the ranks started; empty for a quiet machine. Ranks make load themselves."""
    load_1min = result.get("load_1min", {}).get("begin")
    if load_1min is None:
        return "at an unknown load"
    return f"on a busy machine: load {load_1min:.1f} before it began" if load_1min > QUIET else ""


def stale(result: Result) -> str:
    """At which commit a figure was taken; empty where it is the one that `taken` names."""
    commit = result.get("commit")
    if commit == load(REFERENCE)["commit"]:
        return ""
    return f"at commit {commit[:7]}" if commit else "at an unknown commit"


def taken(results: Path = RESULTS) -> str:
    """One line for a page: at which commit and on which day its figures were taken."""
    demo = load(REFERENCE, results)
    return prose(
        f"All figures here and in docs/ were taken on {demo['date']}, at commit `{demo['commit'][:7]}`, on one quiet "
        f"machine with {demo['machine']['cores']} cores; a figure that was not says so."
    )


def note(result: Result) -> str:
    """`stale` and `busy` as a sentence to put behind a paragraph; mostly empty."""
    said = ", ".join(filter(None, (stale(result), busy(result))))
    return f" (Taken {said}.)" if said else ""


def command(result: Result) -> str:
    """How a benchmark was started, without what every command has and where it stored its result."""
    words = result["command"] if isinstance(result["command"], list) else shlex.split(result["command"])
    kept = list(words)
    for option in ("--results", "--json", "--output"):
        if option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    return shlex.join(word for word in kept if word != "OMP_NUM_THREADS=1")


def best(seconds: Mapping[str, float]) -> str:
    """The fastest of several, by name."""
    return min(seconds, key=seconds.__getitem__)


def prose(text: str) -> str:
    """A paragraph, wrapped as the pages are."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def below(result: Result) -> str:
    """`note` as a paragraph under a table."""
    said = note(result).strip()
    return f"\n\n{said}" if said else ""


def span(values: Sequence[float], form: str = ".2f") -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"
