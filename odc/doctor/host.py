"""Probes of the host: what every rank needs to share memory with its peers.

They do in small what the runtime does, since containers take system calls away whatever the kernel's version says.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from pathlib import Path

from odc.doctor.finding import Finding, absent, broken, ok
from odc.errors import OdcError, PeerLostError, UnsupportedError
from odc.memory import (
    MUTEX_BYTES,
    Attachment,
    ProcessHandle,
    RobustMutex,
    ShmHeap,
    default_atomics,
    free_memory,
    require_add,
)
from odc.net.listener import ask
from odc.runtime import daemon, stop_daemon

_MIB = 1 << 20
_LITTLE = 256 * _MIB
_LOADERS = 64 * _MIB  # Docker's default /dev/shm, in which torch's data loaders hang


def memory() -> list[Finding]:
    """Memory files, free memory and 64-bit words for heaps; /dev/shm for data loaders."""
    return [*heap(), *atomics()]


def heap() -> list[Finding]:
    """Makes a heap as a rank does, in a memory file."""
    heaps: list[ShmHeap] = []

    def connect(member: int) -> Attachment:
        return Attachment(os.dup(heaps[member].fd), heaps[member].nbytes, heaps[member].digest)

    heaps += [ShmHeap("doctor", (0, 1), me, connect, 5.0) for me in (0, 1)]
    try:
        for heap in heaps:
            heap.allocate("words", 64)
            heap.allocate("data", _MIB)
            heap.seal()
        heaps[0].words(1, "words").store(0, 7)
        if heaps[1].words(1, "words").load(0) != 7:
            return [broken("shared memory", "a word stored through one mapping is not seen through another", _SANDBOX)]
    except (OSError, OdcError) as error:
        return [broken("shared memory", f"a memory file cannot be made or mapped: {error}", _SANDBOX)]
    finally:
        for heap in heaps:
            heap.close()
    return [_free(), _dev_shm()]


_SANDBOX = "allow memfd_create and mmap in this container or sandbox (seccomp profile)"


def _free() -> Finding:
    free = free_memory()
    said = f"memory file made and mapped; {free.nbytes / 2**30:.1f} GiB free ({free.limited_by})"
    if free.nbytes < _LITTLE:
        return broken("shared memory", said, "give this machine or control group more memory")
    return ok("shared memory", said)


def _dev_shm(path: Path = Path("/dev/shm")) -> Finding:
    try:
        room = os.statvfs(path)
    except OSError as error:
        return absent("/dev/shm", str(error), "mount a tmpfs there for data loaders with workers", "loaders")
    free = room.f_bavail * room.f_frsize
    said = f"{free / _MIB:.0f} MiB free (odc's heaps do not lie there; data loaders with workers do)"
    if free <= _LOADERS:
        return broken("/dev/shm", said, "docker run --ipc=host or --shm-size=8g, or num_workers=0", "loaders")
    return ok("/dev/shm", said, "loaders")


def atomics() -> list[Finding]:
    """Atomic 64-bit words between processes; the queue of microbatches also needs atomic addition."""
    try:
        chosen = default_atomics()
    except UnsupportedError as error:
        return [absent("atomics", "no 64-bit atomics on this processor without libatomic", str(error))]
    found = [ok("atomics", f"{chosen.name}: loads and stores")]
    try:
        require_add(chosen)
    except UnsupportedError as error:
        return [*found, absent("libatomic", "not found; odc runs without it", str(error), "queue")]
    return [*found, ok("libatomic", "atomic addition", "queue")]


def mutex() -> list[Finding]:
    """A robust mutex whose holder dies: the next one to lock it must learn of that."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)  # anonymous, and shared with a forked child
    address = ctypes.addressof((ctypes.c_char * MUTEX_BYTES).from_buffer(memory))
    try:
        RobustMutex.initialize(address)
        lock = RobustMutex(address, memory)
        child = os.fork()
        if child == 0:
            lock.acquire(1.0)
            os._exit(0)
        os.waitpid(child, 0)
        try:
            lock.acquire(1.0)
        except PeerLostError:
            return [ok("robust mutex", "waiting for a dead holder raises")]
    except (OSError, OdcError) as error:
        return [broken("robust mutex", str(error), _MUTEX)]
    return [broken("robust mutex", "a holder died and the next one did not learn of it", _MUTEX)]


_MUTEX = "a C library with robust process-shared mutexes (glibc; musl 1.2 or newer), in a sandbox that allows them"


def peers() -> list[Finding]:
    """What ranks do to find and watch each other: a listener, a descriptor passed, a death seen."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    handle = ProcessHandle(child)
    lived, watched = handle.alive(), handle.fileno() is not None
    os.close(write)
    os.waitpid(child, 0)
    died = not handle.alive()
    handle.close()
    if not (lived and died):
        return [broken("peers", "a process's life and death cannot be told", "allow pidfd_open, or mount /proc")]
    try:
        _pass_a_descriptor()
        ask(daemon(0).address, {"op": "status"}, 5.0)
    except (OSError, OdcError) as error:
        return [broken("peers", f"a unix socket does not work: {error}", _SOCKETS)]
    finally:
        stop_daemon()
    how = "pidfd" if watched else "polled in /proc"
    return [ok("peers", f"listeners open, descriptors pass, deaths are seen ({how})")]


def _pass_a_descriptor() -> None:
    """Over a pair of unix sockets (SCM_RIGHTS); raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, open(os.devnull, "rb") as file:
        socket.send_fds(ours, [b"x"], [file.fileno()])
        _, received, *_ = socket.recv_fds(theirs, 1, 1)
    if not received:
        raise OSError("no descriptor came through")
    os.close(received[0])


_SOCKETS = "allow abstract unix sockets with SCM_RIGHTS; ranks in several containers must share a network namespace"
