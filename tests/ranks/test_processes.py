from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.leaks import assert_nothing_left, memfds_of, processes_of, shared_files
from support.rank_worker import die, report
from support.ranks import RankPool, RanksFailed, spawn_ranks
from support.waiting import until

from odc.ranks.processes import RankOutcome, RankProcesses, fork_server, task
from odc.trace import WINDOW, recorder

Pools = Callable[[int], RankPool]


def add_ranks(rank: int, world: int, extra: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([float(rank + extra)])
    dist.all_reduce(total)
    return os.getpid(), total, torch.get_num_threads()


def fail_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"no good on {rank}")
    dist.barrier()  # never met: the culprit is not there


def sleep_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        report("asleep")
        time.sleep(600)


def die_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        die("now")


def crash_on(rank: int, world: int, culprit: int) -> None:
    dist.all_reduce(torch.ones(1))  # by then no rank is on its way into the group any more
    if rank == culprit:
        os.abort()
    dist.all_reduce(torch.ones(1))


def report_then_wait(rank: int, world: int) -> str:
    report({"rank": rank})
    time.sleep(600 if rank == 0 else 0)
    return "waited"


def leave_child(rank: int, world: int) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(os.getpid(), signal.SIGKILL)


def open_a_window(rank: int, world: int) -> None:
    recorder().window(1).__enter__()


def windows_seen(rank: int, world: int) -> int:
    with recorder().window(2):
        pass
    return sum(span.category == WINDOW for span in recorder().spans())


def hold_memfd(rank: int, world: int) -> list[str]:
    before = memfds_of(os.getpid())
    fd = os.memfd_create("odc-harness-test")
    found = [name for name in memfds_of(os.getpid()) if name not in before]
    os.close(fd)
    return found


def mark_exit(rank: int, world: int, folder: str) -> None:
    import atexit

    atexit.register(Path(folder, str(rank)).touch)


def test_pool_keeps_its_processes_and_its_process_group(ranks: Pools) -> None:
    first = ranks(2).run(add_ranks, 1)
    second = ranks(2).run(add_ranks, 2)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert len({pid for pid, *_ in first} | {os.getpid()}) == 3
    assert [total.item() for _, total, _ in first] == [3.0, 3.0]
    assert [total.item() for _, total, _ in second] == [5.0, 5.0]
    assert {threads for *_, threads in first} == {1}


def test_an_exception_is_shown_with_its_rank_and_the_pool_is_rebuilt(ranks: Pools) -> None:
    before = [pid for pid, *_ in ranks(2).run(add_ranks, 0)]
    with pytest.raises(RanksFailed, match=re.compile(r"rank 1 .*ValueError: no good on 1", re.DOTALL)) as failure:
        ranks(2).run(fail_on, 1)
    assert "in fail_on" in str(failure.value)
    after = [pid for pid, *_ in ranks(2).run(add_ranks, 0)]
    assert not set(before) & set(after)
    assert not processes_of(before)


def test_a_timeout_shows_the_stack_and_kills_the_pool(ranks: Pools) -> None:
    before = [pid for pid, *_ in ranks(2).run(add_ranks, 0)]
    with pytest.raises(RanksFailed, match=re.compile(r"rank 0 .*no answer.*in sleep_on", re.DOTALL)) as failure:
        ranks(2).run(sleep_on, 0, timeout=10.0)
    assert "rank 1" not in str(failure.value)
    assert not processes_of(before)
    assert len(ranks(2).run(add_ranks, 0)) == 2


def test_a_rank_that_dies_in_a_pool_is_a_failure_not_a_hang(ranks: Pools) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 .*exit code -9"):
        ranks(2).run(die_on, 1)


def test_a_rank_that_raised_as_it_exited_shows_why() -> None:
    """Every line of a traceback is marked with the rank by torch; where the answer has it, it is shown once."""
    stated = "a warning\n[rank0]: WaitTimeoutError: rank 1 has not left\n"
    left = RankOutcome(0, 7, exit_code=1, output=stated, answered=True)
    assert "WaitTimeoutError: rank 1 has not left" in left.describe()
    raised = RankOutcome(0, 7, exit_code=1, output=stated, answered=True, error="ValueError", trace="ValueError: no")
    assert "a warning" in raised.describe() and "[rank0]" not in raised.describe()


def test_a_rank_that_crashed_shows_what_came_before_its_stacks() -> None:
    output = "earlier\n" * 5000 + "terminate called\nFatal Python error: Aborted\n" + "  File a\n" * 5000
    crashed = RankOutcome(1, 7, exit_code=-6, output=output).describe()
    assert "terminate called\nFatal Python error: Aborted\n  File a" in crashed
    assert len(crashed) < 7000


def test_a_rank_that_crashed_is_shown_before_one_that_missed_it(ranks: Pools) -> None:
    crash_first = re.compile(r"rank 1 .*exit code -6.*Fatal Python error: Aborted.*rank 0 .*in crash_on", re.DOTALL)
    with pytest.raises(RanksFailed, match=crash_first):
        ranks(2).run(crash_on, 1)


def test_a_trace_begins_anew_with_each_function(ranks: Pools) -> None:
    ranks(2).run(open_a_window)
    assert ranks(2).run(windows_seen) == [1, 1]


def test_a_pool_ends_in_good_order(tmp_path: Path) -> None:
    pool = RankPool(2)
    pool.run(mark_exit, str(tmp_path))
    assert [outcome.exit_code for outcome in pool.close()] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]  # atexit handlers ran


def test_one_shot_ranks_are_killed_and_report() -> None:
    with spawn_ranks(3, report_then_wait) as job:
        job.until_reported(1)
        job.kill(0)
        outcomes = job.wait()
    assert [outcome.exit_code for outcome in outcomes] == [-9, 0, 0]
    assert [outcome.value for outcome in outcomes] == [None, "waited", "waited"]
    assert [outcome.reports for outcome in outcomes] == [[{"rank": rank}] for rank in range(3)]


def test_a_rank_that_kills_itself_sends_the_time() -> None:
    begin = time.monotonic()
    with spawn_ranks(2, die_on, 1) as job:
        outcomes = job.wait()
    when, what = outcomes[1].reports[0]
    assert begin < when < time.monotonic()
    assert what == "now"
    assert [outcome.exit_code for outcome in outcomes] == [0, -9]


def test_an_exception_in_a_one_shot_rank_is_an_outcome() -> None:
    with spawn_ranks(2, fail_on, 0) as job:
        while not job.outcomes[0].answered:
            job.receive(0.05)
        job.kill(1)
        outcome = job.wait()[0]
    assert (outcome.error, outcome.message, outcome.exit_code) == ("ValueError", "no good on 0", 1)
    assert 0 < outcome.at <= time.monotonic()
    assert "Traceback" in outcome.output


def leave_with(rank: int, world: int) -> None:
    sys.exit([None, 0, 3, "no good"][rank])  # type: ignore[arg-type]


@pytest.mark.parametrize("whole_end", [False, True])
def test_a_rank_that_exits_has_the_code_that_it_gave(whole_end: bool) -> None:
    with spawn_ranks(4, leave_with, whole_end=whole_end) as job:
        assert [outcome.exit_code for outcome in job.wait()] == [0, 0, 3, 1]


def test_a_wait_past_its_timeout_kills_all() -> None:
    with spawn_ranks(2, sleep_on, 1) as job:
        pids = job.pids
        while not job.outcomes[1].reports:
            job.receive(0.05)
        with pytest.raises(RanksFailed, match=re.compile("after 1 s.*in sleep_on", re.DOTALL)):
            job.wait(1.0)
    assert not processes_of(pids)


@pytest.mark.thorough
def test_nothing_lives_on_when_pytest_is_killed(tmp_path: Path) -> None:
    program = f"""
import sys, time
sys.path[:0] = {[str(Path(__file__).parents[1])]!r}
from support.ranks import RankProcesses
ranks = RankProcesses(2, once=False)
print(*ranks.pids, flush=True)
time.sleep(600)
"""
    held = memfds_of(os.getpid())
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    assert_nothing_left(pids, shared_files(), held)


def test_the_fork_server_has_one_thread_and_is_replaced_when_it_is_gone() -> None:
    server = fork_server((("ODC_TEST", "1"),), ("torch", "odc.fsdp"))
    assert fork_server((("ODC_TEST", "1"),), ("torch", "odc.fsdp")) is server
    ranks = RankProcesses(server, [0], once=True)
    assert len(os.listdir(f"/proc/{parent_of(ranks.outcomes[0].pid)}/task")) == 1, "a fork would lose the others"
    ranks.send(task(os.getenv, "ODC_TEST"))
    assert ranks.answers(600.0, 0.0) and ranks.ended(600.0)
    assert [outcome.value for outcome in ranks.outcomes] == ["1"]
    server.close()
    assert fork_server((("ODC_TEST", "1"),), ("torch", "odc.fsdp")) is not server


def folder_and_variable() -> tuple[str, str | None]:
    return os.getcwd(), os.environ.get("ODC_TEST")


def test_ranks_have_the_folder_and_the_variables_of_the_moment_they_are_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process that forks them was started before."""

    def found() -> tuple[str, str | None]:
        ranks = RankProcesses(fork_server(), [0], once=True)
        ranks.send(task(folder_and_variable))
        assert ranks.answers(600.0, 0.0) and ranks.ended(600.0)
        value: tuple[str, str | None] = ranks.outcomes[0].value
        return value

    monkeypatch.setenv("ODC_TEST", "1")
    assert found() == (os.getcwd(), "1")
    monkeypatch.setenv("ODC_TEST", "2")
    monkeypatch.chdir(tmp_path)
    assert found() == (str(tmp_path), "2")
    monkeypatch.delenv("ODC_TEST")
    assert found() == (str(tmp_path), None)


def say_much_and_end(times: int) -> str:
    for number in range(times):
        report(number)
    return "ended"


def test_a_rank_that_has_answered_and_ended_has_not_failed() -> None:
    """Also where its end is seen while what it sent is still to be taken in, as on a busy machine."""
    ranks = RankProcesses(fork_server(), [0], once=True)
    ranks.send(task(say_much_and_end, 9))
    (outcome,) = ranks.outcomes
    until(lambda: not Path(f"/proc/{outcome.pid}").exists())
    ranks.receive(10.0)
    until(lambda: ranks._note_exits() or outcome.exit_code is not None)  # type: ignore[func-returns-value]
    assert (outcome.exit_code, outcome.answered, outcome.value) == (0, True, "ended")
    ranks.close()


def fork_a_child() -> int:
    """It has open what the rank has open, and outlives it."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child


def test_a_process_that_outlives_its_rank_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RankProcesses(fork_server(), [0], once=True)
    (outcome,), receive = ranks.outcomes, ranks.receive

    def receive_of_a_rank(timeout: float) -> None:
        assert outcome.exit_code is None, "no rank is left that could send anything"
        receive(timeout)

    monkeypatch.setattr(ranks, "receive", receive_of_a_rank)
    ranks.send(task(fork_a_child))
    assert ranks.answers(600.0, 0.0)
    try:
        assert ranks.ended(600.0)
    finally:
        os.kill(outcome.value, signal.SIGKILL)
    assert outcome.exit_code == 0
    ranks.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_child_left_behind_is_found() -> None:
    held = memfds_of(os.getpid())
    with spawn_ranks(1, leave_child) as job:
        pids = job.pids
        job.wait()
    with pytest.raises(AssertionError, match="processes live on"):
        assert_nothing_left(pids, shared_files(), held, within_s=0.2)
    for pid in processes_of(pids):
        os.kill(pid, signal.SIGKILL)
    assert_nothing_left(pids, shared_files(), held)


def test_a_shared_memory_file_left_behind_is_found() -> None:
    before, held = shared_files(), memfds_of(os.getpid())
    left = Path(f"/dev/shm/odc-harness-{os.getpid()}")
    left.touch()
    try:
        with pytest.raises(AssertionError, match="left in /dev/shm"):
            assert_nothing_left([], before, held)
    finally:
        left.unlink()
    assert_nothing_left([], before, held)


def test_memfds_are_seen() -> None:
    with spawn_ranks(1, hold_memfd) as job:
        assert job.wait()[0].value == ["/memfd:odc-harness-test (deleted)"]
