"""Device kernels in Triton: one-sided reads, writes and sums over a table of peers' addresses.

In the repository this is the folder `triton_kernels/`, linked to as `odc/kernels`; nothing of that name is installed.
"""

from odc.kernels.accumulate import accumulate, accumulate_reference
from odc.kernels.add import add, add_reference
from odc.kernels.gather import gather, gather_reference
from odc.kernels.get import get, get_reference
from odc.kernels.launch import refuse_compiled
from odc.kernels.publish import publish, publish_reference
from odc.kernels.put import Signal, put, put_reference

__all__ = [
    "Signal",
    "accumulate",
    "accumulate_reference",
    "add",
    "add_reference",
    "gather",
    "gather_reference",
    "get",
    "get_reference",
    "publish",
    "publish_reference",
    "put",
    "put_reference",
    "refuse_compiled",
]
