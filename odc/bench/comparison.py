"""Two saved runs of `odc bench` beside each other.

Chose to judge each row by its ratio to its own rival of the same run, beside the plain times: two runs on one machine
differ by the machine's mood, and both halves of a ratio shared that. "beyond noise" says that the two runs' ranges of
rounds (min to max) do not even overlap; nothing finer is claimed from a few rounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from odc.bench.report import table
from odc.bench.suite import SCHEMA
from odc.bench.tables import text_of
from odc.errors import ConfigError

Row = dict[str, Any]


def load(path: Path) -> dict[str, Any]:
    """A saved run.

    Raises:
        ConfigError: the file cannot be read or is no run of `odc bench`.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"compare: {path} cannot be read: {error}") from None
    if not isinstance(loaded, dict) or loaded.get("schema") != SCHEMA:
        raise ConfigError(f"compare: {path} was not written by `odc bench`")
    return loaded


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """A table of the rows that both have; "b/a" over 1 means that the second took longer."""
    before = {_key(row): row for row in first["rows"]}
    after = {_key(row): row for row in second["rows"]}
    common = [key for key in before if key in after]
    if not common:
        raise ConfigError("compare: the two runs have no row in common (part, ranks, size and device must be equal)")
    lines = [_line(before[key], after[key]) for key in common]
    alone = [f"only in {name}: {count} rows" for name, count in _alone(before, after).items() if count]
    return "\n".join([*_differences(first, second), "", table(lines), *alone])


def _alone(before: dict[Any, Row], after: dict[Any, Row]) -> dict[str, int]:
    return {"a": len(before.keys() - after.keys()), "b": len(after.keys() - before.keys())}


def _key(row: Row) -> tuple[Any, ...]:
    return row["what"], row["device"], row["ranks"], row["size"]


def _line(a: Row, b: Row) -> dict[str, Any]:
    # The device's own times, where both runs took them.
    clock = "device_" if a.get("device_seconds") and b.get("device_seconds") else ""
    mine, theirs = a[f"{clock}seconds"], b[f"{clock}seconds"]
    # The first that both have: the limit, where there is one.
    rival = next((name for name in a[f"{clock}rivals"] if name in b[f"{clock}rivals"]), None)
    line: dict[str, Any] = {
        "what": a["what"],
        "ranks": a["ranks"],
        "size": text_of(a["size"]) if a["size"] else "",
        "a ms": mine["median"] * 1e3,
        "b ms": theirs["median"] * 1e3,
        "b/a": theirs["median"] / mine["median"],
        "beyond noise": _apart(mine, theirs),
        "rival": rival or "",
        "b/a against rival": _relative(b, rival, clock) / _relative(a, rival, clock) if rival else "",
    }
    return line


def _relative(row: Row, rival: str, clock: str) -> float:
    return float(row[f"{clock}seconds"]["median"] / row[f"{clock}rivals"][rival]["median"])


def _apart(a: dict[str, float], b: dict[str, float]) -> str:
    if b["min"] > a["max"]:
        return "slower"
    return "faster" if b["max"] < a["min"] else "no"


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The machines, versions and commits that differ; a load is no difference."""
    said = [f"a: {first['date']} `{first['command']}`", f"b: {second['date']} `{second['command']}`"]
    if first.get("commit") != second.get("commit"):
        said.append(f"commit: {first.get('commit')} in a, {second.get('commit')} in b")
    for kind in ("machine", "versions"):
        for key in dict.fromkeys([*first[kind], *second[kind]]):
            mine, theirs = first[kind].get(key, "none"), second[kind].get(key, "none")
            if mine != theirs:
                said.append(f"{key}: {mine} in a, {theirs} in b")
    return said
