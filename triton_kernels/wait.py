"""wait: until a word of a peer (or an own one) has reached a value.

Chose polls of a bounded number of looks, between which the host decides whether to go on, over one kernel that spins to
the end: a peer that died would leave a GPU that nothing but a reset frees, and in the interpreter a spinning kernel
would hold the lock that others need. The price: a wait ends up to one poll's launch later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from odc.errors import WaitTimeoutError
from odc.kernels.launch import check_table, launch
from odc.kernels.nvshmem import Symmetric, atomic_fetch, first_thread, options_for
from odc.kernels.signal import refuse_unaligned

LOOKS = 100  # in one poll; in the interpreter they take some 60 ms
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


@triton.jit(do_not_specialize=["table", "peer", "own", "pes", "offset", "target", "looks", "seen"])
def poll_kernel(
    table: tl.tensor,
    peer: tl.int64,
    own: tl.int64,
    pes: tl.tensor,
    offset: tl.int64,
    target: tl.int64,
    looks: tl.int64,
    seen: tl.tensor,
    NVSHMEM: tl.constexpr,
) -> None:
    """One program."""
    base = tl.load(table + peer)
    offset = offset.to(tl.int64)
    nothing = base * 0
    word = (base + offset).to(tl.pointer_type(tl.int64))
    value = target.to(tl.int64) - 1
    while (value < target) & (looks > 0):
        if NVSHMEM:
            if base == 0:
                if first_thread():  # whose value is stored in the end; the others only count their looks
                    value = atomic_fetch(own + offset, tl.load(pes + peer))
            else:
                value = tl.atomic_add(word, nothing, sem="acquire", scope="sys")
        else:
            value = tl.atomic_add(word, nothing, sem="acquire", scope="sys")
        looks -= 1
    tl.store(seen, value)


def poll(
    table: torch.Tensor,
    peer: int,
    offset: int,
    target: int,
    seen: torch.Tensor,
    *,
    looks: int = LOOKS,
    symmetric: Symmetric | None = None,
) -> None:
    """Look at the word at byte `offset` of the memory of `peer` until it is at least `target`, at most `looks` times.

    One launch, on the current stream; does not wait for it. What later launches of the stream read was written before
    the value that was seen. See `launch` for threads and errors.

    Args:
        table: int64 [peers]: address of each peer's memory, 0 where no pointer reaches it.
        peer: index into `table`.
        offset: of an int64 word, in bytes; 8-byte aligned.
        target: what it should reach.
        seen: int64 [1], on the table's device: takes what the last look saw.
        looks: at least 1.
        symmetric: how to reach peers without a pointer.
    """
    device = check_table(table)
    refuse_unaligned(offset)
    if seen.dtype != torch.int64 or seen.device != device or looks < 1:
        raise ValueError(f"a poll looks at least once and leaves what it saw in an int64 on {device}")
    args, constants = options_for(table, symmetric)
    launch(poll_kernel, (1,), device, table, peer, *args, offset, target, looks, seen, **constants)


def wait(
    table: torch.Tensor,
    peer: int,
    offset: int,
    target: int,
    what: str,
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
    looks: int = LOOKS,
    symmetric: Symmetric | None = None,
) -> int:
    """Poll until the word is at least `target`; returns what it holds. Synchronizes with the current stream.

    Args:
        table, peer, offset, target, looks, symmetric: see `poll`.
        what: is waited for, and by which rank, for the message.
        timeout_s: seconds until the wait is given up.
        check: called between polls; raises if there is no use in waiting (a dead peer, an aborted job).

    Raises:
        WaitTimeoutError: the deadline has passed.
    """
    seen = torch.zeros(1, dtype=torch.int64, device=table.device)
    deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        poll(table, peer, offset, target, seen, looks=looks, symmetric=symmetric)
        value = int(seen)
        if value >= target:
            return value
        check()
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"{what}: {value} of {target} after {timeout_s:g} s")
        time.sleep(pause)  # other threads of the process, in the interpreter, need the lock
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)


def wait_reference(
    peers: Sequence[torch.Tensor], peer: int, offset: int, target: int, what: str, *, timeout_s: float
) -> int:
    """The same in plain torch, without acquiring; `peers` are the peers' memories, uint8 and 1-D."""
    word = peers[peer][offset : offset + 8].view(torch.int64)
    deadline = time.monotonic() + timeout_s
    while int(word) < target:
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"{what}: {int(word)} of {target} after {timeout_s:g} s")
        time.sleep(_LONGEST_PAUSE_S)
    return int(word)
