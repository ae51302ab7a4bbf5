"""Inputs of microbatches prepared when they are needed, and losses divided by what is only known at the end."""

from odc.microbatch.lazy import InputFigures, LazyMicrobatches, input_figures
from odc.microbatch.normalize import LossNormalizer, Normalization, Totals

__all__ = ["InputFigures", "LazyMicrobatches", "LossNormalizer", "Normalization", "Totals", "input_figures"]
