"""Device kernels in Triton: one-sided reads, writes and sums over a table of peers' addresses.

The folder is `triton_kernels/` in the repository and is installed as `odc.kernels` only.
"""

from odc.kernels.accumulate import accumulate
from odc.kernels.add import add
from odc.kernels.gather import gather
from odc.kernels.get import get
from odc.kernels.launch import refuse_compiled
from odc.kernels.nvshmem import Symmetric
from odc.kernels.publish import publish
from odc.kernels.put import Signal, put
from odc.kernels.rows import pointer_table

__all__ = [
    "Signal",
    "Symmetric",
    "accumulate",
    "add",
    "gather",
    "get",
    "pointer_table",
    "publish",
    "put",
    "refuse_compiled",
]
