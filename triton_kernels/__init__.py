"""Device kernels in Triton: one-sided reads, writes and sums over a table of peers' addresses.

The folder is `triton_kernels/` in the repository and is installed as `odc.kernels` only.
"""

from odc.kernels.accumulate import ScatterPlan, accumulate, scatter
from odc.kernels.add import add, add_all
from odc.kernels.differ import differ
from odc.kernels.gather import GatherPlan, gather
from odc.kernels.get import get
from odc.kernels.launch import refuse_compiled
from odc.kernels.nvshmem import Symmetric
from odc.kernels.publish import publish
from odc.kernels.put import Signal, put
from odc.kernels.rows import fixed_rows, pointer_table

__all__ = [
    "GatherPlan",
    "ScatterPlan",
    "Signal",
    "Symmetric",
    "accumulate",
    "add",
    "add_all",
    "differ",
    "fixed_rows",
    "gather",
    "get",
    "pointer_table",
    "publish",
    "put",
    "refuse_compiled",
    "scatter",
]
