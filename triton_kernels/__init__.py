"""Device kernels in Triton: one-sided reads, writes and sums over a table of peers' addresses.

The folder is `triton_kernels/` in the repository and is installed as `odc.kernels` only.
"""

from odc.kernels.accumulate import accumulate, accumulate_reference
from odc.kernels.add import add, add_reference
from odc.kernels.gather import gather, gather_reference
from odc.kernels.get import get, get_reference
from odc.kernels.launch import refuse_compiled
from odc.kernels.nvshmem import Symmetric
from odc.kernels.publish import publish, publish_reference
from odc.kernels.put import Signal, put, put_reference
from odc.kernels.rows import pointer_table

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
    "pointer_table",
    "publish",
    "publish_reference",
    "put",
    "put_reference",
    "refuse_compiled",
]
