"""What rank 0 shows while a job runs: a live rich line in a terminal, else at most one plain line in two seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import IO, Any

_LINE_EVERY_S = 2.0


class Progress:
    """Shows phases and steps of one job on `stream` (default: standard error), with `label` in front."""

    def __init__(self, steps: int, label: str = "", shown: bool = True, stream: IO[str] | None = None) -> None:
        self._steps, self._label = steps, label or "odc train"
        self._stream = stream if stream is not None else sys.stderr
        self._started = time.monotonic()
        self._last_line = -_LINE_EVERY_S
        self._live: Any = None
        self.show(shown)

    def show(self, shown: bool) -> None:
        """Show what comes from now on, or nothing of it."""
        if shown and self._live is None and self._stream.isatty():
            self._live = _live_line(self._stream, self._steps, self._label)
        elif not shown:
            self.close()
        self._shown = shown

    def phase(self, text: str) -> None:
        """Shows what the job does now."""
        self._show(text)

    def step(self, step: int, loss: float, tokens_per_s: float, bubble: float | None) -> None:
        """Shows a finished step: its mean loss per token, real tokens a second over all ranks, measured bubble."""
        idle = "" if bubble is None else f"  bubble {bubble:.1%}"
        text = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s{idle}"
        now = time.monotonic()
        milestone = step == self._steps or step % max(1, self._steps // 10) == 0
        if self._live is not None:
            self._show(text, completed=step)
        elif milestone or now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self._show(f"step {step}/{self._steps}  {text}")

    def note(self, text: str) -> None:
        """Shows a text that must not be lost: it stays above the live line."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._show(text)

    def close(self) -> None:
        """Ends the live line and leaves its last state on the terminal. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live, self._shown = None, False

    def _show(self, text: str, completed: int | None = None) -> None:
        if self._live is not None:
            self._live.update(self._live.task_ids[0], note=text, completed=completed)
        elif self._shown:
            seconds = time.monotonic() - self._started
            print(f"{self._label} [{seconds:5.1f} s] {text}", file=self._stream, flush=True)


def end_killed_line(stream: IO[str]) -> None:
    """Shows the cursor again, which a live line hides, where the process that had one may have been killed."""
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or closed
        if stream.isatty():
            stream.write("\x1b[?25h\n")
            stream.flush()


def _live_line(stream: IO[str], steps: int, label: str) -> Any:
    """A started rich progress with one task."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    named, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
    columns = (named, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), note)
    live = Progress(*columns, console=Console(file=stream))
    live.add_task(label, total=steps, note="starting")
    live.start()
    return live
