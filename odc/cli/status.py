"""`odc status`: what every rank on this host is doing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

if TYPE_CHECKING:
    from odc.runtime.daemon import RankStatus

_MIB = float(1 << 20)


def status(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """Show what every rank of the jobs on this host is doing, from another terminal."""
    from odc.runtime.daemon import ask_all  # loads torch

    answers = ask_all()
    if as_json:
        print(json.dumps([vars(answer) for answer in answers], indent=2))
        return
    from rich.console import Console

    if not answers:
        Console().print("no odc job of this user runs on this host")
        return
    Console().print(table(answers))


def table(answers: list[RankStatus]) -> Any:
    """A rich table of `answers`."""
    from rich.table import Table

    heads = ("rank", "pid", "root", "epoch", "state", "microbatch", "claimed", "fetched MiB", "pushed MiB", "slots")
    made = Table(*heads, "waits for", title="odc status")
    for answer in answers:
        if answer.error is not None or not answer.roots:
            state = answer.error or "no root yet"
            made.add_row(str(answer.rank), str(answer.pid), "-", "-", state, *["-"] * 6)
        for root in answer.roots:
            made.add_row(*_row(answer, root))
    return made


def _row(answer: RankStatus, root: dict[str, Any]) -> list[str]:
    waits = "-" if root["waits_for"] is None else f"rank {root['waits_for']} (epoch {root['waits_in_epoch']})"
    return [
        *map(str, (answer.rank, answer.pid, root["root"], root["epoch"], root["state"], root["microbatch"])),
        _claimed(root.get("queue")),
        f"{root['fetched_bytes'] / _MIB:.1f}",
        f"{root['pushed_bytes'] / _MIB:.1f}",
        f"{root['slots_in_use']}/{root['slots']}",
        waits,
    ]


def _claimed(queue: dict[str, int | None] | None) -> str:
    """Microbatches of the queue that this rank has claimed, that all ranks have, and how many there are."""
    if queue is None:
        return "-"
    if queue["total"] is None:
        return f"offers {queue['offered']}"
    return f"{queue['claimed']} (all: {queue['handed_out']}/{queue['total']})"
