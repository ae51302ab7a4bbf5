"""Where a stored figure comes from: the commit, the date, the machine and how busy it was, and what is installed.

Call `begin()` before measuring, and store what `Measurement.facts()` returns at the end, as `json_text`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

VERSION = "0.1.0"  #: of odc, as in pyproject.toml

_REPOSITORY = Path(__file__).parent.parent
_DEADLINE_S = 30.0
_BUSY = 0.5  # load a core from which a measurement is not to be trusted
#: Stored figures and the pages that quote them are not code: rewriting them does not make the measured tree dirty.
_CODE = (".", ":(exclude)bench/results", ":(exclude)docs", ":(exclude)README.md")


@dataclass(frozen=True)
class Measurement:
    """The state when a measurement began: commit (see `commit`), UTC date (YYYY-MM-DD), 1-minute load average."""

    commit: str | None
    date: str
    load: float

    def facts(self) -> dict[str, Any]:
        """JSON-able facts of the measurement that ends now; `load_1min` is the load average at its begin and end."""
        load = {"begin": round(self.load, 2), "end": round(os.getloadavg()[0], 2)}
        return {"commit": self.commit, "date": self.date, "load_1min": load}


def begin() -> Measurement:
    """Facts from before a measurement; runs git, which takes milliseconds."""
    return Measurement(commit(), datetime.now(UTC).strftime("%Y-%m-%d"), os.getloadavg()[0])


def other_work(figures: Mapping[str, Any]) -> str:
    """A sentence for the reader of stored figures whose machine was busy; empty where it was quiet, or not known."""
    load, cores = figures.get("load_1min", {"begin": 0.0})["begin"], figures.get("machine", {}).get("cores", 1)
    if load < cores * _BUSY:
        return ""
    return f"The machine was busy: its load was {load:.1f}, on {cores} cores, before the measurement."


def commit(repository: Path = _REPOSITORY) -> str | None:
    """The commit of a checkout, with "+dirty" if its code differs from that commit or has untracked files.

    None if `repository` is not the root of a git work tree (an installed package) or git cannot be run.
    """
    root = _git(repository, "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() != repository.resolve():
        return None
    head = _git(repository, "rev-parse", "HEAD")
    changed = _git(repository, "status", "--porcelain", "--", *_CODE)
    if head is None or changed is None:
        return None
    return f"{head}+dirty" if changed else head


def processor() -> str:
    """The processor's model; its architecture where the kernel does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def memory_bytes() -> int:
    """Memory of the machine, whatever of it this process may use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def version_of(package: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    return {package: version for package in packages if (version := version_of(package)) is not None}


def _git(repository: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def json_text(figures: Any, indent: int | None = 1) -> str:
    """Lines of JSON, one without `indent`, with null in place of infinities and NaN, for which JSON has no words."""
    return json.dumps(_finite(figures), indent=indent, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
