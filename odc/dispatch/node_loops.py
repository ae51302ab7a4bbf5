"""The inner loops of node-wise rearrangement: place new mini-batches on nodes, exchange them between nodes.

Chose one source for both ways to run it, as `odc.balance.loops`: integers and no numpy, so that all ranks get the same
plan whether they have numba or not. `volume` is flat: `volume[j * d + i]` is what sender i has of batch j.
"""

from __future__ import annotations

from typing import Any

_MULTIPLIER, _INCREMENT, _MASK = 1103515245, 12345, (1 << 31) - 1


def scatter(senders: Any, batches: Any, sizes: Any, d: int, volume: Any, totals: Any) -> None:
    """Add up `volume` and `totals[i]`, all that sender i has, from one entry an example."""
    for e in range(len(senders)):
        volume[batches[e] * d + senders[e]] += sizes[e]
        totals[senders[e]] += sizes[e]


def place(pairs_batch: Any, pairs_node: Any, rooms: Any, node: Any) -> None:
    """Give each batch the first node, in the order listed, that still has room; then what is left, as it comes."""
    for e in range(len(pairs_batch)):
        j, a = pairs_batch[e], pairs_node[e]
        if node[j] < 0 and rooms[a] > 0:
            node[j] = a
            rooms[a] -= 1
    a = 0
    for j in range(len(node)):
        if node[j] < 0:
            while rooms[a] == 0:
                a += 1
            node[j] = a
            rooms[a] -= 1


def improve(
    volume: Any, firsts: Any, node_of: Any, sent: Any, node: Any, members: Any, best: Any, steps: int, kick: int
) -> int:
    """Exchange batches between nodes to lower the most that a sender sends off its node; returns that.

    Args:
        volume: [d * d].
        firsts: [m + 1] first sender of each node, also its first place in `members`.
        node_of: [d] node of a sender.
        sent: [d] in: all a sender has; out: scratch.
        node: [d] node of each batch, a full placement.
        members: [d] scratch: the batches of each node.
        best: [d] out: node of each batch.
        steps: exchanges to look for.
        kick: exchanges at random after none helps.
    """
    d = len(node)
    _fill(firsts, node, members)
    for j in range(d):
        for i in range(firsts[node[j]], firsts[node[j] + 1]):
            sent[i] -= volume[j * d + i]
    least, seed = -1, 1
    for _ in range(steps):
        worst = 0
        for i in range(1, d):
            if sent[i] > sent[worst]:
                worst = i
        if least < 0 or sent[worst] < least:
            least = sent[worst]
            for j in range(d):
                best[j] = node[j]
        mine, theirs = _best_swap(volume, firsts, node_of, sent, node, members, worst)
        if mine >= 0:
            _swap(volume, firsts, sent, node, members, mine, theirs)
            continue
        if kick == 0 or len(firsts) < 3:
            break
        for _ in range(kick):
            seed = (seed * _MULTIPLIER + _INCREMENT) & _MASK
            one = (seed >> 8) % d
            seed = (seed * _MULTIPLIER + _INCREMENT) & _MASK
            other = (seed >> 8) % d
            if node[members[one]] != node[members[other]]:
                _swap(volume, firsts, sent, node, members, one, other)
    return least


def _fill(firsts: Any, node: Any, members: Any) -> None:
    """List the batches of each node."""
    d = len(node)
    for a in range(len(firsts) - 1):
        at = firsts[a]
        for j in range(d):
            if node[j] == a:
                members[at] = j
                at += 1


def _best_swap(
    volume: Any, firsts: Any, node_of: Any, sent: Any, node: Any, members: Any, worst: int
) -> tuple[int, int]:
    """Places of two batches whose exchange leaves all senders of both nodes below what `worst` sends, most; or -1."""
    d, home = len(node), node_of[worst]
    least, found, with_ = sent[worst], -1, -1
    for there in range(d):
        j = members[there]
        if node[j] == home or volume[j * d + worst] == 0:
            continue
        for here in range(firsts[home], firsts[home + 1]):
            top = _after(volume, firsts, sent, home, members[here], node[j], j, least)
            if top < least:
                least, found, with_ = top, here, there
    return found, with_


def _after(volume: Any, firsts: Any, sent: Any, home: int, mine: int, away: int, theirs: int, least: int) -> int:
    """The most any sender of both nodes sends once they have exchanged the batches; `least` as soon as it is that."""
    d, top = len(sent), 0
    lost, won = mine * d, theirs * d
    for i in range(firsts[home], firsts[home + 1]):
        now = sent[i] + volume[lost + i] - volume[won + i]
        if now > top:
            top = now
            if top >= least:
                return least
    for i in range(firsts[away], firsts[away + 1]):
        now = sent[i] + volume[won + i] - volume[lost + i]
        if now > top:
            top = now
            if top >= least:
                return least
    return top


def _swap(volume: Any, firsts: Any, sent: Any, node: Any, members: Any, one: int, other: int) -> None:
    d, mine, theirs = len(node), members[one], members[other]
    a, b = node[mine], node[theirs]
    lost, won = mine * d, theirs * d
    for i in range(firsts[a], firsts[a + 1]):
        sent[i] += volume[lost + i] - volume[won + i]
    for i in range(firsts[b], firsts[b + 1]):
        sent[i] += volume[won + i] - volume[lost + i]
    members[one], members[other] = theirs, mine
    node[mine], node[theirs] = b, a


def seat(volume: Any, firsts: Any, node: Any, members: Any, taken: Any, places: Any) -> None:
    """Within each node, give each batch an instance, those that keep most where it is first; `taken` is zeros, [d]."""
    d = len(node)
    _fill(firsts, node, members)
    for a in range(len(firsts) - 1):
        begin, end = firsts[a], firsts[a + 1]
        for _ in range(begin, end):
            most, batch, instance = -1, -1, -1
            for at in range(begin, end):
                j = members[at]
                if places[j] >= 0:
                    continue
                for i in range(begin, end):
                    if taken[i] == 0 and volume[j * d + i] > most:
                        most, batch, instance = volume[j * d + i], j, i
            places[batch] = instance
            taken[instance] = 1
