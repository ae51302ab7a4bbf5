"""Probes of the host: what every rank needs to share memory with its peers.

They do in small what the runtime does, since containers take system calls away whatever the kernel's version.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
from pathlib import Path

from odc.doctor.examination import Broken, Missing
from odc.errors import PeerLostError, UnsupportedError
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
from odc.net.requests import ask
from odc.runtime import daemon, stop_daemon

_MIB = 1 << 20
_LOADERS = 64 * _MIB  # Docker's default /dev/shm, in which torch's data loaders hang


def memory() -> str:
    """Makes a heap as a rank does, in a memory file."""
    heap = ShmHeap("doctor", (0,), 0, _no_peer, 5.0)
    try:
        heap.allocate("data", _MIB)
        heap.seal()
    finally:
        heap.close()
    free = free_memory()
    found = f"memory file made and mapped; {free.nbytes / 2**30:.1f} GiB free ({free.limited_by})"
    if free.nbytes < 256 * _MIB:
        raise Broken(found)
    return found


def _no_peer(member: int) -> Attachment:
    raise Broken(f"a heap of one member attaches to member {member}")


def dev_shm(path: Path = Path("/dev/shm")) -> str:
    """Room for data loaders with workers."""
    try:
        room = os.statvfs(path)
    except OSError as error:
        raise Missing(str(error)) from None
    free = room.f_bavail * room.f_frsize
    found = f"{free / _MIB:.0f} MiB free (odc's heaps do not lie there; data loaders with workers do)"
    if free <= _LOADERS:
        raise Broken(found)
    return found


def atomics() -> str:
    """Atomic 64-bit words between processes."""
    return f"{default_atomics().name}: loads and stores"


def libatomic() -> str:
    """Atomic addition, which the queue of microbatches needs."""
    try:
        require_add(default_atomics())
    except UnsupportedError as error:
        raise Missing(str(error)) from None
    return "atomic addition"


def mutex() -> str:
    """A robust mutex whose holder dies: the next one to lock it must learn of that."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)  # anonymous, and shared with a forked child
    address = ctypes.addressof((ctypes.c_char * MUTEX_BYTES).from_buffer(memory))
    RobustMutex.initialize(address)
    lock = RobustMutex(address, memory)
    child = os.fork()
    if child == 0:
        try:
            lock.acquire(1.0)
        finally:
            os._exit(0)  # nor does an error end the child otherwise
    os.waitpid(child, 0)
    try:
        lock.acquire(1.0)
    except PeerLostError:
        return "waiting for a dead holder raises"
    raise Broken("a holder died and the next one did not learn of it")


def peers() -> str:
    """What ranks do to find and watch each other: a death seen, a descriptor passed, a listener."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    handle = ProcessHandle(child.pid)
    lived, watched = handle.alive(), handle.fileno() is not None
    child.kill()
    child.communicate()
    died = not handle.alive()
    handle.close()
    if not (lived and died):
        raise Broken("a process's life and death cannot be observed")
    _pass_a_descriptor()
    try:
        ask(daemon(0).address, {"op": "status"}, 5.0)
    finally:
        stop_daemon()
    return f"listeners open, descriptors pass, deaths are seen ({'pidfd' if watched else 'polled in /proc'})"


def _pass_a_descriptor() -> None:
    """Over a pair of unix sockets (SCM_RIGHTS)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, open(os.devnull, "rb") as file:
        socket.send_fds(ours, [b"x"], [file.fileno()])
        _, received, *_ = socket.recv_fds(theirs, 1, 1)
    if not received:
        raise Broken("no descriptor comes through a unix socket")
    os.close(received[0])
