"""odc: on-demand communication for sharded training.

`from odc import fully_shard` in place of torch's; see the README.
"""

from odc.errors import OdcError
from odc.fsdp import fully_shard, minibatch, shutdown
from odc.settings import Settings

__all__ = ["OdcError", "Settings", "fully_shard", "minibatch", "shutdown"]
