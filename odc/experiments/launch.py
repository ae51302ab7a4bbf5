"""Starts the ranks of a job on this machine and says which rank was to blame when it failed.

A rank has the environment that `torchrun` gives its workers. Ranks are forked from a process that has loaded what they
need (`odc.ranks`): a second launch starts in a second. They end with this process, however it ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from odc.errors import OdcError
from odc.ranks.processes import ForkServer, RankOutcome, RankProcesses, fork_server, host_store, task

_CONSEQUENCES = ("PeerLostError", "WaitTimeoutError", "DistBackendError", "DistNetworkError", "DistStoreError")
_PRELOADED = ("odc.experiments.job", "odc.experiments.text.workload", "odc.fsdp", "transformers.modeling_utils")
_FOREVER_S = 10 * 365 * 24 * 3600.0
_GRACE_S = 1.0  # for the other ranks to say what they saw, once one has failed


class JobFailedError(OdcError):
    """A rank of a job failed. `failures` has (rank, message) with the culprit first, `tracebacks` each rank's own."""

    def __init__(self, failures: list[tuple[int, str]], tracebacks: dict[int, str]) -> None:
        first, *others = failures
        more = "".join(f"\n  then rank {rank}: {_short(message)}" for rank, message in others)
        super().__init__(f"rank {first[0]} failed: {first[1]}{more}")
        self.failures = failures
        self.tracebacks = tracebacks


def launch(entry: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
    """Runs `entry(*args)` in `ranks` new processes and returns what each returned, in rank order.

    `entry` must be a module-level function; `args` and results must pickle. Blocks until all ranks have ended; on
    return or raise none lives. Raises `JobFailedError` when a rank raises or dies.
    """
    server, store = start_server(), host_store()
    processes = RankProcesses(
        server, range(ranks), environment=lambda rank: _environment(rank, ranks, store.port), once=True, quiet=True
    )
    try:
        processes.send(task(entry, *args))
        if processes.answers(_FOREVER_S, _GRACE_S):
            processes.ended(_FOREVER_S)
        failures = _failures(processes.outcomes)
        if failures:
            tracebacks = {outcome.rank: outcome.trace for outcome in processes.outcomes if outcome.trace}
            raise JobFailedError(failures, tracebacks)
        return [outcome.value for outcome in processes.outcomes]
    finally:
        processes.close()


def start_server() -> ForkServer:
    """Starts the process that ranks are forked from, if it does not run yet; `launch` does it. Does not wait."""
    return fork_server((), _PRELOADED)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"odc-{port}",
    }


def _failures(outcomes: list[RankOutcome]) -> list[tuple[int, str]]:
    """Ranks and why they failed: deaths first, then errors of their own, then errors that only say a peer is gone."""
    found: list[tuple[tuple[int, float], int, str]] = []
    for outcome in outcomes:
        if outcome.error is None or outcome.error == "SystemExit":
            code = outcome.exit_code or 0 if outcome.error is None else outcome.message
            if outcome.failed or code:
                found.append(((0, 0.0), outcome.rank, _ended(code)))
            continue
        text = f"{outcome.error}: {outcome.message}"
        consequence = any(name in text for name in _CONSEQUENCES)
        found.append(((2 if consequence else 1, outcome.at), outcome.rank, text))
    return [(rank, text) for _, rank, text in sorted(found)]


def _ended(code: int | str) -> str:
    if isinstance(code, int) and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process exited with code {code} and left no message"


def _short(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else "no message"
    return line if len(line) <= 200 else line[:197] + "..."
