"""What a probe reports: a fact, whether it is good, and what to do if it is not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata


class State(StrEnum):
    """State of one thing that was looked at."""

    OK = "ok"
    ABSENT = "absent"  # missing, so what needs it cannot run
    BROKEN = "broken"  # present, but does not work or fit


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    what: str
    state: State
    found: str
    use: str = "run"  # what needs it: "run" (odc at all), or one of the other `USES`
    do: str = ""  # what to install or change; empty where all is well


def ok(what: str, found: str, use: str = "run") -> Finding:
    """A finding of something that works."""
    return Finding(what, State.OK, found, use)


def absent(what: str, found: str, do: str, use: str = "run") -> Finding:
    """A finding of something that is missing."""
    return Finding(what, State.ABSENT, found, use, do)


def broken(what: str, found: str, do: str, use: str = "run") -> Finding:
    """A finding of something that is present and does not work."""
    return Finding(what, State.BROKEN, found, use, do)


def version_of(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    leading = re.match(r"(?:\d+\.)*\d+", text)
    return tuple(int(number) for number in leading[0].split(".")) if leading else ()
