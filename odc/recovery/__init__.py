"""A killed rank costs one minibatch, not a job. Begin with `recovery`."""

from odc.recovery.batches import StatefulBatches
from odc.recovery.recovery import Recovery

__all__ = ["Recovery", "StatefulBatches"]
