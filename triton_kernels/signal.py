"""signal: set or add to a 64-bit word of a peer, after everything that this stream wrote before.

Chose an exchange with release at system scope over a plain store: whoever acquires the word (`wait`, or odc's words on
the host) sees the data. Adding is one atomic operation, for counters with many writers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from odc.kernels.launch import check_table, launch
from odc.kernels.nvshmem import SIGNAL_SET, Symmetric, atomic_add, first_thread, options_for, quiet, signal_op


@triton.jit
def tell(base: tl.tensor, offset: tl.tensor, value: tl.tensor, ADD: tl.constexpr) -> None:
    """Release `value` into the word at `offset` of the memory at `base`."""
    word = (base + offset).to(tl.pointer_type(tl.int64))
    if ADD:
        tl.atomic_add(word, value, sem="release", scope="sys")
    else:
        tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit(do_not_specialize=["table", "peer", "own", "pes", "offset", "value"])
def signal_kernel(
    table: tl.tensor,
    peer: tl.int64,
    own: tl.int64,
    pes: tl.tensor,
    offset: tl.int64,
    value: tl.int64,
    ADD: tl.constexpr,
    NVSHMEM: tl.constexpr,
) -> None:
    """One program."""
    base = tl.load(table + peer)
    offset = offset.to(tl.int64)
    value = value.to(tl.int64)
    if NVSHMEM:
        if base == 0:
            quiet()
            pe = tl.load(pes + peer)
            if first_thread():
                if ADD:
                    atomic_add(own + offset, value, pe)
                else:
                    signal_op(own + offset, value, SIGNAL_SET, pe)
        else:
            tell(base, offset, value, ADD)
    else:
        tell(base, offset, value, ADD)


def signal(
    table: torch.Tensor, peer: int, offset: int, value: int, *, add: bool = False, symmetric: Symmetric | None = None
) -> None:
    """Set the word at byte `offset` of the memory of `peer` to `value`, or add to it.

    Waits for nobody. One launch, on the current stream; see `launch` for threads and errors.

    Args:
        table: int64 [peers]: address of each peer's memory, 0 where no pointer reaches it.
        peer: index into `table`.
        offset: of an int64 word, in bytes; 8-byte aligned.
        value: signed, 64 bits.
        add: whether to add, wrapping around.
        symmetric: how to reach peers without a pointer.
    """
    device = check_table(table)
    refuse_unaligned(offset)
    args, constants = options_for(table, symmetric)
    launch(signal_kernel, (1,), device, table, peer, *args, offset, value, ADD=add, **constants)


def refuse_unaligned(offset: int) -> None:
    """Raise `ValueError` unless a word may lie at byte `offset`."""
    if offset % 8:
        raise ValueError(f"a word is 8-byte aligned; there is none at byte {offset}")


def signal_reference(peers: Sequence[torch.Tensor], peer: int, offset: int, value: int, *, add: bool = False) -> None:
    """The same in plain torch, and not atomic; `peers` are the peers' memories, uint8 and 1-D."""
    word = peers[peer][offset : offset + 8].view(torch.int64)
    word.copy_(word + value if add else torch.tensor([value]))
