"""The input of a policy: checked in one place for all policies, and lengths read from files."""

from __future__ import annotations

import json
import math
import operator
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc.balance.bound import lower_bound
from odc.balance.cost import Cost
from odc.balance.partition import partition
from odc.balance.state import Ints
from odc.errors import DataError, PlanError

#: No minibatch has more tokens: sums of lengths are int64.
MOST_TOKENS = 2**63 - 1


@dataclass(frozen=True)
class Inputs:
    """A minibatch to plan, checked."""

    lengths: list[int]  # tokens of every sample
    costs: list[float]  # of every sample on a rank of speed 1
    caps: list[int]  # most tokens of a microbatch on each rank
    speeds: list[float] | None  # of each rank, or None when all are alike
    groups: list[list[int]]  # lists of samples that stay on one rank together, in arrival order
    sticky: bool  # whether any group has more than one sample
    seed: int  # decides between samples (groups) of equal cost and length

    @property
    def ranks(self) -> int:
        return len(self.caps)

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same speed and cap."""
        return self.speeds is None and min(self.caps) == max(self.caps)

    @cached_property
    def order(self) -> list[int]:
        """Samples by falling cost, then falling length, then `seed`."""
        keys = (_draws(len(self.lengths), self.seed), -np.asarray(self.lengths), -np.asarray(self.costs))
        order: list[int] = np.lexsort(keys).tolist()
        return order

    @cached_property
    def bound(self) -> float:
        """No plan of this input has a longest rank that takes less."""
        costs, needs = self._of_groups
        return lower_bound(costs, self.ranks, speeds=self.speeds, needs=needs, limits=self.caps)

    def spread(self, *, equal_sizes: bool = False) -> list[list[int]]:
        """Samples of each rank, by falling cost; PlanError where `equal_sizes` is asked of unequal groups."""
        if equal_sizes and len({len(group) for group in self.groups}) > 1:
            raise PlanError("groups of unequal size cannot give every rank as many samples: drop equal_samples")
        costs, needs = self._of_groups
        seats = np.lexsort((_draws(len(costs), self.seed), -needs))
        ties = np.empty(len(costs), np.int64)
        ties[seats] = np.arange(len(costs))
        limited = min(self.caps) < max(self.caps)
        owners = partition(
            costs,
            self.ranks,
            equal_sizes=equal_sizes,
            speeds=self.speeds,
            needs=needs if limited else None,
            limits=self.caps if limited else None,
            ties=ties,
        ).tolist()
        rank_of = [0] * len(self.lengths)
        for owner, group in zip(owners, self.groups, strict=True):
            for i in group:
                rank_of[i] = owner
        parts: list[list[int]] = [[] for _ in range(self.ranks)]
        for i in self.order:
            parts[rank_of[i]].append(i)
        return parts

    @cached_property
    def _of_groups(self) -> tuple[NDArray[np.float64], Ints]:
        """Cost and longest sample of every group."""
        if not self.sticky:
            return np.asarray(self.costs, np.float64), np.asarray(self.lengths, np.int64)
        costs = np.array([math.fsum(self.costs[i] for i in group) for group in self.groups])
        return costs, np.array([max(self.lengths[i] for i in group) for group in self.groups], np.int64)


def read_inputs(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int | Sequence[int],
    cost: Cost,
    seed: int,
    speeds: Sequence[float] | None,
    groups: Sequence[Hashable] | None,
) -> Inputs:
    """Check the arguments of a policy, which `odc.balance.lb_mini` lists.

    Raises PlanError for no samples or ranks, lengths, ranks, caps or a seed that are no integers, a length below 1, a
    sample over the cap, caps, speeds or groups of the wrong number, a speed that is not above 0, a cost that is not
    finite and >= 0.
    """
    if not hasattr(seed, "__index__"):
        raise PlanError(f"seed must be an integer, got {seed!r}")
    caps = read_caps(max_tokens, ranks)
    if len(caps) != ranks:
        raise PlanError(f"max_tokens lists {len(caps)} caps for {ranks} ranks")
    known = _checked_lengths(lengths, caps)
    distinct, places = np.unique(known, return_inverse=True)
    values = np.array([float(cost(int(length))) for length in distinct])
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        i = int(np.flatnonzero(places == bad[0])[0])
        wrong = float(values[bad[0]])
        raise PlanError(f"the cost of sample {i} ({known[i]} tokens) is {wrong!r}, not a finite number >= 0")
    listed = _groups(groups, len(known))
    return Inputs(
        lengths=known.tolist(),
        costs=values[places].tolist(),
        caps=caps,
        speeds=_checked_speeds(speeds, ranks),
        groups=listed,
        sticky=len(listed) < len(known),
        seed=operator.index(seed),  # of NumPy's integers `random` takes none
    )


def read_caps(max_tokens: Any, ranks: int) -> list[int]:
    """The cap of each rank, given one for all or one for each; PlanError for ranks or caps that are no integers."""
    if not hasattr(ranks, "__index__") or ranks < 1:
        raise PlanError(f"a plan needs a whole number of ranks, at least 1; got ranks={ranks!r}")
    try:
        listed = max_tokens if np.ndim(max_tokens) else [max_tokens] * ranks
        return [min(operator.index(cap), MOST_TOKENS) for cap in listed]
    except TypeError:
        raise PlanError(
            f"max_tokens must be an integer, or a sequence of one for each rank, got {max_tokens!r}"
        ) from None


def _checked_lengths(lengths: Sequence[int], caps: list[int]) -> Ints:
    try:
        known = np.asarray(lengths)
    except ValueError as error:  # such as token lists of unequal lengths
        raise PlanError(f"lengths must be one list of integers: {error}") from error
    if not known.size:
        raise PlanError("there are no samples to plan: lengths is empty")
    if known.ndim == 1 and known.dtype.kind != "i":  # numpy makes uint64, floats or objects of integers beyond int64
        for i, length in enumerate(lengths):
            if isinstance(length, (int, np.integer)) and length > MOST_TOKENS:
                raise PlanError(f"sample {i} has {length} tokens, more than the {MOST_TOKENS} that can be counted")
    if known.ndim != 1 or known.dtype.kind not in "iu":
        raise PlanError(f"lengths must be one list of integers, got {known.dtype} of shape {known.shape}")
    for i in np.flatnonzero((known < 1) | (known > max(caps))).tolist():
        if known[i] < 1:
            raise PlanError(f"sample {i} has length {known[i]}; every sample needs at least one token")
        raise PlanError(f"sample {i} has {known[i]} tokens, more than the cap of {max(caps)} per microbatch")
    if known.sum(dtype=np.float64) >= MOST_TOKENS:
        raise PlanError(f"the lengths add up to more than the {MOST_TOKENS} tokens that can be counted")
    return known.astype(np.int64)


def _checked_speeds(speeds: Sequence[float] | None, ranks: int) -> list[float] | None:
    if speeds is None:
        return None
    known = [float(speed) for speed in speeds]
    if len(known) != ranks:
        raise PlanError(f"speeds lists {len(known)} speeds for {ranks} ranks")
    for rank, speed in enumerate(known):
        if not (math.isfinite(speed) and speed > 0):
            raise PlanError(f"rank {rank} has speed {speed!r}; a speed is a finite number above 0")
    return None if all(speed == 1.0 for speed in known) else known


def _groups(names: Sequence[Hashable] | None, samples: int) -> list[list[int]]:
    if names is None:
        return [[i] for i in range(samples)]
    if len(names) != samples:
        raise PlanError(f"groups names {len(names)} samples, but there are {samples}")
    members: dict[Hashable, list[int]] = {}
    # Of a tensor's elements no two have one hash.
    for i, name in enumerate(names.tolist() if hasattr(names, "tolist") else names):
        members.setdefault(name, []).append(i)
    return list(members.values())


def _draws(count: int, seed: int) -> NDArray[np.float64]:
    """Sort keys that decide between equals: arrival order for seed 0, else random numbers.

    `random()` of a seeded `random.Random` is guaranteed to stay the same over Python versions and machines.
    """
    if seed == 0:
        return np.arange(count, dtype=np.float64)
    draw = random.Random(seed).random
    return np.array([draw() for _ in range(count)])


def read_lengths(path: str | Path, field: str = "length") -> list[int]:
    """Tokens of every sample listed in a file.

    The file holds integers between spaces, commas or line ends; or a JSON list; or JSON lines. Elements of a list and
    lines are integers or objects whose `field` is an integer or a list (such as `input_ids`), which counts its items.
    Raises DataError naming the file and the element that is none of these.
    """
    return [_length(element, field, f"{path}: element {i}") for i, element in enumerate(read_elements(path))]


def read_elements(path: str | Path) -> list[Any]:
    """What a file of lengths lists: integers, or objects. Raises DataError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error
    start = text.lstrip()[:1]
    try:
        if start == "[":
            elements = json.loads(text)
        elif start == "{":
            elements = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            elements = [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: neither integers, nor a JSON list, nor JSON lines: {error}") from error
    if not elements:
        raise DataError(f"{path}: lists no lengths")
    return list(elements)


def _length(element: Any, field: str, where: str) -> int:
    if isinstance(element, dict):
        if field not in element:
            raise DataError(
                f"{where} has no field {field!r}; name its field of lengths: {', '.join(element) or 'none'}"
            )
        element = element[field]
    if isinstance(element, list):
        return len(element)
    if isinstance(element, bool) or not isinstance(element, int):
        raise DataError(f"{where} is {element!r}, neither an integer nor a list")
    return element
