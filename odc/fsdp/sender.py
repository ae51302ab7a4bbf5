"""Sending a unit's gradients while backward goes on: at most two units wait; a third makes backward wait."""

from __future__ import annotations

from collections.abc import Sequence

from odc.errors import OdcError
from odc.memory import HostLanes, Lanes
from odc.protocol import Gradient, Pusher, UnitSpec
from odc.trace import PUSH, recorder
from odc.worker import Job, Worker

_UNITS_WAITING = 2
_HOST = HostLanes()


class Sender:
    """Pushes of one root, in the order of `send`: on a thread with `overlap`, else posted when `send` returns."""

    def __init__(self, pusher: Pusher, overlap: bool, lanes: Lanes = _HOST) -> None:
        self._pusher, self._lanes = pusher, lanes
        self._worker = Worker("odc-send", _UNITS_WAITING) if overlap else None
        self._jobs: list[Job[None]] = []

    def send(self, unit: UnitSpec, gradients: Sequence[Gradient], *, last: bool = False) -> None:
        """Push `gradients` of `unit`, the `last` ones of a minibatch or not; raises what an earlier push raised."""
        begin = recorder().now()
        lane = "main" if self._worker is None else "push"
        lanes = self._lanes
        computed = lanes.mark()

        def push() -> None:
            start = recorder().now_on(lane)
            with lanes.lane("push"):
                lanes.follow(computed)
                nbytes = self._pusher.push(unit, gradients)  # settled when it returns: the gradients may go
                if last:
                    self._pusher.end((unit,))
            recorder().add(PUSH, start, unit=unit.name, nbytes=nbytes, lane=lane)

        job = Job(push)  # never run by two threads: pushes keep their order, and a ring has one producer
        if self._worker is None:
            job.result()
            return
        for earlier in [job for job in self._jobs if job.over()]:
            self._jobs.remove(earlier)
            earlier.wait()
        try:
            self._jobs.append(job)  # first: where a signal's handler raises, `flush` has to wait for what has begun
            self._worker.submit(job)
        except BaseException:
            job.drop()
            raise
        recorder().add(PUSH, begin, unit=unit.name)

    def flush(self) -> None:
        """Return when everything sent is posted or has failed; raises what a push raised, an `OdcError` first.

        What a signal's handler raises ends the wait; the next call takes it up.
        """
        begin = recorder().now()
        for job in self._jobs:
            job.over(None)
        errors = [job.error for job in self._jobs if job.error is not None]
        if self._jobs:
            recorder().add(PUSH, begin)
        errors.sort(key=lambda error: not isinstance(error, OdcError))
        self._jobs = []  # a signal's handler that raises before this loses no error, and none can run after it
        if errors:
            raise errors[0]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
