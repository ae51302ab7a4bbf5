"""Slots: one state is whole whatever happens to its writer, and others can hold it."""

from __future__ import annotations

import errno
import gc
import os
from typing import Any

import pytest
import torch

from odc.errors import HeapMemoryError, UnsupportedError
from odc.memory import FreeMemory
from odc.memory.mapping import Mapping
from odc.recovery import slots as module
from odc.recovery.members import Share
from odc.recovery.slots import Slots


def state(step: int) -> tuple[list[torch.Tensor], bytes]:
    """Tensors of any dtype and shape, also of one element and of none."""
    made = [
        torch.full((3, 5), float(step)),
        torch.tensor(step),
        torch.empty(0, 4),
        torch.arange(7, dtype=torch.uint8),
        torch.full((9,), step, dtype=torch.bfloat16),
        torch.arange(12.0).view(3, 4).t(),
    ]
    return made, f"step {step}".encode()


def assert_holds(kept: Slots, step: int) -> None:
    tensors, text = kept.read(step)
    wanted, words = state(step)
    assert text == words
    assert all(
        torch.equal(mine, theirs) and mine.dtype == theirs.dtype for mine, theirs in zip(tensors, wanted, strict=True)
    )


def test_the_two_newest_states_are_kept() -> None:
    kept = Slots.create(Share(0, 4))
    assert kept.steps() == []
    for step in (0, 1, 2, 7):
        kept.write(step, *state(step))
        assert_holds(kept, step)
    assert kept.steps() == [2, 7]
    assert_holds(kept, 2)


def test_a_step_may_be_kept_twice() -> None:
    """By a process that takes the place of one that had kept the beginning, where another rank had not."""
    kept = Slots.create(Share(0, 0))
    for _ in range(2):
        kept.write(0, *state(0))
    assert_holds(kept, 0)
    kept.write(1, *state(1))
    assert kept.steps() == [0, 1]


def test_a_state_may_grow() -> None:
    kept = Slots.create(Share(0, 0))
    kept.write(0, *state(0))
    kept.write(1, [torch.arange(100_000.0)], b"x" * 10_000)
    assert_holds(kept, 0)
    assert torch.equal(kept.read(1)[0][0], torch.arange(100_000.0))


def test_a_text_that_grows_seldom_maps_its_slots_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    prefault, mapped = Mapping.prefault, []

    def counted(self: Mapping, *arguments: Any, **options: Any) -> None:
        mapped.append(self.nbytes)
        prefault(self, *arguments, **options)

    kept, steps = Slots.create(Share(0, 0)), 200
    monkeypatch.setattr(Mapping, "prefault", counted)
    for step in range(steps):
        kept.write(step, [torch.zeros(100_000)], b"x" * (step * 1000))
    assert kept.read(steps - 1)[1] == b"x" * ((steps - 1) * 1000)
    assert len(mapped) < steps / 5, "and not at each page"


def test_a_writer_that_ends_in_the_middle_leaves_the_other_state(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Slots.create(Share(0, 0))
    for step in (0, 1):
        kept.write(step, *state(step))
    fill = module.StateSlot.fill

    def half(self: Any, tensors: Any, table: Any, at: int, text: bytes) -> None:
        fill(self, tensors[:3], table[:3], at, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.StateSlot, "fill", half)
    with pytest.raises(KeyboardInterrupt):
        kept.write(2, *state(2))
    assert kept.steps() == [1]
    assert_holds(kept, 1)


def test_what_is_newer_is_forgotten_and_its_slot_is_the_next() -> None:
    kept = Slots.create(Share(0, 0))
    for step in (3, 4):
        kept.write(step, *state(step))
    kept.forget_after(3)
    assert kept.steps() == [3]
    kept.write(4, *state(4))
    assert kept.steps() == [3, 4]


def test_another_process_holds_them_after_their_owner_has_ended() -> None:
    """The child is the owner."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        kept = Slots.create(Share(0, 2))
        kept.write(6, *state(6))
        os.write(writing, f"{kept.fds[0]} {kept.fds[1]}".encode())
        os.read(os.open("/dev/zero", os.O_RDONLY), 1)
        os.pause() if hasattr(os, "pause") else __import__("signal").pause()
    fds = [int(one) for one in os.read(reading, 64).split()]
    try:
        held = Slots.held_by(child, fds, Share(0, 2))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert held.steps() == [6]
    assert_holds(held, 6)
    held.write(7, *state(7))
    assert held.steps() == [6, 7]


def test_slots_that_are_dropped_are_closed() -> None:
    kept = Slots.create(Share(0, 0))
    fd = kept.fds[0]
    del kept
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_other_files_are_not_taken_for_slots() -> None:
    kept, me = Slots.create(Share(0, 2)), os.getpid()
    with pytest.raises(OSError, match="other files than the slots of rank 1"):
        Slots.held_by(me, kept.fds, Share(0, 1))
    reading, writing = os.pipe()
    os.close(writing)
    plain = os.memfd_create("plain")
    with pytest.raises(OSError, match="other files"):
        Slots.held_by(me, [plain], Share(0, 2))
    os.close(reading)
    os.close(plain)


def test_what_the_system_refuses_is_not_taken_for_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a death it would begin one generation after another, without end."""
    kept, opened, real = Slots.create(Share(0, 2)), [], os.open

    def once(path: str, flags: int) -> int:
        if opened:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        opened.append(real(path, flags))
        return opened[0]

    monkeypatch.setattr(os, "open", once)
    with pytest.raises(UnsupportedError, match=r"the state of rank 2 cannot be held .*denied.*the same user"):
        Slots.held_by(os.getpid(), kept.fds, Share(0, 2))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_slots_that_cannot_be_made_are_refused_and_leave_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[int](), os.memfd_create

    def once(name: str, flags: int) -> int:
        if made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(real(name, flags))
        return made[0]

    monkeypatch.setattr(os, "memfd_create", once)
    with pytest.raises(HeapMemoryError, match=r"kept state of rank 2: .*open files; .*ulimit -n"):
        Slots.create(Share(0, 2))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_slots_are_shared_with_their_holder() -> None:
    kept = Slots.create(Share(0, 0))
    held = Slots.held_by(os.getpid(), kept.fds, Share(0, 0))
    kept.write(5, *state(5))
    assert held.steps() == [5]
    kept.close()
    assert_holds(held, 5)
    held.close()
    held.close()


def test_too_little_memory_keeps_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Slots.create(Share(0, 0))
    kept.write(0, *state(0))
    monkeypatch.setattr(module, "free_memory", lambda: FreeMemory(1 << 20, "the cgroup"))
    with pytest.raises(HeapMemoryError, match=r"needs 3\.8 MiB more, but the cgroup leaves 1\.0 MiB"):
        kept.write(1, [torch.zeros(1_000_000)], b"")
    assert kept.steps() == [0]
    assert_holds(kept, 0)


def test_a_step_that_is_kept_again_takes_the_place_of_the_first() -> None:
    """A job that loses a rank before all have kept its first step begins anew, in the processes that have."""
    kept = Slots.create(Share(0, 0))
    kept.write(3, *state(8))
    kept.write(3, *state(9))
    assert kept.steps() == [3]
    tensors, text = kept.read(3)
    assert text == state(9)[1] and torch.equal(tensors[0], state(9)[0][0])


def test_a_state_is_received_as_bytes() -> None:
    one, other = Slots.create(Share(0, 0)), Slots.create(Share(0, 0))
    for step in (4, 5):
        one.write(step, *state(step))
        extent, shown = one.shown(step)
        other.receive(step, extent, lambda memory, shown=shown: memory.copy_(shown))  # type: ignore[misc]
    assert other.steps() == [4, 5]
    assert_holds(other, 4)
    assert_holds(other, 5)


def test_a_state_that_is_received_in_part_does_not_count() -> None:
    one, other = Slots.create(Share(0, 0)), Slots.create(Share(0, 0))
    one.write(4, *state(4))
    extent, _ = one.shown(4)

    def end(memory: torch.Tensor) -> None:
        memory[: len(memory) // 2] = 1
        raise ConnectionError("it hung up")

    for step in (5, 6, 7):
        with pytest.raises(ConnectionError):
            other.receive(step, extent, end)
    assert other.steps() == []
