"""What a probe says: a fact, whether it is good, and what to do if not.

Chose a line of text to act on for everything that is not well, over codes to look up: who reads it wants a command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Of one thing looked at."""

    OK = "ok"
    ABSENT = "absent"  # not there; what uses it cannot be used
    BROKEN = "broken"  # there, and does not work or does not fit


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Args:
        what: its name.
        state: how it is.
        found: what was seen, as text.
        use: what needs it: "run" (odc at all), or one of the other `USES`.
        do: what to install or change; empty where it is well.
    """

    what: str
    state: State
    found: str
    use: str = "run"
    do: str = ""


def ok(what: str, found: str, use: str = "run") -> Finding:
    """It is well."""
    return Finding(what, State.OK, found, use)


def absent(what: str, found: str, do: str, use: str = "run") -> Finding:
    """It is not there."""
    return Finding(what, State.ABSENT, found, use, do)


def broken(what: str, found: str, do: str, use: str = "run") -> Finding:
    """It is there, and does not work."""
    return Finding(what, State.BROKEN, found, use, do)


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    numbers: list[int] = []
    for word in text.split("."):
        digits = re.match(r"\d+", word)
        if digits is None:
            break
        numbers.append(int(digits[0]))
        if digits[0] != word:
            break
    return tuple(numbers)
