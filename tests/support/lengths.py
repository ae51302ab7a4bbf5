"""Nine distributions of lengths: those of `odc`'s planning figures, and shapes that are hard for a heap of loads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from odc.balance.state import Ints

Draw = Callable[[np.random.Generator, int], np.ndarray]


def _lognormal(mean: float, sigma: float, cap: int) -> Draw:
    location = float(np.log(mean) - sigma**2 / 2)
    return lambda rng, n: np.minimum(cap, rng.lognormal(location, sigma, n))


DISTRIBUTIONS: dict[str, Draw] = {
    "LongAlign-like": _lognormal(20000, 1.0, 65536),
    "SWE-Smith-like, 32K": lambda rng, n: np.minimum(32768, rng.normal(26000, 6500, n)),
    "SWE-Smith-like, 128K": _lognormal(36000, 0.6, 131072),
    "GRPO-like": _lognormal(2100, 0.9, 8192),
    "AIME-like": lambda rng, n: 16384 * rng.beta(1.8, 1.4, n),
    "uniform": lambda rng, n: rng.uniform(1, 4096, n),
    "exponential": lambda rng, n: rng.exponential(3000, n),
    "two lengths": lambda rng, n: np.where(rng.random(n) < 0.2, 30011, 2003),
    "Pareto": lambda rng, n: np.minimum(1 << 20, 500 * (1 + rng.pareto(1.1, n))),
}


def draw_lengths(name: str, samples: int, seed: int) -> Ints:
    """Lengths >= 1 of one of DISTRIBUTIONS."""
    values = DISTRIBUTIONS[name](np.random.default_rng(seed), samples)
    return np.maximum(1, values).astype(np.int64)
