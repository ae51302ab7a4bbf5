"""Weight export: processes outside the job (rollouts, evaluators) read the weights from the memory of its ranks."""

from odc.handover.export import version, weight_handle
from odc.handover.groups import read_groups
from odc.handover.reader import Reader, Weights

__all__ = ["Reader", "Weights", "read_groups", "version", "weight_handle"]
