"""Drop-in `fully_shard`: the call, the parameter group, the minibatch state machine."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from odc.fsdp._torch_compat import default_store, forget_forward_order
from odc.fsdp.boundaries import minibatch
from odc.fsdp.call import fully_shard, shutdown
from odc.fsdp.module import OdcModule, reshard_all, sharded_tops
from odc.fsdp.root import Root, live_roots, root_of

__all__ = [
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OdcModule",
    "OffloadPolicy",
    "Root",
    "default_store",
    "forget_forward_order",
    "fully_shard",
    "live_roots",
    "minibatch",
    "reshard_all",
    "root_of",
    "sharded_tops",
    "shutdown",
]
