"""Data moved by the Triton kernels of `odc.kernels`. On the CPU they run in triton's interpreter: for tests only.

On a GPU nothing here waits for the device. A call is one launch a pair of dtypes, preceded by at most one copy of a
small table each for its tensors and its peers, where these have not been asked for at the same addresses before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from odc.kernels import add as add_pairs
from odc.kernels import gather as gather_unit
from odc.kernels import passing_table, refuse_compiled
from odc.kernels import publish as publish_shards
from odc.kernels import put as put_values
from odc.movers import cpu


def refuse_unusable(device: torch.device) -> None:
    """Raise `UnsupportedError` where kernels are compiled, but `device` is the CPU, which cannot run them."""
    if device.type == "cpu":
        refuse_compiled()


def launch_one(device: torch.device) -> None:
    """Launch a kernel that publishes one number; raises whatever keeps triton from compiling or launching here."""
    number = torch.zeros(1, device=device)
    publish([number], [torch.zeros_like(number)])


publish, add, zero = publish_shards, add_pairs, cpu.zero


def gather(
    outs: Sequence[torch.Tensor], offsets: Sequence[int], shards: int, sources: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """See `DataMover.gather`; one launch."""
    memory = dict(sources)  # held: the memory stays mapped while it is copied
    table = passing_table([memory[shard].data_ptr() for shard in range(shards)], outs[0].device)
    gather_unit(outs, offsets, table, first=next(iter(memory)))


def put(address: int, source: int, nbytes: int) -> None:
    """See `DataMover.put`."""
    values = torch.frombuffer((ctypes.c_char * nbytes).from_address(source), dtype=torch.uint8)
    put_values([values], torch.tensor([address], device="cpu"), 0)
