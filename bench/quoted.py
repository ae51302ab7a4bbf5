"""Stored results as the README and the pages of docs/ quote them, and how busy the machine was when they were taken."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Result = dict[str, Any]
_ENDS = {"begin": "beginning", "end": "end"}


def load(name: str, results: Path = RESULTS) -> Result:
    """The stored result `name`."""
    found: Result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return found


def find(result: Result, **wanted: object) -> Result:
    """The one row whose columns have these values."""
    found: list[Result] = [r for r in result["rows"] if all(r[key] == value for key, value in wanted.items())]
    (row,) = found
    return row


def loads(result: Result) -> dict[str, float]:
    """The 1-minute load averages that were stored, by "begin" and "end"."""
    known: Mapping[str, float] = result.get("load_1min", {})
    at_end = result["machine"].get("load_1min_at_end")  # results older than the field "load_1min"
    return dict(known) or ({} if at_end is None else {"end": at_end})


def busy(result: Result, ranks: int) -> str:
    """What to know about the load of a measurement; empty where the machine had nothing else to do.

    A load above the ranks that ran means that something else ran too; half a process is noise of the average.
    """
    known = loads(result)
    if not known:
        return "load not recorded"
    if max(known.values()) <= ranks + 0.5:
        return ""
    said = " and ".join(f"{value:.1f} at its {_ENDS[when]}" for when, value in known.items())
    return f"taken on a busy machine: load {said}, with {ranks} ranks"


def note(result: Result, ranks: int) -> str:
    """`busy` as a sentence to put behind a paragraph; empty for a quiet machine."""
    said = busy(result, ranks)
    return f" ({said[0].upper()}{said[1:]}.)" if said else ""


def prose(text: str) -> str:
    """A paragraph, wrapped as the pages are."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def below(result: Result, ranks: int) -> str:
    """What to know about the load, as a paragraph under a table."""
    said = note(result, ranks).strip()
    return f"\n\n{said}" if said else ""


def span(values: Sequence[float], form: str = ".2f") -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"
