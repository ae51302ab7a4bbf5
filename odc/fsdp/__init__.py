"""Drop-in `fully_shard`: the call, the parameter group, the minibatch state machine."""

from odc.fsdp.call import fully_shard, shutdown
from odc.fsdp.module import OdcModule, minibatch
from odc.fsdp.root import Root, live_roots, root_of

__all__ = ["OdcModule", "Root", "fully_shard", "live_roots", "minibatch", "root_of", "shutdown"]
