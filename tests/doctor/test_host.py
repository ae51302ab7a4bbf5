from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from odc.doctor import State, host
from odc.errors import UnsupportedError
from odc.memory import FreeMemory, plain_x86_64


def only(found: list) -> tuple[State, str]:
    (one,) = found
    return one.state, f"{one.found} -> {one.do}"


def test_memory_files_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    state, said = only(host.heap())
    assert state is State.BROKEN and "Operation not permitted" in said and "seccomp" in said


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_memory", lambda: FreeMemory(64 << 20, "control group /x"))
    state, said = only(host.heap()[:1])
    assert state is State.BROKEN and "control group /x" in said


@pytest.mark.parametrize(("free_mib", "state"), [(64, State.BROKEN), (65, State.OK)])
def test_dev_shm(free_mib: int, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_mib << 8, f_frsize=4096))
    found = host._dev_shm()
    assert (found.state, found.use) == (state, "loaders")


def test_no_dev_shm(tmp_path: Path) -> None:
    assert host._dev_shm(tmp_path / "none").state is State.ABSENT


def test_without_libatomic_only_the_queue_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "default_atomics", plain_x86_64)
    words, library = host.atomics()
    assert (words.state, words.use) == (State.OK, "run")
    assert (library.state, library.use) == (State.ABSENT, "queue")
    assert "libatomic1" in library.do


def test_without_any_atomics(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise UnsupportedError("no atomic operations on riscv64; install libatomic")

    monkeypatch.setattr(host, "default_atomics", refuse)
    state, said = only(host.atomics())
    assert state is State.ABSENT and "install libatomic" in said


def test_a_mutex_that_forgets_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where robust mutexes are accepted and do nothing: acquired as if the holder had released it."""
    monkeypatch.setattr(host.RobustMutex, "acquire", lambda *_: None)
    state, said = only(host.mutex())
    assert state is State.BROKEN and "did not learn of it" in said


def test_sockets_that_pass_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.socket, "recv_fds", lambda *_: (b"x", [], 0, None))
    state, said = only(host.peers())
    assert state is State.BROKEN and "no descriptor came through" in said and "SCM_RIGHTS" in said
