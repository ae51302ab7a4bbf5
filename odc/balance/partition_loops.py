"""The inner loops of the partition engine: place every sample once, then trade between pairs of parts.

They run compiled by numba (`odc.balance.compiled`) or interpreted, with the same result, so they use only integers
below 2**53, products of two floats, and neither numpy nor functions of other modules. A sample is its place in
`state.costs`.
"""

from __future__ import annotations

from typing import Any

from odc.balance.state import Assignment, Rules

_ROUNDS = 24
_STALE = 3  # rounds that leave the latest part as late as it was
_TRADES = 256  # at least so many may follow the rounds


def solve(state: Assignment, rules: Rules) -> None:
    """Trade until no part ends after the goal or no trade helps.

    Rounds first: the latest part trades with the earliest, the next with the next. Then only the latest, with many.
    """
    best, stale = -1.0, 0
    many = len(state.costs) > len(state.chosen) * len(state.loads)  # swaps find something near to every ideal
    for _ in range(_ROUNDS):
        _by_time(state)
        low, high = 0, len(state.loads) - 1
        latest = _time(state, state.order[high])
        stale = stale + 1 if 0 <= best <= latest else 0
        best = latest
        if latest <= rules.goal or stale == _STALE:
            break
        while low < high and _time(state, state.order[high]) > rules.goal:
            if many:
                swap(state, state.order[high], state.order[low], rules)
            else:
                _trade(state, state.order[high], state.order[low], rules)
            low += 1
            high -= 1
    trades, active = _TRADES, len(state.loads) - 1
    if rules.everywhere:
        trades = max(trades, 4 * len(state.loads))
    while trades > 0 and active > 0:
        _again_by_time(state)
        if _time(state, state.order[active]) <= rules.goal:
            break
        if _shorten(state, active, rules):
            trades -= 1
        elif rules.everywhere:
            active -= 1
        else:
            break


def _time(state: Assignment, part: int) -> float:
    time: float = state.loads[part] * state.slowness[part]
    return time


def _trade(state: Assignment, late: int, early: int, rules: Rules) -> bool:
    slow, fast = state.slowness[late], state.slowness[early]
    together = (state.loads[late] + state.loads[early]) * slow * fast / (slow + fast)
    if together >= _time(state, late) * (1.0 - rules.worth):
        return False
    traded = swap(state, late, early, rules)
    if _time(state, late) > rules.goal and split(state, late, early, rules):
        traded = True
    return traded


def _shorten(state: Assignment, active: int, rules: Rules) -> bool:
    """One trade of the part at `active` in `order` with the first of the earliest that helps; False if none does."""
    at, partners = 0, min(rules.partners, active)
    while at < partners and not _trade(state, state.order[active], state.order[at], rules):
        at += 1
    return at < partners


def _by_time(state: Assignment) -> None:
    """Merge sort of `order` by rising time, equals by part."""
    order, spare = state.order, state.spare
    k, width = len(order), 1
    while width < k:
        for low in range(0, k, 2 * width):
            left, right, end = low, min(low + width, k), min(low + 2 * width, k)
            middle = right
            for to in range(low, end):
                if right == end or (left < middle and not _before(state, order[right], order[left])):
                    spare[to], left = order[left], left + 1
                else:
                    spare[to], right = order[right], right + 1
        for at in range(k):
            order[at] = spare[at]
        width *= 2


def _again_by_time(state: Assignment) -> None:
    """The same by insertion, for an order that is nearly right."""
    order = state.order
    for at in range(1, len(order)):
        part, to = order[at], at
        while to > 0 and _before(state, part, order[to - 1]):
            order[to] = order[to - 1]
            to -= 1
        order[to] = part


def _before(state: Assignment, one: int, other: int) -> bool:
    first, second = _time(state, one), _time(state, other)
    return first < second or (first == second and one < other)


def longest_first(state: Assignment, bits: int) -> None:
    """Each sample, costliest first, to the part that would end it first; of equals the first kind, then the first part.

    Each kind of parts has a heap of (load << bits | part), which fits into 63 bits; 2**bits > k. Sizes are not counted.
    """
    costs, heads, links, kinds, heap = state.costs, state.heads, state.links, state.kinds, state.heap
    several, top, size, mask = len(kinds) > 2, 0, len(heap), (1 << bits) - 1
    for part in range(len(heap)):
        heap[part] = part
    for i in range(len(costs)):
        if several:
            kind = _first_to_end(state, i, bits)
            top = kinds[kind]
            size = kinds[kind + 1] - top
        part = heap[top] & mask
        links[i] = heads[part]
        heads[part] = i
        key = heap[top] + (costs[i] << bits)
        at, child = 0, 1
        while child < size:
            if child + 1 < size:
                child += heap[top + child + 1] < heap[top + child]  # added, not branched on: either is as likely
            if heap[top + child] > key:
                break
            heap[top + at] = heap[top + child]
            at, child = child, 2 * child + 1
        heap[top + at] = key
    for at in range(len(heap)):
        state.loads[heap[at] & mask] = heap[at] >> bits


def _first_to_end(state: Assignment, sample: int, bits: int) -> int:
    """The kind of parts whose least loaded part would end `sample` first, among those it may lie on."""
    best, soonest = -1, 0.0
    for kind in range(len(state.kinds) - 1):
        top = state.kinds[kind]
        if state.limits[top] >= state.needs[sample]:
            end = ((state.heap[top] >> bits) + state.costs[sample]) * state.slowness[top]
            if best < 0 or end < soonest:
                best, soonest = kind, end
    return best


def deal(state: Assignment) -> None:
    """As many samples as there are parts at a time, costliest first, the costliest to the part that ends first."""
    n, k = len(state.costs), len(state.loads)
    for start in range(0, n, k):
        _by_time(state)
        for at in range(min(k, n - start)):
            place(state, start + at, state.order[at])


def place(state: Assignment, i: int, part: int) -> None:
    """Put sample i, cheaper than those placed before it, on a part."""
    state.links[i] = state.heads[part]
    state.heads[part] = i
    state.loads[part] += state.costs[i]
    state.used[part] += state.sizes[i]


def put(state: Assignment, owners: Any) -> None:
    """Place every sample i on part `owners[i]`."""
    for i in range(len(state.costs)):
        place(state, i, owners[i])


def get(state: Assignment, owners: Any) -> None:
    """Write the part of every sample i to `owners[i]`."""
    for part in range(len(state.heads)):
        i = state.heads[part]
        while i >= 0:
            owners[i] = part
            i = state.links[i]


def swap(state: Assignment, late: int, early: int, rules: Rules) -> bool:
    """Trade one sample of `late` for one (or none, unless counts stay) of `early` so that the later ends soonest.

    Tries the samples nearest to the ideal trade and `reach` further ones on either side, as rooms may forbid the
    nearest. Returns whether there was a trade that helps.
    """
    slow, fast = state.slowness[late], state.slowness[early]
    above = _time(state, late) - _time(state, early)
    if above <= 0:
        return False
    ideal = above / (slow + fast)
    mine = _gather(state, late, early, state.mine, state.mine_costs, rules.counts)
    theirs = _gather(state, early, late, state.theirs, state.their_costs, rules.counts)
    soonest = _time(state, late) * (1.0 - rules.worth)
    mine_costs, their_costs = state.mine_costs, state.their_costs
    late_load, early_load = state.loads[late], state.loads[early]
    give, take, j = -1, -1, 0
    for i in range(mine):
        cost = mine_costs[i]
        while j + 1 < theirs and their_costs[j + 1] <= cost - ideal:
            j += 1
        for at in range(max(0, j - rules.reach), min(theirs, j + 2 + rules.reach)):
            moved = cost - their_costs[at]
            end = max((late_load - moved) * slow, (early_load + moved) * fast)
            if end < soonest and _fits(state, late, early, state.mine[i], state.theirs[at]):
                give, take, soonest = i, at, end
    if give < 0:
        return False
    _move(state, state.mine[give], late, early)
    _move(state, state.theirs[take], early, late)
    return True


def _gather(state: Assignment, part: int, other: int, samples: Any, costs: Any, counts: bool) -> int:
    """List the samples of `part` that may go to `other`, cheapest first, after a -1 for none unless `counts`."""
    all_costs, needs, links, limit = state.costs, state.needs, state.links, state.limits[other]
    found = 0
    if not counts:
        samples[0], costs[0], found = -1, 0, 1
    i = state.heads[part]
    while i >= 0:
        if needs[i] <= limit:
            samples[found] = i
            costs[found] = all_costs[i]
            found += 1
        i = links[i]
    return found


def _fits(state: Assignment, late: int, early: int, give: int, take: int) -> bool:
    moved = 0
    if give >= 0:
        moved += state.sizes[give]
    if take >= 0:
        moved -= state.sizes[take]
    fits: bool = state.used[early] + moved <= state.rooms[early] and state.used[late] - moved <= state.rooms[late]
    return fits


def _move(state: Assignment, sample: int, source: int, target: int) -> None:
    """Relink one sample, keeping both lists by rising cost; -1 is no sample."""
    if sample < 0:
        return
    before, at = -1, state.heads[source]
    while at != sample:
        before, at = at, state.links[at]
    if before < 0:
        state.heads[source] = state.links[sample]
    else:
        state.links[before] = state.links[sample]
    before, at = -1, state.heads[target]
    while at > sample:
        before, at = at, state.links[at]
    state.links[sample] = at
    if before < 0:
        state.heads[target] = sample
    else:
        state.links[before] = sample
    state.loads[source] -= state.costs[sample]
    state.loads[target] += state.costs[sample]
    state.used[source] -= state.sizes[sample]
    state.used[target] += state.sizes[sample]


def split(state: Assignment, late: int, early: int, rules: Rules) -> bool:
    """Divide the cheapest samples of two parts, as many as `chosen` holds, in the best of all ways between them.

    Horowitz and Sahni (1974): the subset sums of two halves, then two pointers. Where counts stay, an offset larger
    than any sum, added to every cost, leaves only subsets of the right size near the ideal. Returns whether there was
    a better division.
    """
    found, on_late = _choose(state, late, early)
    if found < 2:
        return False
    held, total, count, size = 0, 0, 0, 0  # cost of those on `late` and of all, number and size of those on `late`
    for at in range(found):
        sample = state.chosen[at]
        total += state.costs[sample]
        if on_late & (1 << at):
            held += state.costs[sample]
            size += state.sizes[sample]
            count += 1
    offset = total + 1 if rules.counts else 0
    half = found // 2
    left = _subsets(state, 0, half, offset, 0)
    right = _subsets(state, half, found, offset, len(state.sums) // 2)
    slow, fast = state.slowness[late], state.slowness[early]
    rest, other = state.loads[late] - held, state.loads[early] - (total - held)
    ideal = int(((other + total) * fast - rest * slow) / (slow + fast)) + offset * count
    soonest = max(state.loads[late] * slow, state.loads[early] * fast) * (1.0 - rules.worth)
    best, j = -1, (1 << (found - half)) - 1
    for i in range(1 << half):
        while j > 0 and state.sums[left + i] + state.sums[right + j] > ideal:
            j -= 1
        for at in range(j, min(j + 2, 1 << (found - half))):
            kept = state.sums[left + i] + state.sums[right + at] - offset * count
            end = max((rest + kept) * slow, (other + total - kept) * fast)
            if 0 <= kept <= total and end < soonest:
                moved = size - state.weights[left + i] - state.weights[right + at]
                if state.used[early] + moved <= state.rooms[early] and state.used[late] - moved <= state.rooms[late]:
                    best, soonest = state.masks[left + i] | state.masks[right + at], end
    if best < 0:
        return False
    for at in range(found):
        bit = 1 << at
        if on_late & bit and not best & bit:
            _move(state, state.chosen[at], late, early)
        elif best & bit and not on_late & bit:
            _move(state, state.chosen[at], early, late)
    return True


def _choose(state: Assignment, late: int, early: int) -> tuple[int, int]:
    """List in `chosen` samples that may lie on either part, cheapest first; how many, and a bit for each on `late`."""
    mine = _gather(state, late, early, state.mine, state.mine_costs, True)
    theirs = _gather(state, early, late, state.theirs, state.their_costs, True)
    i, j, on_late = 0, 0, 0
    while i + j < min(mine + theirs, len(state.chosen)):
        # The larger place is the cheaper sample.
        if j == theirs or (i < mine and state.mine[i] > state.theirs[j]):
            state.chosen[i + j] = state.mine[i]
            on_late |= 1 << (i + j)
            i += 1
        else:
            state.chosen[i + j] = state.theirs[j]
            j += 1
    return i + j, on_late


def _subsets(state: Assignment, first: int, last: int, offset: int, base: int) -> int:
    """Sums of all subsets of `chosen[first:last]`, rising, from `base` or a quarter further on; returns where."""
    sums, weights, masks = state.sums, state.weights, state.masks
    source, target = base, base + len(state.sums) // 4
    sums[source] = weights[source] = masks[source] = 0
    for at in range(first, last):
        sample = state.chosen[at]
        cost, size, bit = state.costs[sample] + offset, state.sizes[sample], 1 << at
        many, without, with_it = 1 << (at - first), 0, 0
        for to in range(target, target + 2 * many):
            if with_it == many or (without < many and sums[source + without] <= sums[source + with_it] + cost):
                here = source + without
                sums[to], weights[to], masks[to] = sums[here], weights[here], masks[here]
                without += 1
            else:
                here = source + with_it
                sums[to], weights[to], masks[to] = sums[here] + cost, weights[here] + size, masks[here] | bit
                with_it += 1
        source, target = target, source
    return source
