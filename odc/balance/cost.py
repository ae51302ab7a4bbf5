"""Cost models: what one sample of a given length costs to train on, forward and backward.

Chose small callables on a length that add up over the samples of a microbatch, because attention is computed per
document: a microbatch costs the sum of its documents, not a function of its total. The price is that effects of the
whole microbatch (kernel launches, low use of the device on short ones) are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from odc.errors import PlanError

Cost = Callable[[int], float]


def linear_cost(length: int) -> float:
    """One unit per token."""
    return float(length)


@dataclass(frozen=True)
class QuadraticCost:
    """`a * length + b * length**2`, in whatever unit a and b have."""

    a: float
    b: float

    def __call__(self, length: int) -> float:
        """The cost of one sample of `length` tokens."""
        return self.a * length + self.b * length * length


def quadratic(a: float, b: float) -> QuadraticCost:
    """The cost `a * l + b * l * l`; both coefficients >= 0 and not both zero, or PlanError."""
    if not (a >= 0 and b >= 0 and a + b > 0):
        raise PlanError(f"quadratic cost needs a >= 0 and b >= 0, not both zero; got a={a!r}, b={b!r}")
    return QuadraticCost(float(a), float(b))


@dataclass(frozen=True)
class WindowedCost:
    """`a * length + b * length**2`, plus layers whose attention sees only the last tokens.

    Args:
        a, b: as in QuadraticCost; b of the layers that see the whole document.
        windows: (tokens seen, b of the layers that see so many), one entry for each window size.
    """

    a: float
    b: float
    windows: tuple[tuple[int, float], ...]

    def __call__(self, length: int) -> float:
        """The cost of one sample of `length` tokens."""
        seen = self.b * length * length
        for window, b in self.windows:
            # Of the l^2 / 2 pairs of a causal document, those further apart than the window are never computed.
            seen += b * (length * length - max(0, length - window) ** 2)
        return self.a * length + seen
