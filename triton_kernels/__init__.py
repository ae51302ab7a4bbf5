"""Device kernels in Triton: one-sided reads, writes and sums over a table of peers' addresses.

The folder is `triton_kernels/` in the repository and is installed as `odc.kernels` only.
"""

from odc.kernels.accumulate import ScatterPlan, accumulate
from odc.kernels.add import AddPlan, add
from odc.kernels.differ import differ
from odc.kernels.dtypes import converts
from odc.kernels.gather import GatherPlan, gather
from odc.kernels.get import get
from odc.kernels.launch import refuse_compiled
from odc.kernels.nvshmem import Symmetric
from odc.kernels.pack import UnitChanges, pack
from odc.kernels.patch import PatchPlan
from odc.kernels.publish import publish
from odc.kernels.put import Signal, put
from odc.kernels.round import RoundingPlan
from odc.kernels.rows import fixed_rows
from odc.kernels.tables import passing_table, pointer_table, reserve_tables

__all__ = [
    "AddPlan",
    "GatherPlan",
    "PatchPlan",
    "RoundingPlan",
    "ScatterPlan",
    "Signal",
    "Symmetric",
    "UnitChanges",
    "accumulate",
    "add",
    "converts",
    "differ",
    "fixed_rows",
    "gather",
    "get",
    "pack",
    "passing_table",
    "pointer_table",
    "publish",
    "put",
    "refuse_compiled",
    "reserve_tables",
]
