"""The inner loops of the post-balancing algorithms: walks along sorted lengths, and a heap of the lightest instances.

Like `odc.balance.partition_loops` they run compiled or interpreted with the same result.
"""

from __future__ import annotations

from typing import Any


def runs(costs: Any, bound: int, most: int, ends: Any) -> int:
    """Cut rising costs into runs whose size times last cost is at most `bound`, each as long as possible.

    Returns the number of runs, or most + 1 where `most` are too few; `ends[r]` is the place after run r.
    """
    n, number, begin = len(costs), 0, 0
    while begin < n:
        if number == most:
            return most + 1
        low, high = begin, n  # the run fits up to `low`, not up to `high` + 1
        while low < high:
            middle = (low + high + 1) // 2
            if (middle - begin) * costs[middle - 1] <= bound:
                low = middle
            else:
                high = middle - 1
        if low == begin:
            return most + 1
        ends[number] = low
        begin = low
        number += 1
    return number


def least_bound(costs: Any, most: int, low: int, high: int, ends: Any) -> int:
    """The least bound between low and high for which `runs` needs at most `most` runs; high must be enough."""
    while low < high:
        middle = (low + high) // 2
        if runs(costs, middle, most, ends) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def mixed_runs(lengths: Any, sums: Any, alpha: float, beta: float, bound: float, most: int, ends: Any) -> int:
    """`runs` for runs that cost alpha * sum + beta * size * last^2; `sums[i]` is the sum of the first i lengths."""
    n, number, begin, size = len(lengths), 0, 0, len(lengths)
    while begin < n:
        if number == most:
            return most + 1
        low, high = begin, min(n, begin + 2 * size + 1)  # runs of rising lengths rarely grow
        while low < high:
            middle = (low + high + 1) // 2
            last = lengths[middle - 1]
            pairs = beta * float((middle - begin) * last * last)
            if alpha * float(sums[middle] - sums[begin]) + pairs <= bound:
                low = middle
                if low == high < n:
                    high = min(n, 2 * high - begin)
            else:
                high = middle - 1
        if low == begin:
            return most + 1
        size = low - begin
        ends[number] = low
        begin = low
        number += 1
    return number


def least_mixed_bound(lengths: Any, sums: Any, alpha: float, beta: float, most: int, low: float, ends: Any) -> float:
    """A bound that is enough for `mixed_runs`, at most one part in 2**16 above the least, which is not below `low`."""
    high = low
    while mixed_runs(lengths, sums, alpha, beta, high, most, ends) > most:
        low = high
        high = high * 1.25
    while high - low > high * 1.52587890625e-05:
        middle = low + (high - low) * 0.5
        if mixed_runs(lengths, sums, alpha, beta, middle, most, ends) <= most:
            high = middle
        else:
            low = middle
    return high


def within(
    lengths: Any, tolerance: int, sums: Any, squares: Any, shift: int, bits: int, places: int, heap: Any, owners: Any
) -> None:
    """Put each length, as listed, on the instance with the least sum in steps of `tolerance`, then least sum of
    squares.

    `sums` and `squares` hold the starting values. `heap`, [d], is of (steps << bits + places | squares >> shift <<
    places | instance), which fits into 63 bits; 2**places > d, and squares >> shift is below 2**bits.
    """
    d, mask = len(heap), (1 << places) - 1
    for at in range(d):
        key = (sums[at] // tolerance << bits) + (squares[at] >> shift)
        heap[at] = (key << places) + at
    for at in range(d // 2 - 1, -1, -1):
        _sift(heap, at, heap[at])
    for i in range(len(lengths)):
        top = heap[0] & mask
        owners[i] = top
        sums[top] += lengths[i]
        squares[top] += lengths[i] * lengths[i]
        key = (sums[top] // tolerance << bits) + (squares[top] >> shift)
        _sift(heap, 0, (key << places) + top)


def lightest(costs: Any, sums: Any, places: int, heap: Any, owners: Any) -> None:
    """Put each cost, as listed, on the instance with the least of `sums`, of equals the first.

    `heap`, [d], is of (sum << places | instance), which fits into 63 bits; 2**places > d.
    """
    d, mask = len(heap), (1 << places) - 1
    for at in range(d):
        heap[at] = (sums[at] << places) + at
    for at in range(d // 2 - 1, -1, -1):
        _sift(heap, at, heap[at])
    for i in range(len(costs)):
        key = heap[0]
        owners[i] = key & mask
        _sift(heap, 0, key + (costs[i] << places))


def _sift(heap: Any, at: int, key: int) -> None:
    """Put `key` at `at` or below it."""
    size, child = len(heap), 2 * at + 1
    while child < size:
        if child + 1 < size:
            child += heap[child + 1] < heap[child]  # added, not branched on: either is as likely
        if heap[child] > key:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = key
