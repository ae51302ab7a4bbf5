"""`odc status`: what every rank on this host is doing, and every rank of the same jobs on other hosts."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from odc.errors import ConfigError
from odc.launchers import parent_of

if TYPE_CHECKING:
    from odc.runtime.daemon import RankStatus

_MIB = float(1 << 20)
_EVERY_S = 1.0


def status(
    job: Annotated[
        int | None, Option(help="Only ranks that this process started, as the column `job` says.", show_default="all")
    ] = None,
    watch: Annotated[bool, Option("--watch", help="Ask again every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what every rank of the jobs on this host is doing, from another terminal.

    mb: microbatches that the rank has begun in this epoch. in/out MiB: fetched and pushed since the start. saved: MiB
    of shards that it did not have to read from other hosts, because they had not changed, or their changes were read.
    slots: staging slots of its peers' gradients that its server has yet to add, of how many. waits for: a rank.

    In a job that survives deaths also gen: its generation, and in brackets how often this process has gone back. kept:
    the newest step whose state the rank has kept.

    Ranks of these jobs on other hosts are shown as this host knows them, at most some tenths of a second late.
    """
    from rich.console import Console

    if as_json and watch:
        raise ConfigError("--watch shows a table: leave out --json")
    if as_json:
        answers = [{"job": started_by(one.pid)} | vars(one) | _nowhere(one) for one in _asked(job)]
        print(json.dumps(answers, indent=2))
    elif watch:
        _watch(job)
    else:
        Console().print(_shown(_asked(job), job), highlight=False)


def _watch(job: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    try:
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                live.update(_shown(_asked(job), job), refresh=True)
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return


def _asked(job: int | None) -> list[RankStatus]:
    from odc.runtime.daemon import ask_all

    answers = sorted(ask_all(), key=lambda answer: (started_by(answer.pid) or 0, answer.rank, answer.pid))
    return [answer for answer in answers if job is None or started_by(answer.pid) == job]


def started_by(pid: int) -> int | None:
    """The process that started `pid` (torchrun, or what `odc train` forks ranks from): the ranks of a job share it."""
    try:
        return parent_of(pid)
    except OSError:
        return None


def _shown(answers: list[RankStatus], job: int | None) -> Any:
    if not answers:
        return (
            f"no rank of job {job} runs on this host"
            if job is not None
            else "no odc job of this user runs on this host"
        )
    return table(answers)


def _nowhere(answer: RankStatus) -> dict[str, None]:
    """A rank on another host has no process here."""
    return {"pid": None} if answer.elsewhere else {}


def table(answers: list[RankStatus]) -> Any:
    """A rich table of `answers`, which 80 columns hold: empty columns are left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    roots = [root for answer in answers for root in answer.roots]
    several = any(len(answer.roots) > 1 for answer in answers)
    queued = any(root.get("queue") is not None for root in roots)
    hosts = any(root.get("hosts", 1) > 1 for root in roots)
    survives = any(answer.recovery is not None for answer in answers)
    heads = ["job", *["host"] * hosts, "rank", "pid", *["gen", "kept"] * survives, *["root"] * several]
    heads += ["epoch", "state", "mb"]
    saves = any(root.get("saved_bytes") for root in roots)
    heads += [*["claimed"] * queued, "in/out MiB", *["saved"] * saves, "slots", "waits for"]
    made = Table(*heads, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    troubles = []
    for answer in answers:
        pid = "-" if answer.elsewhere else str(answer.pid)
        job, who = str(started_by(answer.pid) or "-"), [str(answer.rank), pid, *_recovery(answer) * survives]
        if answer.error is not None:
            troubles.append(f"rank {answer.rank}, process {answer.pid}: {answer.error}")
        if answer.error is not None or not answer.roots:
            state = "no answer" if answer.error is not None else "no root yet"
            if answer.recovery is not None and answer.recovery["connecting"]:
                state = "connecting"
            row = [job, *["-"] * hosts, *who, *["-"] * several, "-", state]
            made.add_row(*row, *["-"] * (len(heads) - len(row)))
        for root in answer.roots:
            host = [str(root.get("host", "-"))] * hosts
            made.add_row(
                job,
                *host,
                *who,
                *[root["root"]] * several,
                *_row(root, queued, saves, digits=0 if hosts or survives else 1),
            )
    return Group(made, *map(Text, troubles))


def _recovery(answer: RankStatus) -> list[str]:
    """Generation, how often the process has gone back, and the newest kept step."""
    found = answer.recovery
    if found is None:
        return ["-", "-"]
    times = f" ({found['recoveries']})" if found["recoveries"] else ""
    return [f"{found['generation']}{times}", "-" if found["kept"] is None else str(found["kept"])]


def _row(root: dict[str, Any], queued: bool, saves: bool, digits: int) -> list[str]:
    waits = "-" if root["waits_for"] is None else f"{root['waits_for']} (epoch {root['waits_in_epoch']})"
    return [
        *map(str, (root["epoch"], root["state"], root["microbatch"])),
        *[_claimed(root.get("queue"))] * queued,
        f"{root['fetched_bytes'] / _MIB:.{digits}f}/{root['pushed_bytes'] / _MIB:.{digits}f}",
        *[f"{root.get('saved_bytes', 0) / _MIB:.{digits}f}"] * saves,
        f"{root['slots_in_use']}/{root['slots']}" if "slots" in root else "-",
        waits,
    ]


def _claimed(queue: dict[str, int | None] | None) -> str:
    """Microbatches of the queue that this rank has claimed, that all ranks have, and how many there are."""
    if queue is None:
        return "-"
    if queue["total"] is None:
        return f"offers {queue['offered']}"
    return f"{queue['claimed']} (all: {queue['handed_out']}/{queue['total']})"
