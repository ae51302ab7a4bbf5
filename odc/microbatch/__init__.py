"""Inputs of microbatches prepared when they are needed, and losses divided by what is only known at the end."""

from odc.microbatch.figures import InputFigures, input_figures
from odc.microbatch.lazy import LazyMicrobatches
from odc.microbatch.normalize import LossNormalizer, Normalization, Totals

__all__ = ["InputFigures", "LazyMicrobatches", "LossNormalizer", "Normalization", "Totals", "input_figures"]
