"""Microbenchmarks: `odc bench`, and what the benchmarks of the repository's bench/ folder are made of."""

from odc.bench.comparison import compare, load
from odc.bench.crew import Crew, alone, held
from odc.bench.suite import PARTS, QUICK, SIZES, Effort, fitting_ranks, parts_of, run
from odc.bench.tables import show, to_stderr

__all__ = [
    "PARTS",
    "QUICK",
    "SIZES",
    "Crew",
    "Effort",
    "alone",
    "compare",
    "fitting_ranks",
    "held",
    "load",
    "parts_of",
    "run",
    "show",
    "to_stderr",
]
