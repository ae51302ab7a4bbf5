"""odc: on-demand communication for sharded training. Import `fully_shard` from here instead of from torch.

Names that need torch load on first use, so that `odc --help` and `import odc.balance` do not wait seconds for it.
"""

from typing import TYPE_CHECKING

from odc.errors import AbandonedMinibatchError, OdcError
from odc.provenance import VERSION as __version__
from odc.settings import Settings

if TYPE_CHECKING:
    from odc.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, minibatch, shutdown
    from odc.recovery import Recovery, StatefulBatches
else:
    # Hidden from type checkers, which would think that a module with __getattr__ has every name.
    def __getattr__(name: str) -> object:
        """The public names that need torch (PEP 562); AttributeError for any other."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in ("Recovery", "StatefulBatches"):
            from odc import recovery as room
        else:
            from odc import fsdp as room
        value = globals()[name] = getattr(room, name)
        return value


# The policies are torch's own, so that a port from torch.distributed.fsdp changes one import line.
__all__ = [
    "AbandonedMinibatchError",
    "CPUOffloadPolicy",
    "MixedPrecisionPolicy",
    "OdcError",
    "OffloadPolicy",
    "Recovery",
    "Settings",
    "StatefulBatches",
    "__version__",
    "fully_shard",
    "minibatch",
    "shutdown",
]


def __dir__() -> list[str]:
    """The public names, loaded or not, and everything else in the module."""
    return sorted({*globals(), *__all__})
