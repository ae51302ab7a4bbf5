"""Microbatches pulled and prepared shortly before they are used, instead of all at the start of a step.

With many microbatches a step, inputs take a fraction of the memory, and in RL a sample is as young as it can be when it
is used (Fast-LLM issue 510). The trace records every input; `input_figures` reads memory, ages and waiting from it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from odc.errors import WaitTimeoutError
from odc.trace import FETCH, MAIN, Span, recorder
from odc.worker import Job, Worker

T = TypeVar("T")
_END: Any = object()

#: Units of spans. The training thread waits for INPUTS; the others are also the names of their lanes.
INPUTS, PREPARE, HELD, AGE = "inputs", "inputs prepared", "inputs held", "input age"


class _PreparedInput(NamedTuple):
    """`born_ns` is when its sample was made, `ready_ns` when it was prepared, `nbytes` what its tensors take."""

    item: Any
    born_ns: int
    ready_ns: int
    nbytes: int


class _Ahead(NamedTuple):
    """One input ahead of use; `pulled` is set once its raw microbatch is there, or there is none."""

    job: Job[_PreparedInput | None]
    pulled: threading.Event


class LazyMicrobatches(Iterator[T], Generic[T]):
    """Iterates over `prepare(raw)` for each raw microbatch of `source`, prepared `prefetch` ahead of use.

    Args:
        source: raw microbatches, pulled one at a time, on one thread.
        prepare: makes one usable: masks, positions, transfer to the device, a reference model's forward.
        prefetch: the most microbatches prepared and not yet asked for. 0 prepares each when it is asked for; None
            prepares all of them before the first, the eager way.
        background: prepare on a thread of its own. False prepares on the caller's thread, `prefetch` more before it
            gets one; `prepare` needs that if it calls a model sharded by odc or FSDP2.
        born: when the (oldest) sample of a raw microbatch was made, in seconds of `time.monotonic`, which all processes
            of a host share. By default its age counts from when it was pulled.
        timeout_s: longest wait for one microbatch.

    An exception in `source` or `prepare` is raised in place of its microbatch, after the ones before it. Iterate once,
    on one thread; `close` (or the end of a `with` block) ends it early. It synchronizes with no other rank. The
    background thread has the modes of the one that made this: gradients, autocast, default device; on CUDA also its
    current device, and queues its copies on the default stream, ahead of the compute that follows. Both threads draw
    from torch's one generator, in no order that repeats: a `prepare` that draws needs a generator of its own.
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
        self._ahead: deque[_Ahead] = deque()  # in order of use
        self._using: _PreparedInput | None = None
        self._count, self._pulled_all, self._ended = 0, False, False
        self._made, self._total = 0, -1  # microbatches prepared; all there are, once that is known
        self._worker = Worker("odc-inputs") if background and prefetch else None
        self._modes = _modes_here() if self._worker is not None else contextlib.nullcontext
        if self._worker is not None and torch.cuda.is_initialized():
            # Its thread would begin with the first device of the process.
            self._worker.submit(Job(functools.partial(torch.cuda.set_device, torch.cuda.current_device())))
        while self._worker is not None and len(self._ahead) < (prefetch or 0):
            self._prepare_one_more(self._worker)

    def __next__(self) -> T:
        self._release()
        if self._ended:
            raise StopIteration
        with recorder().span(FETCH, unit=INPUTS):
            job = self._next()
        self._ended = job.error is not None or job.wait() is None
        found = job.wait()
        if found is None:
            raise StopIteration
        self._count += 1
        self._using = found
        recorder().add(FETCH, found.born_ns, unit=AGE, nbytes=found.nbytes, lane=AGE)
        item: T = found.item
        return item

    @property
    def last(self) -> bool:
        """Whether the microbatch in use is the last, for `model.set_is_last_backward`. Waits up to `timeout_s` for the
        thread to pull the next one, not for `prepare`. False with `prefetch=0`, which pulls nothing before it is asked.
        Not for a loop over `LossNormalizer.microbatches`, which takes one ahead and says it itself.

        Raises WaitTimeoutError.
        """
        if self._worker is not None and self._ahead and not self._ahead[0].pulled.is_set():
            with recorder().span(FETCH, unit=INPUTS):
                if not self._ahead[0].pulled.wait(self._timeout_s):
                    raise self._late("pull")
        return self._count == self._total

    def __enter__(self) -> LazyMicrobatches[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop preparing and drop what is prepared; waits up to `timeout_s` for a preparation in progress."""
        self._ended = True
        self._release()
        for one in self._ahead:
            one.job.drop()
        if self._worker is not None:
            self._worker.close(self._timeout_s)
        self._ahead.clear()

    def _next(self) -> Job[_PreparedInput | None]:
        """The next input, which is over."""
        worker, ahead = self._worker, self._ahead
        if worker is None:
            while not self._pulled_all and (self._prefetch is None or len(ahead) <= self._prefetch):
                ahead.append(self._next_ahead(MAIN))
                ahead[-1].job.run()
            return ahead.popleft().job
        if not ahead[0].job.over(self._timeout_s):
            raise self._late("prepare")
        self._prepare_one_more(worker)
        return ahead.popleft().job

    def _late(self, what: str) -> WaitTimeoutError:
        rank, epoch = recorder().rank, recorder().epoch
        return WaitTimeoutError(
            f"rank {rank} (epoch {epoch}) waited {self._timeout_s:g} s for its own input thread to {what} "
            f"microbatch {self._count}"
        )

    def _next_ahead(self, lane: str) -> _Ahead:
        pulled = threading.Event()
        return _Ahead(Job(lambda: self._one(lane, pulled)), pulled)

    def _prepare_one_more(self, worker: Worker) -> None:
        self._ahead.append(self._next_ahead(PREPARE))
        worker.submit(self._ahead[-1].job)

    def _one(self, lane: str, pulled: threading.Event) -> _PreparedInput | None:
        """Pull and prepare one; None after the last."""
        if self._pulled_all:
            pulled.set()
            return None
        begin = recorder().now_on(lane)
        try:
            with self._modes():
                raw = next(self._source, _END)
                if raw is _END:
                    self._pulled_all, self._total = True, self._made
                    return None
                pulled.set()
                born_ns = begin if self._born is None else round(self._born(raw) * 1e9)
                item = self._prepare(raw)
        except StopIteration as error:  # which would end the loop over this as if the source had ended
            self._pulled_all = True
            raise RuntimeError(f"microbatch {self._made}: `prepare` or `born` raised StopIteration") from error
        except BaseException:
            self._pulled_all = True
            raise
        finally:
            pulled.set()
        self._made += 1
        nbytes = _nbytes(item)
        recorder().add(FETCH, begin, unit=PREPARE, nbytes=nbytes, lane=lane)
        return _PreparedInput(item, born_ns, time.monotonic_ns(), nbytes)

    def _release(self) -> None:
        """Let go of the microbatch in use, and record how long it was held."""
        if self._using is not None:
            recorder().add(FETCH, self._using.ready_ns, unit=HELD, nbytes=self._using.nbytes, lane=HELD)
            self._using = None


def _modes_here() -> Callable[[], AbstractContextManager[None]]:
    """A context in which another thread has this thread's modes, as they are now."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    cast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        # Autocast is set for good, without its cache of weights, which all threads share: this one does not know when
        # weights change, nor whether another records gradients. The end of `torch.autocast` would empty it.
        torch.set_autocast_cache_enabled(False)
        for kind, dtype in cast:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(gradients))
            if device != torch.get_default_device():
                stack.enter_context(device)
            yield

    return modes


def _nbytes(item: Any) -> int:
    """Bytes of all tensors and arrays in nested dicts, lists and tuples."""
    if isinstance(item, Mapping):
        return sum(_nbytes(value) for value in item.values())
    if isinstance(item, list | tuple):
        return sum(_nbytes(value) for value in item)
    return int(getattr(item, "nbytes", 0))


@dataclass(frozen=True)
class InputFigures:
    """Inputs of one rank, measured.

    `peak_bytes` and `most_held` count prepared inputs at one time, from ready until the next one was asked for. Ages
    run from when a sample was made (or pulled, see `LazyMicrobatches`) to its use. `prepare_s` is spent pulling and
    preparing, on whichever thread; for `waited_s` the training thread had no input.
    """

    microbatches: int
    peak_bytes: int
    most_held: int
    mean_age_s: float
    max_age_s: float
    prepare_s: float
    waited_s: float


def input_figures(spans: Sequence[Span]) -> InputFigures:
    """Figures of the microbatches that were used and released within `spans`, all of one rank."""
    ages = [_seconds(span) for span in spans if span.lane == AGE]
    held = [span for span in spans if span.lane == HELD]
    # At one moment an end sorts before a start, because the released input makes room for the next one.
    steps = sorted([(s.start_ns, 1, s.nbytes) for s in held] + [(s.end_ns, -1, -s.nbytes) for s in held])
    count = nbytes = most = peak = 0
    for _, one, size in steps:
        count, nbytes = count + one, nbytes + size
        most, peak = max(most, count), max(peak, nbytes)
    return InputFigures(
        microbatches=len(ages),
        peak_bytes=peak,
        most_held=most,
        mean_age_s=fmean(ages) if ages else 0.0,
        max_age_s=max(ages, default=0.0),
        prepare_s=sum(_seconds(span) for span in spans if span.unit == PREPARE),
        waited_s=sum(_seconds(span) for span in spans if span.unit == INPUTS and span.lane == MAIN),
    )


def _seconds(span: Span) -> float:
    return (span.end_ns - span.start_ns) * 1e-9
