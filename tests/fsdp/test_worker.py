from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from odc.fsdp.worker import Job, Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker("test-worker", depth=2)
    yield worker
    worker.close()


class Gate:
    """Work that says when it has begun, and ends when it is let."""

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


def test_a_job_runs_once_whoever_asks() -> None:
    runs: list[str] = []
    job = Job(lambda: runs.append(threading.current_thread().name))
    assert not job.over()
    job.result()
    job.run()
    job.result()
    assert runs == ["MainThread"]
    assert job.over()


def test_who_needs_a_job_that_has_begun_waits_for_it() -> None:
    gate, runs = Gate(), list[str]()

    def work() -> None:
        runs.append(threading.current_thread().name)
        gate()

    job = Job(work)
    runner = in_thread(job.run)
    assert gate.begun.wait(60.0)
    done: list[bool] = []
    waiter = in_thread(lambda: (job.result(), done.append(job.over())))
    waiter.join(0.05)
    assert not done and not job.over()
    gate.open.set()
    waiter.join(60.0)
    runner.join(60.0)
    assert done == [True]
    assert runs == [runner.name], "it was run by two"


def test_an_error_is_told_to_everybody_who_asks() -> None:
    job = Job(fail)
    job.run()  # not here: whoever runs it may be another thread
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            job.wait()
    with pytest.raises(KeyError, match="lost"):
        job.result()


def test_a_cancelled_job_never_runs() -> None:
    runs: list[int] = []
    job = Job(lambda: runs.append(1))
    job.cancel()
    job.cancel()
    job.run()
    job.result()
    assert runs == []
    assert job.over()


def test_cancelling_a_job_that_has_begun_waits_for_its_end_and_forgets_its_error() -> None:
    gate, ended = Gate(), list[str]()

    def work() -> None:
        gate()
        ended.append("work")
        raise KeyError("nobody wants to know")

    job = Job(work)
    runner = in_thread(job.run)
    assert gate.begun.wait(60.0)
    canceller = in_thread(lambda: (job.cancel(), ended.append("cancel")))
    canceller.join(0.05)
    assert ended == []
    gate.open.set()
    canceller.join(60.0)
    runner.join(60.0)
    assert ended == ["work", "cancel"]


@pytest.mark.parametrize("how", ["run", "cancel", "fail"])
def test_a_job_that_is_over_keeps_nothing_alive(how: str) -> None:
    class Memory:
        """Stands in for a unit of gradients."""

        def __call__(self) -> None:
            if how == "fail":
                raise KeyError

    memory = Memory()
    gone = weakref.ref(memory)
    job = Job(memory)
    del memory
    if how == "cancel":
        job.cancel()
    else:
        job.run()
    if how == "fail":
        job._error = None  # an error holds the frames it passed
    gc.collect()
    assert gone() is None


# workers -------------------------------------------------------------------------------------------------------------


def test_a_worker_keeps_the_order(worker: Worker) -> None:
    seen: list[int] = []
    jobs = [Job(lambda number=number: seen.append(number)) for number in range(50)]  # type: ignore[misc]
    for job in jobs:
        worker.submit(job)
    jobs[-1].wait()
    assert seen == list(range(50))


def test_a_worker_survives_a_failing_job(worker: Worker) -> None:
    bad, good = Job(fail), Job(lambda: None)
    worker.submit(bad)
    worker.submit(good)
    good.wait()
    with pytest.raises(KeyError):
        bad.wait()


def test_a_full_queue_holds_up_the_caller(worker: Worker) -> None:
    gates = [Gate() for _ in range(4)]
    jobs = [Job(gate) for gate in gates]
    worker.submit(jobs[0])
    assert gates[0].begun.wait(60.0)
    worker.submit(jobs[1])
    worker.submit(jobs[2])  # one runs, two wait
    submitter = in_thread(lambda: worker.submit(jobs[3]))
    submitter.join(0.05)
    assert submitter.is_alive()
    gates[0].open.set()
    submitter.join(60.0)
    assert not submitter.is_alive()
    for gate in gates:
        gate.open.set()
    jobs[3].wait()


def test_a_waiting_job_may_be_run_by_who_needs_it_first(worker: Worker) -> None:
    gate, ran_by = Gate(), list[str]()
    first, second, third = Job(gate), Job(lambda: ran_by.append(threading.current_thread().name)), Job(lambda: None)
    for job in (first, second, third):
        worker.submit(job)
    assert gate.begun.wait(60.0)
    second.result()
    assert ran_by == ["MainThread"]
    gate.open.set()
    third.wait()
    assert ran_by == ["MainThread"], "the worker ran it again"


def test_an_idle_worker_keeps_no_job_alive(worker: Worker) -> None:
    """A failed one would keep its error, and with it the frames and gradients that the error passed."""
    job, after = Job(fail), Job(lambda: None)
    gone = weakref.ref(job)
    worker.submit(job)
    worker.submit(after)
    after.wait()
    del job
    gc.collect()
    assert gone() is None
    last = Job(lambda: None)
    gone = weakref.ref(last)
    worker.submit(last)
    last.wait()
    del last
    deadline = time.monotonic() + 60
    while gone() is not None:
        assert time.monotonic() < deadline, "the worker holds on to its last job"
        time.sleep(0.001)


def test_a_worker_never_keeps_the_interpreter_from_ending() -> None:
    worker = Worker("test-daemonic", depth=1)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test-daemonic")
    assert thread.daemon
    worker.close()
    thread.join(60.0)
    assert not thread.is_alive()


def test_close_lets_what_was_submitted_run() -> None:
    worker, gate, seen = Worker("test-closing", depth=3), Gate(), list[int]()
    last = Job(lambda: seen.append(1))
    worker.submit(Job(gate))
    worker.submit(last)
    worker.close()
    gate.open.set()
    last.wait()
    assert seen == [1]


def test_close_does_not_wait_for_a_job_that_hangs() -> None:
    worker, gate = Worker("test-hanging", depth=1), Gate()
    worker.submit(Job(gate))
    assert gate.begun.wait(60.0)
    closer = in_thread(worker.close)
    closer.join(60.0)
    assert not closer.is_alive()
    gate.open.set()


def test_close_does_not_wait_for_a_full_queue() -> None:
    """At exit the worker may hang in a wait for a dead peer, with jobs behind it."""
    worker, gate = Worker("test-full", depth=1), Gate()
    worker.submit(Job(gate))
    assert gate.begun.wait(60.0)
    worker.submit(Job(lambda: None))
    closer = in_thread(worker.close)
    closer.join(60.0)
    stuck = closer.is_alive()
    gate.open.set()
    closer.join(60.0)
    assert not stuck


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
    submitter.join(10.0)
    assert not submitter.is_alive(), "it waits for a lock of its own"
    assert len(closed) > len(jobs)
