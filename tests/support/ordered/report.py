"""Conflicts as text: each pair of accesses once, with where in odc each was asked for, and in what memory they meet."""

from __future__ import annotations

from collections.abc import Sequence

from support.ordered.judge import Conflict, Judge, What
from support.ordered.log import Logs

_DOES = ("reads", "writes", "adds atomically to")


def report(judge: Judge, logs: Logs, conflicts: Sequence[Conflict]) -> list[str]:
    """A text for each pair of accesses that nothing orders."""
    found: dict[tuple[str, str, str], list[Conflict]] = {}
    for one in conflicts:
        key = _access(judge, logs, one.earlier), _access(judge, logs, one.later), _memory(judge, logs, one)
        found.setdefault(key, []).append(one)
    return [
        f"nothing orders two accesses to {memory}, bytes {ones[0].start} to {ones[0].end}"
        + (f" ({len(ones)} times)" if len(ones) > 1 else "")
        + f":\n    {earlier}\n    {later}"
        for (earlier, later, memory), ones in found.items()
    ]


def _access(judge: Judge, logs: Logs, what: What) -> str:
    log, process = logs.processes[what.process], judge.processes[what.process]
    who = log.name(process.names.get(("process", 0), 0)) or f"process {log.pid}"
    thread = log.name(process.names.get(("thread", what.thread), 0)) or (
        "the main thread" if what.thread == log.pid else f"thread {what.thread}"
    )
    where = ""
    for (kind, number), agent in process.agents.items():
        if agent == what.agent and kind == "stream":
            where = f", {log.name(process.names.get((kind, number), 0)) or f'stream {number}'}"
    site = log.name(what.site)
    return f"{who}{where}: {log.name(what.name) or 'the host'} {_DOES[what.mode]} it, asked for by {thread}" + (
        f" at or after {site}" if site else ""
    )


def _memory(judge: Judge, logs: Logs, conflict: Conflict) -> str:
    for start, end, process, name in judge.regions.get(conflict.memory, ()):
        if start <= conflict.start < end:
            return logs.processes[process].name(name)
    return "memory that is no region of a heap"
