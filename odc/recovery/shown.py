"""What others see of this rank's recoveries: `odc status` while the job runs, and the trace afterwards."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from odc.runtime.daemon import daemon, process_status, stop_daemon
from odc.trace import RECOVERY, recorder

_STATUS = "recovery"  # in what the daemon answers


class ShownRecovery:
    """Written by the rank's main thread; the daemon's reads."""

    def __init__(self, rank: int) -> None:
        self._fields: dict[str, Any] = {"generation": 0, "recoveries": 0, "kept": None, "connecting": True}
        self._reason, self._culprit = "a new process takes the place of one that has ended", rank
        self._began = time.monotonic_ns()
        self._show()

    @contextlib.contextmanager
    def answering(self, rank: Callable[[], int]) -> Iterator[None]:
        """Around the entry into a generation: answer `odc status` meanwhile. `rank` may be another one after it."""
        daemon(rank())
        yield
        if daemon(rank()).rank != rank():
            stop_daemon()

    def lost(self, reason: str, culprit: int) -> None:
        """A rank is lost, and this one goes back."""
        self._reason, self._culprit, self._began = reason, culprit, time.monotonic_ns()
        self._show(connecting=True, recoveries=self._fields["recoveries"] + 1)

    def met(self, generation: int) -> None:
        """The ranks have met."""
        self._show(connecting=False, generation=generation)

    def kept(self, step: int) -> None:
        """This rank has kept its state after `step`."""
        self._show(kept=step)

    def gone_back(self, step: int) -> None:
        """The state after `step` is restored: the recovery is over, and comes into the trace."""
        where = f"generation {self._fields['generation']}, back to step {step}"
        recorder().add(RECOVERY, self._began, unit=f"{where}: {self._reason}", peer=self._culprit, lane=RECOVERY)
        self._show(kept=step)

    def _show(self, **changes: Any) -> None:
        self._fields = process_status[_STATUS] = self._fields | changes

    def close(self) -> None:
        """Show nothing any more. Idempotent."""
        if process_status.get(_STATUS) is self._fields:
            del process_status[_STATUS]


class TracedPlace:
    """A rank's place in its trace, kept with its state: a minibatch that is done again has the number it had."""

    def state_dict(self) -> dict[str, Any]:
        return {"newest": recorder().newest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        recorder().go_back(state["newest"])
