from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from support.waiting import until

from odc.worker import Job, Worker, in_background


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("test-worker", depth=2)
    yield worker
    worker.close()


class Gate:
    """Work that shows when it has begun, and ends once the gate is open."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(60.0)


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def fail() -> None:
    raise KeyError("lost")


# jobs ----------------------------------------------------------------------------------------------------------------


def test_a_job_runs_once_on_the_thread_that_needs_it_first() -> None:
    gate, runs = Gate(), list[str]()

    def work() -> str:
        runs.append(threading.current_thread().name)
        gate()
        return "done"

    job, found = Job(work), list[str]()
    runner = in_thread(job.run)
    assert gate.begun.wait(60.0) and not job.over(0.01)
    waiter = in_thread(lambda: found.append(job.result()))
    gate.open.set()
    for thread in (waiter, runner):
        thread.join(60.0)
    assert found == ["done"] == [job.wait()] and job.over()
    assert runs == [runner.name]


@pytest.mark.parametrize(("then", "runs"), [(Job.run, 1), (Job.drop, 0)])
def test_a_job_that_a_signal_kept_from_running_can_be_run_or_dropped(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[Job[None]], None], runs: int
) -> None:
    """A handler may raise when a thread has just claimed it."""
    ran = list[int]()
    job = Job(lambda: ran.append(1))

    class Interrupting:
        @staticmethod
        def acquire(*, blocking: bool, claim: Any = job._claim) -> bool:
            claim.acquire(blocking=blocking)
            raise KeyboardInterrupt

    with monkeypatch.context() as signalled:
        signalled.setattr(job, "_claim", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            job.run()
    then(job)
    assert job.over() and len(ran) == runs
    job.run()
    assert len(ran) == runs


def test_an_error_reaches_every_thread_that_asks() -> None:
    job = Job(fail)
    job.run()  # not here: it may run on another thread
    for ask in (job.wait, job.wait, job.result):
        with pytest.raises(KeyError, match="lost"):
            ask()
    assert isinstance(job.error, KeyError)


def test_a_dropped_job_never_runs() -> None:
    runs: list[int] = []
    job = Job(lambda: runs.append(1))
    job.drop()
    job.cancel()
    job.result()
    assert runs == [] and job.over()


def test_cancelling_a_job_that_has_begun_waits_for_its_end_and_forgets_its_error() -> None:
    gate, ended = Gate(), list[str]()

    def work() -> None:
        gate()
        ended.append("work")
        raise KeyError("not asked for")

    job = Job(work)
    runner = in_thread(job.run)
    assert gate.begun.wait(60.0)
    job.drop()  # waits for nothing
    canceller = in_thread(lambda: (job.cancel(), ended.append("cancel")))
    gate.open.set()
    for thread in (canceller, runner):
        thread.join(60.0)
    assert ended == ["work", "cancel"]


@pytest.mark.parametrize("end", [Job.run, Job.cancel])
def test_a_job_that_is_over_keeps_nothing_alive(end: Callable[[Job[None]], None]) -> None:
    class Memory:
        """Stands in for a unit of gradients."""

        def __call__(self) -> None:
            return

    memory = Memory()
    gone = weakref.ref(memory)
    job = Job(memory)
    del memory
    end(job)
    gc.collect()
    assert gone() is None


# workers -------------------------------------------------------------------------------------------------------------


def test_a_worker_keeps_the_order_and_survives_an_error(worker: Worker) -> None:
    seen: list[int] = []
    jobs = [Job(lambda number=number: seen.append(number)) for number in range(50)]  # type: ignore[misc]
    jobs.insert(7, Job(fail))
    for job in jobs:
        worker.submit(job)
    assert jobs[-1].over(60.0)
    assert seen == list(range(50))


def test_where_no_thread_can_be_started_nothing_was_submitted(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    seen: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        for number in range(3):  # more than may wait
            with pytest.raises(RuntimeError, match="can't start new thread"):
                worker.submit(Job(lambda number=number: seen.append(number)))  # type: ignore[misc]
    last = Job(lambda: seen.append(7))
    worker.submit(last)
    assert last.over(60.0) and seen == [7]


def test_a_full_queue_holds_up_the_caller(worker: Worker) -> None:
    gate, jobs = Gate(), [Job(lambda: None) for _ in range(3)]
    worker.submit(Job(gate))
    assert gate.begun.wait(60.0)
    for job in jobs[:2]:  # one runs, two wait
        worker.submit(job)
    submitter = in_thread(lambda: worker.submit(jobs[2]))
    submitter.join(0.05)
    assert submitter.is_alive()
    gate.open.set()
    submitter.join(60.0)
    jobs[2].wait()


def test_a_job_that_a_signal_keeps_from_being_submitted_takes_no_room(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler may raise just after `submit` has found room."""

    class Interrupting:
        @staticmethod
        def put(job: Job[None]) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as signalled:
        signalled.setattr(worker, "_jobs", Interrupting)
        for _ in range(2):  # as many as may wait
            with pytest.raises(KeyboardInterrupt):
                worker.submit(Job(lambda: None))
    last = Job(lambda: None)
    threading.Thread(target=worker.submit, args=(last,), daemon=True).start()
    assert last.over(60.0)


def test_an_idle_worker_keeps_no_job_alive(worker: Worker) -> None:
    """A failed one would keep its error, and with it the frames and gradients that the error passed."""
    job = Job(fail)
    gone = weakref.ref(job)
    worker.submit(job)
    assert job.over(60.0)
    del job
    until(lambda: gc.collect() >= 0 and gone() is None, "the worker to let go of its last job")


def thread_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.mark.parametrize("closed", [True, False])
def test_the_thread_begins_with_the_first_job_and_ends_with_the_worker(closed: bool) -> None:
    worker = Worker("test-life")
    assert not thread_named("test-life"), "it starts on first use"
    worker.submit(Job(lambda: None))
    (thread,) = thread_named("test-life")
    assert thread.daemon, "it never keeps the interpreter from ending"
    if closed:
        worker.close(60.0)
        assert not thread.is_alive()
    else:
        del worker
        gc.collect()
        thread.join(60.0)
        assert not thread.is_alive()


def test_close_lets_what_was_submitted_run_and_waits_no_longer_than_asked() -> None:
    """At exit the thread may hang in a wait for a dead peer, with jobs behind it and no room for more."""
    worker, gate, seen = Worker("test-closing", depth=1), Gate(), list[int]()
    last = Job(lambda: seen.append(1))
    worker.submit(Job(gate))
    assert gate.begun.wait(60.0)
    worker.submit(last)
    for within_s in (0.0, 0.05):
        closer = in_thread(lambda within_s=within_s: worker.close(within_s))  # type: ignore[misc]
        closer.join(60.0)
        assert not closer.is_alive()
    gate.open.set()
    last.wait()
    assert seen == [1]


def test_work_in_the_background_ends_its_thread_and_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, seen = Gate(), list[tuple[str, type[BaseException]]]()

    def note(args: threading.ExceptHookArgs) -> None:
        assert args.thread is not None
        seen.append((args.thread.name, args.exc_type))

    def work() -> None:
        gate()
        fail()

    monkeypatch.setattr(threading, "excepthook", note)
    in_background("test-once", work)
    (thread,) = thread_named("test-once")
    gate.open.set()
    thread.join(60.0)
    assert not thread.is_alive() and seen == [("test-once", KeyError)]


def test_a_finalizer_may_close_a_worker_wherever_its_thread_is() -> None:
    """The collector may run between any two steps of `submit`, on the very thread that holds what it holds."""
    worker, jobs = Worker("test-finalizer", depth=8), [Job(lambda: None) for _ in range(3)]
    closed: list[str] = []

    def collect(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name != "collect" and threading.current_thread() is submitter:
            sys.setprofile(None)
            worker.close()
            closed.append(frame.f_code.co_name)
            sys.setprofile(collect)

    def submit() -> None:
        sys.setprofile(collect)
        for job in jobs:
            worker.submit(job)
        sys.setprofile(None)

    submitter = threading.Thread(target=submit, daemon=True)
    submitter.start()
    submitter.join(60.0)
    assert not submitter.is_alive(), "it waits for a lock of its own"
    assert len(closed) > len(jobs)
