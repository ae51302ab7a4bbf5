"""Device kernels in Triton: one-sided reads, writes and sums over a table of peers' addresses.

In the repository this is the folder `triton_kernels/`, linked to as `odc/kernels`; nothing of that name is installed.
"""

from odc.kernels.accumulate import accumulate, accumulate_reference
from odc.kernels.add import add, add_reference
from odc.kernels.gather import gather, gather_reference
from odc.kernels.get import get, get_reference
from odc.kernels.launch import refuse_compiled
from odc.kernels.nvshmem import Symmetric
from odc.kernels.pack import pack, pack_reference
from odc.kernels.publish import publish, publish_reference
from odc.kernels.put import Signal, put, put_reference
from odc.kernels.rows import pointer_table
from odc.kernels.signal import signal, signal_reference
from odc.kernels.unpack import unpack, unpack_reference
from odc.kernels.wait import poll, wait, wait_reference

__all__ = [
    "Signal",
    "Symmetric",
    "accumulate",
    "accumulate_reference",
    "add",
    "add_reference",
    "gather",
    "gather_reference",
    "get",
    "get_reference",
    "pack",
    "pack_reference",
    "pointer_table",
    "poll",
    "publish",
    "publish_reference",
    "put",
    "put_reference",
    "refuse_compiled",
    "signal",
    "signal_reference",
    "unpack",
    "unpack_reference",
    "wait",
    "wait_reference",
]
