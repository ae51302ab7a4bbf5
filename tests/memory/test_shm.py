"""Shared memory: what a heap takes of it, and how members attach to each other's."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import resource
import threading
import time

import pytest
import torch
from support.heaps import lone, mapped, no_peer, pair
from support.ranks import spawn_ranks

from odc.errors import HeapMemoryError, LayoutMismatchError, WaitTimeoutError
from odc.memory import Attachment, FreeMemory, ShmHeap, mapping

MIB = 1 << 20


# memory ----------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_refused_before_any_is_taken() -> None:
    heap = lone(lambda: FreeMemory(5 * MIB, "the machine"))
    heap.allocate("data", 8 * MIB)
    message = re.escape("rank 0, heap lone: the heap needs 8.0 MiB, but the machine leaves 5.0 MiB free")
    with pytest.raises(HeapMemoryError, match=message):
        heap.seal()
    assert not heap.sealed
    assert not mapped("lone")
    heap.close()


def test_memory_that_others_take_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_STEP", 2 * MIB)
    free = iter([9 * MIB, 9 * MIB, 5 * MIB])
    heap = lone(lambda: FreeMemory(next(free), "the machine"))
    heap.allocate("data", 8 * MIB - mmap.PAGESIZE)
    with pytest.raises(HeapMemoryError, match=r"needs 8\.0 MiB \(of which 6\.0 MiB are still to be taken\).* 5\.0 MiB"):
        heap.seal()
    gc.collect()
    assert not mapped("lone")


def test_a_kernel_that_refuses_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_populate", lambda address, nbytes, advice: errno.ENOMEM)
    heap = lone(lambda: FreeMemory(64 * MIB, "the machine"))
    heap.allocate("data", 8 * MIB)
    with pytest.raises(HeapMemoryError, match=r"needs 8\.0 MiB .* 64\.0 MiB free, but the kernel refuses.*memory"):
        heap.seal()
    gc.collect()
    assert not mapped("lone")


def test_a_limit_on_the_size_of_files_is_a_clear_error() -> None:
    heap = lone(lambda: FreeMemory(64 * MIB, "the machine"))
    heap.allocate("data", 8 * MIB)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(
            HeapMemoryError, match=r"rank 0, .* no memory file of 8\.0 MiB .*too large; look at `ulimit -f`"
        ):
            heap.seal()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not mapped("lone")


@pytest.mark.parametrize("populates", [True, False])
def test_all_pages_are_present_after_seal(monkeypatch: pytest.MonkeyPatch, populates: bool) -> None:
    if not populates:
        monkeypatch.setattr(mapping, "_populate", lambda address, nbytes, advice: errno.EINVAL)
    heap = lone()
    heap.allocate("data", 4 * MIB)
    heap.seal()
    assert os.fstat(heap.fd).st_blocks * 512 >= heap.nbytes
    assert not heap.tensor(0, "data", torch.uint8).any()
    heap.close()


def test_touching_a_peer_leaves_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_populate", lambda address, nbytes, advice: errno.EINVAL)
    one, two = pair()
    one.tensor(0, "data", torch.uint8).fill_(9)
    assert two.tensor(0, "data", torch.uint8).eq(9).all()
    one.close()
    two.close()


def test_the_file_cannot_change_its_size_and_is_closed_on_exec() -> None:
    heap = lone()
    heap.allocate("data", 4096)
    heap.seal()
    for size in (0, heap.nbytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(heap.fd, size)
    assert not os.get_inheritable(heap.fd)
    assert fcntl.fcntl(heap.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    assert os.readlink(f"/proc/self/fd/{heap.fd}").startswith("/memfd:odc.lone.0")
    heap.close()


def test_offsets_beyond_4_gib() -> None:
    """A sparse file: only the pages that are touched take memory."""
    fd = os.memfd_create("odc.sparse.0")
    os.ftruncate(fd, 6 << 30)
    far = mapping.Mapping(fd, 6 << 30)
    os.close(fd)
    view = far.tensor(torch.float32, 5 << 30, 1000)
    view.fill_(3.0)
    assert view.data_ptr() - far.address == 5 << 30
    assert float(view.sum()) == 3000.0


@pytest.mark.parametrize("overcommits", [True, False])
def test_what_a_forked_child_does_to_a_mapping(monkeypatch: pytest.MonkeyPatch, overcommits: bool) -> None:
    """Done to one of two mappings of a file in this process; the other is unharmed."""
    fd = os.memfd_create("odc.twice.0")
    os.ftruncate(fd, 8192)
    kept, left = mapping.Mapping(fd, 8192), mapping.Mapping(fd, 8192)
    os.close(fd)
    kept.tensor(torch.uint8, 0, 8192).fill_(3)
    real = mapping._mmap

    def strict(where: int | None, nbytes: int, flags: int, fd: int, protection: int = mapping._READ_WRITE) -> int:
        if protection & mmap.PROT_WRITE and not overcommits:
            raise OSError(errno.ENOMEM, "no overcommit")
        return real(where, nbytes, flags, fd, protection)

    monkeypatch.setattr(mapping, "_mmap", strict)
    mapping._MappedRange(left.address, left.nbytes).close()
    assert not left.tensor(torch.uint8, 0, 8192).any()
    assert kept.tensor(torch.uint8, 0, 8192).eq(3).all()
    assert mapped("twice") == 1


# attaching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "announced", "says"),
    [
        (bytes(64), None, "rank 5 has 8192 bytes, rank 3 announced 8192 and provided 64"),
        (b"\xff" * 5000, 5000, "8192 bytes against 5000"),
    ],
    ids=["another size", "no heap at all"],
)
def test_another_file_is_refused_and_closed(content: bytes, announced: int | None, says: str) -> None:
    one, two = pair("other")
    fd = os.memfd_create("odc.other")
    os.write(fd, content)
    digest, other = one.digest if announced is None else "0" * 64, os.dup(fd)
    two._connect = lambda member: Attachment(fd, announced or one.nbytes, digest, (other,))
    with pytest.raises(LayoutMismatchError, match=says):
        two.words(0, "flags")
    for closed in (fd, other):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
    one.close()
    two.close()


def test_descriptors_beside_the_heaps_are_taken_once_or_closed_with_it() -> None:
    one, two = pair("beside")
    others = os.dup(one.fd), os.dup(one.fd), os.dup(one.fd)
    two._connect = lambda member: Attachment(os.dup(one.fd), one.nbytes, one.digest, others)
    assert two.take_other_fds(0) == ()
    two.words(0, "flags")
    assert (two.take_other_fds(0), two.take_other_fds(0)) == (others, ())
    for fd in others:
        os.close(fd)  # the caller's: they are open

    unused, three = pair("beside")
    one.other_fds = late = os.dup(one.fd), os.dup(one.fd)

    def closes_meanwhile(member: int) -> Attachment:
        three.close()
        return Attachment(os.dup(one.fd), one.nbytes, one.digest, late[:1])

    three._connect = closes_meanwhile
    three.words(0, "flags")
    one.other_fds = late[1:]
    for heap in (one, two, unused):
        heap.close()
    for fd in late:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def reopen_as_a_user(rank: int, world: int) -> str:
    """What a process without privileges gets when it opens the descriptor of readers anew, for writing."""
    if os.geteuid() == 0:  # root may write to any file
        os.setuid(54321)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: or /proc/self would belong to root from now on
    heap = lone()
    heap.allocate("data", 4096)
    heap.seal()
    fd = os.dup(heap.read_only_fd)
    os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
    try:
        os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    except OSError as error:
        return error.strerror or ""
    return "opened"


def test_the_descriptor_of_readers_cannot_be_opened_anew_for_writing() -> None:
    with spawn_ranks(1, reopen_as_a_user) as job:
        (user,) = job.wait()
    assert user.value == "Permission denied", user.describe()


def test_what_connect_raises_comes_through_and_may_be_tried_again() -> None:
    one, two = pair("retry")
    good = two._connect

    def bad(member: int) -> Attachment:
        raise WaitTimeoutError("rank 3 is late")

    two._connect = bad
    with pytest.raises(WaitTimeoutError, match="rank 3 is late"):
        two.whole(0)
    assert not two.attached(0)
    two._connect = good
    assert two.words(0, "flags").load(0) == 0
    assert two.attached(0)
    one.close()
    two.close()


def test_threads_attach_once_and_wait_for_each_other_no_longer_than_the_deadline() -> None:
    one, two = pair("threads")
    good, calls, go = two._connect, [], threading.Event()

    def slow(member: int) -> Attachment:
        calls.append(member)
        go.wait(60.0)
        return good(member)

    two._connect, two._deadline_s = slow, 0.05
    first = threading.Thread(target=two.words, args=(0, "flags"))
    first.start()
    while not calls:
        time.sleep(0.001)
    with pytest.raises(WaitTimeoutError, match="rank 5, heap threads, attaching to rank 3: another thread"):
        two.words(0, "flags")
    go.set()
    first.join()
    assert two.words(0, "flags").load(0) == 0
    assert calls == [0]
    one.close()
    two.close()


def test_members_and_ranks_are_checked() -> None:
    for ranks, me in (((0, 1), 2), ((0, 1), -1), ((4, 4), 0), ((), 0)):
        with pytest.raises(ValueError, match="ranks"):
            ShmHeap("x", ranks, me, no_peer, 1.0)
