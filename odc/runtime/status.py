"""Asking the daemons of this host how their ranks are doing.

Chose to find jobs by the names of their doors in the kernel's table of abstract sockets: nothing has to be configured,
and nothing is left behind by a job that was killed. A door answers only its own user; the answer is made by the daemon,
so it comes also while the rank computes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from odc.runtime.daemon import DOOR_PREFIX
from odc.runtime.listener import knock, list_doors

_DOOR = re.compile(r"(?P<rank>\d+)\.(?P<pid>\d+)\.\w+")


@dataclass(frozen=True)
class RankStatus:
    """One rank's answer: `roots` as in `Service.status`; `error` instead if it did not answer."""

    rank: int
    pid: int
    roots: list[dict[str, Any]]
    error: str | None = None


def ask_all(timeout_s: float = 2.0) -> list[RankStatus]:
    """The status of every odc rank of this user on this host, by rank; waits `timeout_s` for each at most."""
    found = []
    prefix = f"{DOOR_PREFIX}{os.getuid()}."
    for name in list_doors(prefix):
        named = _DOOR.fullmatch(name.removeprefix(prefix))
        if named is None:  # anybody may listen at any name
            continue
        rank, pid = int(named["rank"]), int(named["pid"])
        try:
            answer = knock(name, {"op": "status"}, timeout_s)
            found.append(RankStatus(rank, pid, list(answer.reply["roots"])))
        except (OSError, KeyError, TypeError) as error:  # no answer, or not one of odc's
            found.append(RankStatus(rank, pid, [], f"{type(error).__name__}: {error}"))
    return sorted(found, key=lambda status: (status.rank, status.pid))
