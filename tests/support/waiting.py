"""The one way in which tests wait for a condition of this process; `RankProcesses.until` waits for one of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0  # on a busy machine


def until(
    holds: Callable[[], object], what: str | Callable[[], str] = "a condition", within_s: float = PATIENCE_S
) -> None:
    """Return once `holds()` is true; fail, naming `what` was waited for, when that takes too long."""
    end = time.monotonic() + within_s
    while not holds():
        late = time.monotonic() > end
        assert not late, f"waited {within_s:g} s for {what() if callable(what) else what}"
        time.sleep(0.001)
