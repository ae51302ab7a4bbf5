"""What rank 0 shows while a job runs: a live rich line in a terminal, else at most one plain line in two seconds."""

from __future__ import annotations

import sys
import time
from typing import IO, Any

_LINE_EVERY_S = 2.0


class Progress:
    """Shows phases and steps of one job on `stream` (default: standard error), with `label` in front."""

    def __init__(self, steps: int, label: str = "", shown: bool = True, stream: IO[str] | None = None) -> None:
        self.steps = steps
        self.label = label or "odc train"
        self.shown = shown
        self.stream = stream if stream is not None else sys.stderr
        self.started = time.monotonic()
        self._last_line = -_LINE_EVERY_S
        self._live: Any = None
        self._task: Any = None
        if shown:
            self._live, self._task = _live_bar(self.stream, steps, self.label)

    def phase(self, text: str) -> None:
        if self._live is not None:
            self._live.update(self._task, note=text)
        else:
            self._line(text)

    def step(self, step: int, loss: float, tokens_per_s: float, bubble: float | None) -> None:
        """Shows a finished step: its mean loss per token, real tokens a second over all ranks, measured bubble."""
        idle = "" if bubble is None else f"  bubble {bubble:.1%}"
        text = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s{idle}"
        if self._live is not None:
            self._live.update(self._task, completed=step, note=text)
            return
        now = time.monotonic()
        milestone = step == self.steps or step % max(1, self.steps // 10) == 0
        if milestone or now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self._line(f"step {step}/{self.steps}  {text}")

    def note(self, text: str) -> None:
        """Shows a text that must not be lost: it stays above the live line."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._line(text)

    def close(self) -> None:
        """Ends the live line and leaves its last state on the terminal. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self.shown = False

    def _line(self, text: str) -> None:
        if self.shown:
            print(f"{self.label} [{time.monotonic() - self.started:5.1f} s] {text}", file=self.stream, flush=True)


def _live_bar(stream: IO[str], steps: int, label: str) -> tuple[Any, Any]:
    """A started rich progress and its task, or (None, None) where there is no terminal or no rich."""
    if not stream.isatty():
        return None, None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        return None, None
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    live = Progress(*columns, console=Console(file=stream))
    task = live.add_task(label, total=steps, note="starting")
    live.start()
    return live, task
