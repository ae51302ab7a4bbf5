"""Microbatches pulled and prepared shortly before they are used, not all at the start of a step.

Chose one background thread and a bound on how many prepared microbatches may lie in wait over pulling them all at the
first: with many microbatches a step inputs take a fraction of the memory, and in RL a sample is as young as it can be
when it is used (Fast-LLM issue 510). The price is a thread that competes for the interpreter, and that nothing about a
later microbatch is known when an earlier one runs: what a loss is divided by has to wait (see `normalize`).

All of it is recorded in the trace, from which `input_figures` reads memory, ages and waiting.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from odc.errors import WaitTimeoutError
from odc.trace import FETCH, MAIN, recorder

T = TypeVar("T")

#: Units of spans. The training thread waits for INPUTS; the others are also the names of their lanes.
INPUTS, PREPARE, HELD, AGE = "inputs", "inputs prepared", "inputs held", "input age"


class _Prepared(NamedTuple):
    """A microbatch in wait: when its sample was made and it was ready, and how much memory it takes."""

    item: Any
    born_ns: int
    ready_ns: int
    nbytes: int


class _Failed(NamedTuple):
    error: BaseException


class LazyMicrobatches(Iterator[T], Generic[T]):
    """Iterates over `prepare(raw)` for each raw microbatch of `source`, prepared `prefetch` ahead of use.

    Args:
        source: raw microbatches, pulled one at a time, on one thread.
        prepare: what makes one usable: masks, positions, transfer to the device, a reference model's forward.
        prefetch: most microbatches prepared and not yet asked for. 0: each when it is asked for. None: all of them
            before the first, the eager way.
        background: prepare on a thread of its own. False: on the caller's, which then prepares `prefetch` more before
            it gets one; needed where `prepare` calls a model sharded by odc or FSDP2, which only the training thread
            may.
        born: when the sample of a raw microbatch was made (its oldest, of several), in seconds of `time.monotonic`,
            which all processes of a host share. Without, its age counts from when it was pulled.
        timeout_s: longest wait for one microbatch.

    An exception of `source` or `prepare` is raised where its microbatch would have come, after those before it.
    Used on one thread, once; `close` (or leaving a `with`) ends it early. Synchronizes with no other rank. On CUDA the
    background thread queues its copies on the default stream, ahead of the compute that follows.
    """

    def __init__(
        self,
        source: Iterable[Any],
        prepare: Callable[[Any], T],
        *,
        prefetch: int | None = 1,
        background: bool = True,
        born: Callable[[Any], float] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if prefetch is not None and (not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0):
            raise ValueError(f"prefetch must be a whole number, 0 or more, or None for all, not {prefetch!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive seconds, not {timeout_s!r}")
        self._source, self._prepare, self._born = iter(source), prepare, born
        self._prefetch, self._timeout_s = prefetch, timeout_s
        self._ready: queue.SimpleQueue[_Prepared | _Failed | None] = queue.SimpleQueue()
        self._using: _Prepared | None = None
        self._count, self._pulled_all, self._ended, self._closed = 0, False, False, False
        self._room: threading.Semaphore | None = None
        if background and prefetch:
            self._room = threading.Semaphore(prefetch)
            self._thread = threading.Thread(target=self._work, name="odc-inputs", daemon=True)
            self._thread.start()

    def __next__(self) -> T:
        self._release()
        if self._ended:
            raise StopIteration
        with recorder().span(FETCH, unit=INPUTS):
            found = self._next()
        if not isinstance(found, _Prepared):
            self._ended = True
            if found is None:
                raise StopIteration
            raise found.error
        self._count += 1
        self._using = found
        recorder().add(FETCH, found.born_ns, unit=AGE, nbytes=found.nbytes, lane=AGE)
        item: T = found.item
        return item

    def __enter__(self) -> LazyMicrobatches[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Prepare no more, and drop what is prepared; waits for a preparation under way, `timeout_s` at most."""
        self._closed = self._ended = True
        self._release()
        if self._room is not None:
            self._room.release()
            self._thread.join(self._timeout_s)
        while not self._ready.empty():
            self._ready.get()

    def _next(self) -> _Prepared | _Failed | None:
        if self._room is None:
            while not self._pulled_all and (self._prefetch is None or self._ready.qsize() <= self._prefetch):
                self._ready.put(self._one(MAIN))
            return self._ready.get()
        try:
            found = self._ready.get(timeout=self._timeout_s)
        except queue.Empty:
            rank, epoch = recorder().rank, recorder().epoch
            raise WaitTimeoutError(
                f"rank {rank} (epoch {epoch}) waited {self._timeout_s:g} s for its own input thread to prepare "
                f"microbatch {self._count}"
            ) from None
        self._room.release()
        return found

    def _work(self) -> None:
        assert self._room is not None
        while not self._pulled_all:
            self._room.acquire()
            if self._closed:
                return
            self._ready.put(self._one(PREPARE))

    def _one(self, lane: str) -> _Prepared | _Failed | None:
        """Pull and prepare one. The last call returns None, or what was raised."""
        begin = recorder().now()
        try:
            raw = next(self._source)
            born_ns = begin if self._born is None else round(self._born(raw) * 1e9)
            item = self._prepare(raw)
        except StopIteration:
            self._pulled_all = True
            return None
        except BaseException as error:  # handed to the training thread
            self._pulled_all = True
            return _Failed(error)
        nbytes = _nbytes(item)
        recorder().add(FETCH, begin, unit=PREPARE, nbytes=nbytes, lane=lane)
        return _Prepared(item, born_ns, time.monotonic_ns(), nbytes)

    def _release(self) -> None:
        """The microbatch in use has been used: say how long it was held, and hold it no longer."""
        if self._using is not None:
            recorder().add(FETCH, self._using.ready_ns, unit=HELD, nbytes=self._using.nbytes, lane=HELD)
            self._using = None


def _nbytes(item: Any) -> int:
    """Bytes of all tensors and arrays in nested dicts, lists and tuples."""
    if isinstance(item, Mapping):
        return sum(_nbytes(value) for value in item.values())
    if isinstance(item, list | tuple):
        return sum(_nbytes(value) for value in item)
    return int(getattr(item, "nbytes", 0))
