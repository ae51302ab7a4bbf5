"""LB-Split: LB-Mini, after the costliest samples were cut into pieces that run on several ranks.

No plan of whole samples ends before its costliest sample does. Here the costliest ones are split over 2, 4, 8 ...
neighbouring ranks first, and the others fill up what those pieces leave. Several sets of samples to split are tried;
the plan with the fewest pieces wins among those that end at nearly the same time, and LB-Mini's own plan, which has
none, is one of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from odc.balance.cost import Cost, linear_cost
from odc.balance.inputs import MOST_TOKENS, Inputs, read_caps, read_inputs
from odc.balance.packing import STEPS
from odc.balance.plan import Plan
from odc.balance.planners import few_and_even, lb_mini
from odc.balance.slices import SplitSample, contiguous, costs_of, zigzag
from odc.errors import PlanError

FLOOR = 2048  # tokens of the shortest piece: an H100 at 40% of its peak with links of 200 GB/s
_SHARES = (1.0, 0.7, 0.5, 0.25, 0.125, 0.0)  # of the mean cost of a rank: the most that a piece may cost
_ENOUGH = 1.002  # an end this near to the mean ends the search
_ALIKE = 1.005  # ends this near to the earliest count as equal to it
_PROMISING = 1.1  # trades are tried where the end is at most this far from the earliest found
_ALL_STEPS = 1_000_000  # of the searches for one microbatch fewer, over all ranks
_TRADES = 256
# Of the drafts that are tried first: how many samples are split, as a multiple of those that cost more than the mean
# of a rank, and the share of the mean that a piece may cost.
_FIRST = ((1.0, 1.0), (3.0, 0.5), (1.5, 0.5), (3.0, 0.25), (2.0, 0.125), (1.5, 0.25), (3.0, 0.7), (1.0, 0.7))
_FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0, 1.25, 1.1, 0.9)  # tried next, with every share; then every number
_WORK, _TRIES = 30_000, 12  # samples and ranks of all drafts together; at least so many drafts


def floor_of(flops_per_s: float, bytes_per_s: float) -> int:
    """Tokens below which a piece computes for less time than it takes to fetch the bf16 parameters of its layers.

    Args:
        flops_per_s: that a rank reaches, not its peak.
        bytes_per_s: of the link over which it fetches parameters.
    """
    return max(1, round(flops_per_s / bytes_per_s))


def lb_split(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int | Sequence[int],
    cost: Cost = linear_cost,
    seed: int = 0,
    *,
    speeds: Sequence[float] | None = None,
    groups: Sequence[Hashable] | None = None,
    node: int | None = None,
    floor: int = FLOOR,
    wait: float = 0.0,
    one_slice: bool = False,
) -> Plan:
    """LB-Mini's plan, or one that ends earlier because some samples are split; never one that ends later.

    Args:
        lengths, ranks, cost, seed, speeds: as in `lb_mini`.
        max_tokens: cap on the tokens of a microbatch and of a piece. A longer sample is split.
        groups: as in `lb_mini`; only a sample whose name no other sample has may be split.
        node: ranks of one host. Pieces of a sample lie on aligned neighbours of one host; all ranks unless given.
        floor: tokens that a piece has at least, see `floor_of`. Only a cap makes pieces shorter.
        wait: added to the cost of every piece, for the time in which it waits for the others.
        one_slice: cut into contiguous pieces of equal cost, for which `cost` must be right. Zig-zag pieces, the
            default, cost the same unless the model has windows.

    Raises PlanError for bad input, and for a sample whose pieces are above the cap on the most ranks it may take.
    """
    caps = read_caps(max_tokens, ranks)
    uncapped = [MOST_TOKENS] * len(caps)  # a longer sample is split; caps are kept below
    inputs = read_inputs(lengths, ranks, uncapped, cost, seed, speeds, groups)
    if (node is not None and node < 1) or floor < 1 or not wait >= 0:
        raise PlanError(f"lb_split needs node >= 1, floor >= 1 and wait >= 0; got {node!r}, {floor!r}, {wait!r}")
    _refuse_shared(inputs, max(caps))
    search = _Search(inputs, caps, cost, node or ranks, floor, wait, one_slice)
    whole = None
    if max(inputs.lengths) <= max(caps):
        whole = lb_mini(lengths, ranks, max_tokens, cost, seed, speeds=speeds, groups=groups)
        if whole.longest <= search.mean * _ENOUGH:
            return whole
    drafts = list(search.drafts(whole.longest if whole is not None else float("inf")))
    best = min([draft.end for draft in drafts] + ([whole.longest] if whole is not None else []))
    if whole is not None and whole.longest <= best * _ALIKE:
        return whole
    few = min((draft for draft in drafts if draft.end <= best * _ALIKE), key=lambda draft: (draft.pieces, draft.end))
    return search.plan(few)


def _refuse_shared(inputs: Inputs, cap: int) -> None:
    """Raise PlanError for a sample above every cap that shares its group, and so may not be split."""
    for group in inputs.groups:
        sample = max(group, key=inputs.lengths.__getitem__)
        if len(group) > 1 and inputs.lengths[sample] > cap:
            raise PlanError(
                f"sample {sample} has {inputs.lengths[sample]} tokens, above the cap of {cap}; it shares its group "
                f"with {len(group) - 1} more, so it may not be split"
            )


@dataclass
class _Draft:
    """Which samples are split, and where the groups of the others lie."""

    splits: list[tuple[SplitSample, range]]  # a cut sample, and the ranks of its pieces
    parts: list[list[int]]  # of each rank, indices of groups
    loads: list[float]  # when each rank ends

    @property
    def end(self) -> float:
        return max(self.loads)

    @property
    def pieces(self) -> int:
        return sum(len(ranks) for _, ranks in self.splits)


@dataclass
class _Search:
    """A minibatch and the rules by which its samples are split."""

    inputs: Inputs
    caps: list[int]
    cost: Cost
    node: int
    floor: int
    wait: float
    one_slice: bool
    cuts: dict[tuple[int, int], SplitSample] = field(default_factory=dict)
    fits: dict[int, list[int]] = field(default_factory=dict)  # of a sample: numbers of pieces that are within the caps

    @cached_property
    def cap(self) -> int:
        """The largest."""
        return max(self.caps)

    @cached_property
    def speeds(self) -> list[float]:
        return self.inputs.speeds or [1.0] * self.inputs.ranks

    @cached_property
    def mean(self) -> float:
        """When all ranks would end if everything could be divided at will."""
        return sum(self.inputs.costs) / sum(self.speeds)

    @cached_property
    def blocks(self) -> dict[int, list[range]]:
        """Aligned neighbours of one host on which the pieces of a sample may lie, by their number."""
        found: dict[int, list[range]] = {}
        size, ranks = 2, self.inputs.ranks
        while size <= min(self.node, ranks):
            starts = [host + at for host in range(0, ranks, self.node) for at in range(0, self.node - size + 1, size)]
            found[size] = [range(start, start + size) for start in starts if start + size <= ranks]
            size *= 2
        return {size: blocks for size, blocks in found.items() if blocks}

    @cached_property
    def rooms(self) -> dict[int, int]:
        """Most tokens of a piece, by the number of pieces: those that some block's ranks all take."""
        return {size: max(min(self.caps[rank] for rank in one) for one in self.blocks[size]) for size in self.blocks}

    @cached_property
    def groups(self) -> list[tuple[float, int, int]]:
        """(cost, longest sample, index) of every group by falling cost."""
        costs, lengths = self.inputs.costs, self.inputs.lengths
        rank_of = {i: at for at, i in enumerate(self.inputs.order)}
        listed = [(sum(costs[i] for i in g), max(lengths[i] for i in g), at) for at, g in enumerate(self.inputs.groups)]
        return sorted(listed, key=lambda one: (-one[0], -one[1], rank_of[self.inputs.groups[one[2]][0]]))

    @cached_property
    def cost_of(self) -> dict[int, tuple[float, int]]:
        """(cost, longest sample) of every group."""
        return {at: (cost, length) for cost, length, at in self.groups}

    def drafts(self, best: float) -> Iterator[_Draft]:
        """Every draft that was tried; `best` is the end that one must come near to be worth trades."""
        alone = [one for one in self.groups if len(self.inputs.groups[one[2]]) == 1]
        alone.sort(key=lambda one: one[1] <= self.cap)  # those that must be split come first
        needed = sum(length > self.cap for _, length, _ in alone)
        for _, length, at in alone[:needed]:
            if not self._pieces([at], 0.0):
                raise PlanError(
                    f"sample {self.inputs.groups[at][0]} has {length} tokens: neither whole nor in "
                    f"{max(self.blocks, default=1)} pieces does it fit into the cap of {self.cap} tokens"
                )
        order, rest = [at for _, _, at in alone], [cost for cost, _, _ in alone] + [0.0]
        shortest = self.floor * min(self.blocks, default=math.inf)
        able = (i for i, (_, length, _) in enumerate(alone, 1) if length > self.cap or length >= shortest)
        left = max(_TRIES, _WORK // (len(self.groups) + self.inputs.ranks))
        tried: set[tuple[tuple[int, int], ...]] = set()
        first = max(1, needed)
        for count, share in _tries(first, sum(cost > self.mean for cost in rest), max(able, default=0)):
            if rest[count] / max(self.speeds) > best * _ALIKE:  # the costliest whole sample ends too late
                continue
            pieces = self._pieces(order[:count], share * self.mean)
            if pieces in tried or not pieces:
                continue
            tried.add(pieces)
            draft = self._draft(pieces)
            left -= 1
            if draft.end <= best * _PROMISING:
                self._trade(draft)
            best = min(best, draft.end)
            yield draft
            if best <= self.mean * _ENOUGH or left <= 0:
                return

    def plan(self, draft: _Draft) -> Plan:
        """The plan of a draft, whole samples packed into microbatches."""
        ranks, steps = [], min(STEPS, _ALL_STEPS // self.inputs.ranks)
        for part, cap in zip(draft.parts, self.caps, strict=True):
            samples = [i for at in part for i in self.inputs.groups[at]]
            packed = few_and_even(self.inputs.lengths, samples, cap, steps) if samples else []
            ranks.append(sorted(packed, key=lambda mb: -sum(self.inputs.costs[i] for i in mb)))
        inputs = self.inputs
        splits = [SplitSample(cut.sample, list(on), cut.slices, self._costs(cut, on)) for cut, on in draft.splits]
        return Plan.of(ranks, inputs.costs, speeds=inputs.speeds, bound=self.mean, splits=splits)

    def _costs(self, cut: SplitSample, ranks: range) -> list[float]:
        return [cost / self.speeds[rank] + self.wait for cost, rank in zip(cut.costs, ranks, strict=True)]

    def _pieces(self, groups: list[int], most: float) -> tuple[tuple[int, int], ...]:
        """(pieces, group) of each of these groups that is split, so that no piece costs more than `most`."""
        found = []
        for at in groups:
            sample = self.inputs.groups[at][0]
            length, cost = self.inputs.lengths[sample], self.inputs.costs[sample]
            if sample not in self.fits:
                least = 1 if length > self.cap else max(2, self.floor)
                sizes = [size for size in self.blocks if length >= least * size]
                self.fits[sample] = [size for size in sizes if max(self._cut(sample, size).tokens) <= self.rooms[size]]
            fits = self.fits[sample]
            if length > self.cap and not fits:
                return ()
            enough = [size for size in fits if cost / size <= most] or fits[-1:]
            if enough and length < enough[0] * self.floor:  # it cannot be whole
                # As many pieces as the floor leaves, or else as few as there can be.
                enough = [size for size in fits if length >= size * self.floor][-1:] or fits[:1]
            if enough:
                found.append((enough[0], at))
        return tuple(found)

    def _cut(self, sample: int, size: int) -> SplitSample:
        """A sample in so many pieces, on no ranks yet."""
        key = (sample, size)
        if key not in self.cuts:
            length = self.inputs.lengths[sample]
            slices = contiguous(length, size, self.cost) if self.one_slice else zigzag(length, size)
            self.cuts[key] = SplitSample(sample, [], slices, costs_of(slices, self.cost))
        return self.cuts[key]

    def _draft(self, pieces: tuple[tuple[int, int], ...]) -> _Draft:
        """Pieces on the blocks that are free first, then every group on the rank that ends it first."""
        loads, splits = [0.0] * self.inputs.ranks, list[tuple[SplitSample, range]]()
        free = _Free(self, loads)
        seat = {at: place for place, (_, _, at) in enumerate(self.groups)}
        for size, at in sorted(pieces, key=lambda one: (-one[0], seat[one[1]])):
            cut = self._cut(self.inputs.groups[at][0], size)
            chosen = free.take(cut, size)
            splits.append((cut, chosen))
            end = max(loads[chosen.start : chosen.stop]) + max(self._costs(cut, chosen))
            loads[chosen.start : chosen.stop] = [end] * size
        split = {at for _, at in pieces}
        draft = _Draft(splits, [[] for _ in loads], loads)
        self._fill(draft, [one for one in self.groups if one[2] not in split])
        return draft

    def _fill(self, draft: _Draft, groups: list[tuple[float, int, int]]) -> None:
        """Longest first, all within the largest cap."""
        if self.inputs.alike and min(self.caps) == self.cap:
            heap = [(load, rank) for rank, load in enumerate(draft.loads)]
            heapq.heapify(heap)
            for cost, _, at in groups:
                load, rank = heap[0]
                draft.parts[rank].append(at)
                draft.loads[rank] = load + cost
                heapq.heapreplace(heap, (load + cost, rank))
            return
        for cost, length, at in groups:
            able = [rank for rank, cap in enumerate(self.caps) if length <= cap]
            rank = min(able, key=lambda rank: draft.loads[rank] + cost / self.speeds[rank])
            draft.parts[rank].append(at)
            draft.loads[rank] += cost / self.speeds[rank]

    def _trade(self, draft: _Draft) -> None:
        """Let the last rank give groups to others, or change one for one, while that makes it end earlier."""
        loads, most = np.array(draft.loads), min(8, len(draft.loads))
        for _ in range(min(4 * len(loads), _TRADES)):
            late = int(loads.argmax())
            if loads[late] <= self.mean * _ENOUGH:
                return
            # Sorted as a whole: which of equal loads a partial sort takes depends on the processor.
            for early in map(int, np.argsort(loads, kind="stable")[:most]):
                if early != late and self._swap(draft, late, early):
                    loads[late], loads[early] = draft.loads[late], draft.loads[early]
                    break
            else:
                return

    def _swap(self, draft: _Draft, late: int, early: int) -> bool:
        """The trade of one group for one or none that lets the later of two ranks end soonest, if any helps."""
        loads, soonest, best, cost_of = draft.loads, draft.loads[late] * (1 - 1e-9), None, self.cost_of
        takes: list[int | None] = [None, *draft.parts[early]]
        for give in draft.parts[late]:
            cost, length = cost_of[give]
            if length > self.caps[early]:
                continue
            for take in takes:
                back, size = cost_of[take] if take is not None else (0.0, 0)
                if size > self.caps[late]:
                    continue
                after = loads[late] - (cost - back) / self.speeds[late]
                other = loads[early] + (cost - back) / self.speeds[early]
                if max(after, other) < soonest:
                    soonest, best = max(after, other), (give, take, after, other)
        if best is None:
            return False
        give, take, loads[late], loads[early] = best
        draft.parts[late].remove(give)
        draft.parts[early].append(give)
        if take is not None:
            draft.parts[early].remove(take)
            draft.parts[late].append(take)
        return True


class _Free:
    """Finds the block that ends a split sample first, while `loads` grow."""

    def __init__(self, search: _Search, loads: list[float]) -> None:
        self._search, self._loads = search, loads
        self._alike = search.inputs.alike and min(search.caps) == max(search.caps)
        self._heaps: dict[int, list[tuple[float, int]]] = {}  # of each size: (start, block), starts perhaps too early

    def take(self, cut: SplitSample, size: int) -> range:
        """The block of `size` ranks for a sample; some block may hold its pieces."""
        blocks = self._search.blocks[size]
        if not self._alike:
            return self._scan(cut, blocks)
        if size not in self._heaps:
            self._heaps[size] = [(self._start(block), at) for at, block in enumerate(blocks)]
            heapq.heapify(self._heaps[size])
        heap = self._heaps[size]
        while (start := self._start(blocks[heap[0][1]])) > heap[0][0]:
            heapq.heapreplace(heap, (start, heap[0][1]))
        return blocks[heap[0][1]]

    def _start(self, block: range) -> float:
        return max(self._loads[block.start : block.stop])

    def _scan(self, cut: SplitSample, blocks: list[range]) -> range:
        speeds, caps, need = self._search.speeds, self._search.caps, max(cut.tokens)
        able = [block for block in blocks if min(caps[rank] for rank in block) >= need]

        def end(block: range) -> float:
            return self._start(block) + max(cost / speeds[rank] for cost, rank in zip(cut.costs, block, strict=True))

        return min(able, key=end)


def _tries(first: int, long: int, last: int) -> Iterator[tuple[int, float]]:
    """(samples to split, share) of drafts, the most promising first; `long` samples cost more than the mean."""
    grid = [*_FIRST, *((factor, share) for factor in _FACTORS for share in _SHARES)]
    for factor, share in grid if first <= last else ():
        yield min(max(first, round(factor * long)), last), share
    for share in _SHARES:
        for count in range(first, last + 1):
            yield count, share
