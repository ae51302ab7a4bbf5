"""verl: odc as its engine, and its balancing functions on odc's planners, which load without the engine."""

from odc.integrations.verl.seqlen_balancing import get_seqlen_balanced_partitions, rearrange_micro_batches

__all__ = ["get_seqlen_balanced_partitions", "rearrange_micro_batches"]
