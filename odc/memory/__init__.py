"""Memory that the ranks of a job share: heaps, words, locks, and whether a peer is alive."""

from odc.memory.atomics import Atomics, choose, default_atomics, libatomic, plain_x86_64, require_add
from odc.memory.available_memory import FreeMemory, free_memory
from odc.memory.heap import HostLanes, Lanes, SymmetricHeap
from odc.memory.layout import Layout, Request, round_up
from odc.memory.mapping import advise_huge, keep_freed
from odc.memory.mutex import MUTEX_BYTES, RobustMutex
from odc.memory.processes import ProcessHandle, close_after_fork
from odc.memory.shm import Attachment, ShmHeap
from odc.memory.words import Words

__all__ = [
    "MUTEX_BYTES",
    "Atomics",
    "Attachment",
    "FreeMemory",
    "HostLanes",
    "Lanes",
    "Layout",
    "ProcessHandle",
    "Request",
    "RobustMutex",
    "ShmHeap",
    "SymmetricHeap",
    "Words",
    "advise_huge",
    "choose",
    "close_after_fork",
    "default_atomics",
    "free_memory",
    "keep_freed",
    "libatomic",
    "plain_x86_64",
    "require_add",
    "round_up",
]
