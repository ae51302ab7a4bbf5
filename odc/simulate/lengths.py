"""Lengths of samples: named distributions that resemble published data sets, or lengths from a file."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc.balance.inputs import MOST_TOKENS, read_elements
from odc.errors import ConfigError, DataError
from odc.saved_dataset import read_saved_dataset


@dataclass(frozen=True)
class Lognormal:
    """Lognormal lengths, cut at `longest`, whose mean after the cut is `mean`."""

    mean: float  # tokens
    longest: int  # tokens
    sigma: float  # of the logarithm

    def draw(self, count: int, generator: np.random.Generator, longest: int | None = None) -> NDArray[np.int64]:
        """`count` lengths of at least 16 tokens, cut at `longest`."""
        drawn = np.exp(self.location + self.sigma * generator.standard_normal(count))
        return np.clip(drawn, 16, longest or self.longest).astype(np.int64)

    @property
    def location(self) -> float:
        """Mean of the logarithm, by bisection on the closed form of the clipped mean."""
        low, high = 0.0, math.log(self.longest) + 10
        for _ in range(80):
            middle = (low + high) / 2
            z = (math.log(self.longest) - middle) / self.sigma
            clipped = math.exp(middle + self.sigma**2 / 2) * _phi(z - self.sigma) + self.longest * (1 - _phi(z))
            low, high = (middle, high) if clipped < self.mean else (low, middle)
        return low


def _phi(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


@dataclass(frozen=True)
class LengthSample:
    """The lengths of a data set, to draw from with replacement."""

    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def draw(self, count: int, generator: np.random.Generator, longest: int | None = None) -> NDArray[np.int64]:
        """`count` of the lengths, cut at `longest`."""
        drawn: NDArray[np.int64] = np.array(self.lengths, np.int64)[generator.integers(len(self.lengths), size=count)]
        return np.minimum(drawn, np.int64(longest or self.longest))


Lengths = Lognormal | LengthSample

#: Mean and longest are published; the widths are assumptions, and so are the longest of AIME and GRPO.
NAMED: dict[str, Lognormal] = {
    "longalign": Lognormal(16_500, 65_536, 0.8),  # LongAlign-like: mean 16.5K and cut at 64K as in the ODC paper
    "swe-smith": Lognormal(34_700, 131_072, 0.7),  # SWE-Smith-like: mean 34.7K as in the ODC paper, cut at 128K
    "swe-smith-32k": Lognormal(25_700, 32_768, 0.7),  # SWE-Smith-like, cut at 32K
    "aime": Lognormal(9_000, 32_768, 0.6),  # answers in GRPO: mean 9K as reviews of the ODC paper quote, cut at 32K
    "grpo": Lognormal(2_100, 8_192, 1.0),  # answers in GRPO to mixed questions: mean 2.1K, cut at 8K
}


def lengths_named(source: str) -> Lengths:
    """The distribution called `source`, or the lengths in that file or folder saved by Hugging Face datasets.

    A file is anything that `odc.balance.inputs.read_elements` reads, of numbers or of objects with `length`,
    `num_tokens` or `input_ids`. Raises ConfigError if there is no such path, DataError if it holds no lengths.
    """
    if source in NAMED:
        return NAMED[source]
    path = Path(source)
    if not os.path.exists(path):  # unlike Path's, no error where the name is too long for a file
        raise ConfigError(f"lengths: {source!r} is neither a file nor one of {', '.join(NAMED)}")
    try:
        lengths = _from_datasets(path) if path.is_dir() else [_length(row) for row in read_elements(path)]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path} holds no lengths: {error}") from error
    if not lengths or min(lengths) < 1 or max(lengths) > MOST_TOKENS:
        raise DataError(f"{path}: there must be lengths, all of 1 to {MOST_TOKENS}")
    return LengthSample(tuple(lengths))


def _from_datasets(path: Path) -> list[int]:
    data = read_saved_dataset(path)
    for column in ("length", "num_tokens", "input_ids"):
        if column in data.column_names:
            return [_length({column: value}) for value in data[column]]
    raise ValueError(f"no column length, num_tokens or input_ids among {', '.join(map(str, data.column_names))}")


def _length(row: Any) -> int:
    if isinstance(row, dict):
        for key in ("length", "num_tokens"):
            if key in row:
                return operator.index(row[key])
        return len(row["input_ids"])
    return operator.index(row)
