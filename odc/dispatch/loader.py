"""Planning ahead: a thread draws a batch, gathers its lengths and plans while the step before computes.

The thread competes for the interpreter lock and, without a spare core, for time; `Overlap` measures what was saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Generic, TypeVar

from odc.dispatch.orchestrator import Orchestrator, OwnPlan
from odc.dispatch.records import Records
from odc.worker import Job, Worker

B = TypeVar("B")


@dataclass
class Overlap:
    """What planning ahead saved, in seconds on this rank."""

    steps: int = 0  # planned and handed out
    planning_s: float = 0.0  # gathering records and planning, on the loader's thread; waits for slower ranks included
    waited_s: float = 0.0  # that the training loop waited for a planned batch, drawing it included

    @property
    def hidden_s(self) -> float:
        """Planning that the loop did not wait for; a lower bound."""
        return max(0.0, self.planning_s - self.waited_s)


@dataclass(frozen=True)
class _Raised:
    """Stands for the batch that could not be drawn. None is drawn after it."""

    error: Exception


def _drawing(batches: Iterable[B | _Raised]) -> Iterator[B | _Raised]:
    try:
        yield from batches
    except Exception as error:
        yield _Raised(error)


class PlannedLoader(Generic[B]):
    """Iterates over (batch, plan), planned ahead. Every rank iterates over the same number of batches.

    What `batches` or `records_of` raises refuses the step on every rank, and nothing else may plan with the
    orchestrator meanwhile. `ahead` batches are planned before they are asked for. What the thread raises is raised by
    the iteration, in its place. Ranks that leave the loop early leave it after the same batch; what was planned ahead
    by then is planned all the same, so that the orchestrators stay at the same step. A new loop goes on after it;
    before anything else does, call `close`. Where `batches` is an iterator, which cannot begin again, the new loop
    plans once more the batches drawn ahead by the loop before it, and loses none.
    """

    def __init__(
        self, batches: Iterable[B], records_of: Callable[[B], Records], orchestrator: Orchestrator, *, ahead: int = 1
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1 batch, not {ahead!r}")
        self._batches, self._records_of, self._orchestrator, self._ahead = batches, records_of, orchestrator, ahead
        self.overlap, self._worker = Overlap(), Worker("odc-plan")
        self._drawn = deque[B | _Raised]()  # batches that the latest loop has drawn and not handed out, in order

    def __iter__(self) -> Iterator[tuple[B, OwnPlan]]:
        left, self._drawn = self._drawn, deque[B | _Raised]()
        drawn, ahead = self._drawn, deque[Job[tuple[B, OwnPlan] | None]]()
        plans = self._plans(left, drawn)
        while True:
            while len(ahead) <= self._ahead + 1:  # `ahead` that are ready, one in the works, and the next one
                ahead.append(Job(lambda: next(plans, None)))
                self._worker.submit(ahead[-1])
            began = perf_counter()
            try:
                found = ahead.popleft().wait()
            finally:
                if drawn:
                    drawn.popleft()  # handed out, or its error is raised
            if found is None:
                return
            self.overlap.waited_s += perf_counter() - began
            self.overlap.planning_s += found[1].planning_s
            self.overlap.steps += 1
            yield found

    def close(self, within_s: float = 600.0) -> None:
        """Wait so long for what is planned ahead of a loop that was left early; until then the exchange is in use."""
        self._worker.close(within_s)
        self._worker = Worker("odc-plan")

    def _plans(self, left: deque[B | _Raised], drawn: deque[B | _Raised]) -> Iterator[tuple[B, OwnPlan]]:
        """On the worker's thread; ends with the first error. `left` grows until the first batch is asked for."""
        for batch, records in self._recorded(left, drawn):
            yield batch, self._orchestrator.plan(records)

    def _recorded(self, left: deque[B | _Raised], drawn: deque[B | _Raised]) -> Iterator[tuple[B, Records]]:
        again = tuple(left) if isinstance(self._batches, Iterator) else ()
        try:
            for batch in _drawing(chain(again, self._batches)):
                drawn.append(batch)
                if isinstance(batch, _Raised):
                    raise batch.error
                yield batch, self._records_of(batch)
        except Exception as error:
            self._orchestrator.refuse(f"{type(error).__name__}: {error}")
            raise
