"""Starts this host's ranks of a job, mostly all of them, and names the rank to blame when the job fails.

A rank has the environment that `torchrun` gives its workers. Ranks are forked from a process that has loaded what they
need (`odc.ranks`): a second launch starts in a second. They end with this process, however it ends.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from odc.deadlines import RESTART_FIRST_PAUSE_S, RESTART_LONGEST_PAUSE_S, Backoff, Deadline
from odc.errors import OdcError
from odc.experiments.progress import end_killed_line
from odc.ranks.processes import ForkServer, RankOutcome, RankProcesses, fork_server, host_store, task

_CONSEQUENCES = ("PeerLostError", "WaitTimeoutError", "DistBackendError", "DistNetworkError", "DistStoreError")
_PRELOADED = ("odc.experiments.job", "odc.experiments.text.step", "odc.fsdp", "transformers.modeling_utils")
_FOREVER_S = 10 * 365 * 24 * 3600.0
_DEATH = "the process"  # begins the message for a rank that ended without one of its own
_GRACE_S = 1.0  # for the other ranks to send what they saw, once one has failed

_log = logging.getLogger(__name__)


class JobFailedError(OdcError):
    """A rank of a job failed. `failures` has (rank, message) with the culprit first, `tracebacks` each rank's own."""

    def __init__(self, failures: list[tuple[int, str]], tracebacks: dict[int, str]) -> None:
        first, *others = failures
        more = "".join(f"\n  then rank {rank}: {_short(message)}" for rank, message in others)
        super().__init__(f"rank {first[0]} failed: {first[1]}{more}")
        self.failures = failures
        self.tracebacks = tracebacks


@dataclass(frozen=True)
class LaunchSite:
    """The ranks that one host starts: `ranks` of `world`, on host `host` of `hosts`; all meet at the store there."""

    ranks: range
    world: int
    address: str
    port: int
    host: int = 0
    hosts: int = 1
    restarts: int = 0  # of ranks that have ended

    def environment(self, rank: int) -> dict[str, str]:
        """What `torchrun` would set for a rank."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - self.ranks.start),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(self.restarts),
            "TORCHELASTIC_RUN_ID": f"odc-{self.port}",
        }


def launch(
    entry: Callable[..., Any],
    *args: Any,
    ranks: int,
    site: LaunchSite | None = None,
    restarts: int = 0,
    fewest: int | None = None,
) -> list[Any]:
    """Runs `entry(*args)` in `ranks` new processes, or in those of `site`; returns what each returned, in rank order.

    `entry` must be a module-level function; `args` and results must pickle. Blocks until all ranks have ended; on
    return or raise none lives. Raises `JobFailedError` when a rank raises or dies.

    So often as `restarts` says, a new process takes the place of a rank that raises or dies, for an `entry` that goes
    on from what the other ranks hold (docs/recovery.md): at once, and after a pause that doubles where the process
    before has kept no step either. Once these are used up, ranks that fail are left out, and bring no result, as long
    as `fewest` stay.
    """
    server = start_server()
    if site is None:
        store = host_store()  # it is there until this function returns
        site = LaunchSite(range(ranks), ranks, "127.0.0.1", store.port, restarts=restarts)
    processes = RankProcesses(server, site.ranks, environment=site.environment, once=True, quiet=True)
    lives = Lives(restarts)
    try:
        processes.send(task(entry, *args))
        while not processes.answers(_FOREVER_S, 0.0):
            if lives.left:
                _replace(processes, lives)
            elif fewest is not None and sum(not one.left_out for one in processes.outcomes) > fewest:
                _leave_out(processes)
            else:
                break
        if processes.answers(_FOREVER_S, _GRACE_S):
            processes.ended(_FOREVER_S)
        failures = _failures(processes.outcomes)
        if failures:
            tracebacks = {outcome.rank: outcome.trace for outcome in processes.outcomes if outcome.trace}
            stuck = {outcome.rank for outcome in processes.outcomes if not outcome.progressed}
            raise JobFailedError(
                [(rank, why + lives.before(rank) * (rank in stuck)) for rank, why in failures], tracebacks
            )
        return [outcome.value for outcome in processes.outcomes if not outcome.left_out]
    except BaseException:
        processes.close()  # first: what rank 0 still writes comes before
        end_killed_line(sys.stderr)
        raise
    finally:
        processes.close()


class Lives:
    """Restarts that are left, and of each rank why its processes have ended since the last that kept a step."""

    def __init__(self, restarts: int) -> None:
        self.left = restarts
        self._ends: dict[int, list[str]] = {}
        self._pauses: dict[int, Backoff] = {}

    def ended(self, rank: int, why: str, progressed: bool) -> float:
        """One restart less; returns the seconds to wait before it. `progressed`: the process kept a step."""
        self.left -= 1
        ends = self._ends[rank] = [why] if progressed else [*self._ends.get(rank, []), why]
        if len(ends) == 1:
            self._pauses[rank] = Backoff(RESTART_FIRST_PAUSE_S, RESTART_LONGEST_PAUSE_S, growth=2.0)
            return 0.0
        return self._pauses[rank].advance()

    def before(self, rank: int) -> str:
        """For the message of a failure: how often the rank had ended before it, and why; mostly empty."""
        if not (ends := self._ends.get(rank)):
            return ""
        how_often = {1: "once", 2: "twice"}.get(len(ends), f"{len(ends)} times")
        each = "; ".join(_short(why) for why in dict.fromkeys(ends))
        return f"\n  it had ended {how_often} before, without a step kept between: {each}"


def _first_ended(processes: RankProcesses) -> tuple[RankOutcome, str]:
    """The first rank that has failed, once its process has ended, and why."""
    failed = next(outcome for outcome in processes.outcomes if outcome.failed)
    while failed.exit_code is None:
        processes.receive(0.5)
    ((_, why),) = _failures([failed])
    return failed, why


def _leave_out(processes: RankProcesses) -> None:
    """The ranks go on without the first that has failed."""
    failed, why = _first_ended(processes)
    failed.left_out = True
    _log.warning("rank %d has ended: %s; the others go on without it", failed.rank, why)


def _replace(processes: RankProcesses, lives: Lives) -> None:
    """Starts a process for the first rank that has failed, once its own has ended and its pause is over."""
    failed, why = _first_ended(processes)
    rank = failed.rank
    pause_s = lives.ended(rank, why, failed.progressed)
    when = f" in {pause_s:g} s" if pause_s else ""
    _log.warning(
        "rank %d has ended: %s; a new process takes its place%s (%d restarts left)", rank, why, when, lives.left
    )
    deadline = Deadline(pause_s)
    while not deadline.passed():
        processes.receive(max(0.0, deadline.remaining()))
    processes.replace(rank)


def start_server() -> ForkServer:
    """Starts the process that ranks are forked from, if it does not run yet; `launch` does it. Does not wait."""
    return fork_server((), _PRELOADED)


def _failures(outcomes: list[RankOutcome]) -> list[tuple[int, str]]:
    """Ranks and why they failed, as `by_blame` orders them; those of equal blame by time."""
    found: list[tuple[float, int, str]] = []
    for outcome in [one for one in outcomes if not one.left_out]:
        if outcome.error is None or outcome.error == "SystemExit":
            code = outcome.exit_code or 0 if outcome.error is None else outcome.message
            if outcome.failed or code:
                found.append((0.0, outcome.rank, _ended(code)))
            continue
        found.append((outcome.at, outcome.rank, f"{outcome.error}: {outcome.message}"))
    return by_blame((rank, text) for _, rank, text in sorted(found))


def by_blame(failures: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Deaths first, then errors of a rank's own, then those that only report that a peer is gone."""

    def severity(failure: tuple[int, str]) -> int:
        text = failure[1]
        if text.startswith(_DEATH):
            return 0
        return 2 if any(name in text for name in _CONSEQUENCES) else 1

    return sorted(failures, key=severity)


def _ended(code: int | str) -> str:
    if isinstance(code, int) and code < 0:
        return f"{_DEATH} was killed by {signal.Signals(-code).name}"
    return f"{_DEATH} exited with code {code} and left no message"


def _short(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else "no message"
    return line if len(line) <= 200 else line[:197] + "..."
