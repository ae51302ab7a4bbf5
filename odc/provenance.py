"""Where a stored figure comes from: the commit that was run, the date, and how busy the machine was.

Every writer of figures calls `begin()` before it measures and stores what `Measurement.facts()` returns at the end.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).parent.parent
_DEADLINE_S = 30.0
#: Stored figures are not code: rewriting one of them does not make the tree that is measured another tree.
_CODE = (".", ":(exclude)bench/results")


@dataclass(frozen=True)
class Measurement:
    """What was true when a measurement began.

    Args:
        commit: as of `commit`.
        date: UTC, YYYY-MM-DD.
        load: the 1-minute load average.
    """

    commit: str | None
    date: str
    load: float

    def facts(self) -> dict[str, Any]:
        """JSON-able facts of the measurement that ends now; `load_1min` is the load average at its begin and its end.

        A load above the number of ranks and threads that were measured means that other work ran beside them.
        """
        load = {"begin": round(self.load, 2), "end": round(os.getloadavg()[0], 2)}
        return {"commit": self.commit, "date": self.date, "load_1min": load}


def begin() -> Measurement:
    """Call this before anything is measured; it runs git, which takes milliseconds."""
    return Measurement(commit(), datetime.now(UTC).strftime("%Y-%m-%d"), os.getloadavg()[0])


def commit(repository: Path = _REPOSITORY) -> str | None:
    """The commit of a checkout, with "+dirty" appended if its code differs from that commit or has untracked files.

    Returns None where `repository` is not the root of a git work tree (an installed package) or git cannot be run.
    """
    root = _git(repository, "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() != repository.resolve():
        return None
    head = _git(repository, "rev-parse", "HEAD")
    changed = _git(repository, "status", "--porcelain", "--", *_CODE)
    if head is None or changed is None:
        return None
    return f"{head}+dirty" if changed else head


def _git(repository: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
