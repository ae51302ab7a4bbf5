from __future__ import annotations

import errno
import gc
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import until

from odc.memory import ProcessHandle, processes
from odc.net.engines import server


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    # A name with spaces and parentheses, as /proc/<pid>/stat would show it unescaped.
    code = "import sys; open('/proc/self/comm', 'w').write('a) R (b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture(params=["pidfd", "ENOSYS", "EPERM"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "pidfd":

        def refuse(pid: int) -> int:
            raise OSError(getattr(errno, request.param), "refused")

        monkeypatch.setattr(processes.os, "pidfd_open", refuse)
    return request.param


def wait_for_zombie(pid: int) -> None:
    """Until the process has ended; it is not reaped."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_alive_until_it_ends_even_before_it_is_reaped(child: subprocess.Popen, kernel: str) -> None:
    handle = ProcessHandle(child.pid)
    assert handle.alive()
    assert (handle.fileno() is None) == (kernel != "pidfd")
    child.kill()
    wait_for_zombie(child.pid)
    assert not handle.alive()
    child.wait()
    assert not handle.alive()
    handle.close()


def test_the_descriptor_becomes_readable(child: subprocess.Popen) -> None:
    handle = ProcessHandle(child.pid)
    assert select.select([handle.fileno()], [], [], 0)[0] == []
    child.kill()
    assert select.select([handle.fileno()], [], [], 60)[0] == [handle.fileno()]
    assert not os.get_inheritable(handle.fileno())
    handle.close()


def test_a_process_that_is_gone_already(child: subprocess.Popen, kernel: str) -> None:
    child.kill()
    child.wait()
    handle = ProcessHandle(child.pid)
    assert not handle.alive()
    assert handle.fileno() is None
    handle.close()


def test_a_reused_pid_is_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "refused")

    monkeypatch.setattr(processes.os, "pidfd_open", refuse)
    stat = tmp_path / "77" / "stat"
    stat.parent.mkdir()

    def write(state: str, start: int) -> None:
        stat.write_text(f"77 (a) S (b) {state} " + " ".join(["0"] * 18 + [str(start)] + ["0"] * 30))

    write("S", 1000)
    handle = ProcessHandle(77, tmp_path)
    assert handle.alive()
    write("R", 1000)
    assert handle.alive()
    write("S", 1001)
    assert not handle.alive()
    write("Z", 1000)
    assert not handle.alive()


def test_close_is_idempotent_and_leaks_nothing(kernel: str) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        handle = ProcessHandle(os.getpid())
        assert handle.alive()
        handle.close()
        handle.close()
        assert not handle.alive()
        assert handle.fileno() is None
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_forked_child_closes_the_rest_whatever_one_cannot_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a generator in which a thread of the parent was, and which then refuses to be closed."""

    def busy() -> Iterator[memoryview]:
        conversation.close()
        yield memoryview(b"")

    here, there = socket.socketpair()
    conversation = server._Conversation(here, 1, None, rest=busy())
    assert conversation.more() and here.fileno() == -1, "so that the server goes on with its others"
    there.close()

    class Closes:
        def close(self) -> None:
            closed.append(self)
            raise ValueError("generator already executing")

    closed, held = list[Closes](), [Closes(), Closes()]
    monkeypatch.setattr(processes, "_held", held[:])
    processes._close_all()
    assert closed == held


@pytest.mark.parametrize("pid", [0, -1])
def test_what_is_no_pid_is_refused(pid: int) -> None:
    with pytest.raises(ValueError, match="PID namespace"):
        ProcessHandle(pid)


def test_running_out_of_descriptors_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(processes.os, "pidfd_open", full)
    with pytest.raises(OSError, match="Too many"):
        ProcessHandle(os.getpid())
