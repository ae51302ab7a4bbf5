"""Weights for processes outside the job (rollouts, evaluators), read from the ranks' memory while training goes on."""

from odc.handover.issue import ticket, version
from odc.handover.reader import Reader, Weights

__all__ = ["Reader", "Weights", "ticket", "version"]
