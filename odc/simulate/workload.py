"""What one step computes and moves: units in order of use, and the compute seconds of every microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from odc.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """One `fully_shard`ed module."""

    parameter_bytes: float  # of the whole unit as fetched or gathered
    gradient_bytes: float  # of the whole unit as pushed or reduced
    share: float  # of a microbatch's compute, 0 to 1
    kept: bool = False  # stays gathered after forward, so it is not fetched again in backward (the root)


@dataclass(frozen=True)
class Model:
    """Units in the order forward uses them; backward uses them in reverse."""

    units: tuple[Unit, ...]  # at least one; their shares add up to 1
    forward: float = 1 / 3  # share of a microbatch's compute; 1/4 when backward computes forward again
    unit_seconds: float = 0.0  # fixed compute time of each use of a unit, however short the microbatch
    optimizer_seconds: float = 0.0  # from the last rank's end of a minibatch to the end of the optimizer's update
    accumulator: float = 1.0  # bytes of a summed gradient over those of one as pushed; 2 for fp32 sums of bf16

    def __post_init__(self) -> None:
        if not self.units:
            raise ConfigError("a model needs at least one unit")
        if not math.isclose(sum(unit.share for unit in self.units), 1.0, abs_tol=1e-9):
            raise ConfigError(f"shares of the units add up to {sum(u.share for u in self.units)!r}, not to 1")
        for unit in self.units:
            if min(unit.parameter_bytes, unit.gradient_bytes, unit.share) < 0:
                raise ConfigError(f"bytes and shares of a unit must be 0 or more: {unit}")
        if not (0 < self.forward < 1 and min(self.unit_seconds, self.accumulator, self.optimizer_seconds) >= 0):
            raise ConfigError(
                "forward lies between 0 and 1; unit_seconds, accumulator and optimizer_seconds are 0 or more"
            )

    @property
    def parameter_bytes(self) -> float:
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def gradient_bytes(self) -> float:
        return sum(unit.gradient_bytes for unit in self.units)

    def uses(self) -> list[Use]:
        """The uses of units in one microbatch: all of forward, then all of backward in reverse."""
        forward = [
            Use(place, place == 0, False, unit.share * self.forward, unit.parameter_bytes, 0.0)
            for place, unit in enumerate(self.units)
        ]
        back = [
            Use(
                unit=len(self.units) - 1 - place,
                first=place == 0,
                backward=True,
                share=unit.share * (1 - self.forward),
                fetch_bytes=0.0 if unit.kept else unit.parameter_bytes,
                push_bytes=unit.gradient_bytes,
            )
            for place, unit in enumerate(reversed(self.units))
        ]
        return forward + back


@dataclass(frozen=True)
class Use:
    """One use of unit `unit`; the `first` of a pass has nothing before it during which it could be fetched ahead."""

    unit: int
    first: bool
    backward: bool
    share: float
    fetch_bytes: float
    push_bytes: float


@dataclass(frozen=True)
class Gang:
    """The pieces of one split sample: a rank each, which begin every unit that computes together."""

    ranks: tuple[int, ...]  # different ones
    seconds: tuple[float, ...]  # compute of each piece, on a rank of factor 1 without jitter
    exchange_seconds: float = 0.0  # of the keys and values of one unit, once all have come; again for their gradients


def even_model(layers: int, nbytes: float, *, root_bytes: float = 0.0, checkpointing: bool = False) -> Model:
    """`layers` equal units, `nbytes` of parameters and of gradients in all, after a root that stays gathered.

    The root (embedding and head) takes no compute here: the cost model counts it with the layers.
    """
    layer = Unit(nbytes / layers, nbytes / layers, 1.0 / layers)
    root = (Unit(root_bytes, root_bytes, 0.0, kept=True),) if root_bytes else ()
    return Model((*root, *(layer,) * layers), forward=1 / 4 if checkpointing else 1 / 3)


def checked_seconds(seconds: Sequence[Sequence[float]], ranks: int) -> list[list[float]]:
    """`seconds[r][m]` of compute as lists of floats; ConfigError unless all finite, >= 0, and one list a rank."""
    if len(seconds) != ranks:
        raise ConfigError(f"the plan is for {len(seconds)} ranks, the cluster has {ranks}")
    plain = [[float(second) for second in listed] for listed in seconds]
    if any(not 0 <= second < math.inf for listed in plain for second in listed):
        raise ConfigError("compute seconds of a microbatch must be finite, 0 or more")
    return plain
