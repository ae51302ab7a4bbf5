"""The inner loops of node-wise rearrangement: place new mini-batches on nodes, and exchange them between nodes.

Like `odc.balance.partition_loops` they run compiled or interpreted with the same result. `volume` is flat: `volume[j *
d + i]` is what sender i has of batch j.
"""

from __future__ import annotations

from typing import Any

_MULTIPLIER, _INCREMENT, _MASK = 1103515245, 12345, (1 << 31) - 1


def kept(groups: Any, sizes: Any, rooms: Any, total: Any) -> None:
    """Add to each group's total the first of its sizes, as many as it has room for."""
    for e in range(len(groups)):
        if rooms[groups[e]] > 0:
            rooms[groups[e]] -= 1
            total[groups[e]] += sizes[e]


def place(pairs_batch: Any, pairs_node: Any, rooms: Any, node: Any) -> None:
    """Give each batch the first node, in the order listed, that still has room; the rest goes where room is left."""
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
    volume: Any,
    begins: Any,
    having: Any,
    firsts: Any,
    node_of: Any,
    sent: Any,
    node: Any,
    members: Any,
    at: Any,
    best: Any,
    steps: int,
    kick: int,
) -> None:
    """Exchange batches between nodes to lower the most that a sender sends off its node.

    Args:
        volume: [d * d].
        begins, having: the batches that sender i has something of are having[begins[i]] to having[begins[i + 1] - 1].
        firsts: [m + 1] first sender of each node, also its first place in `members`.
        node_of: [d] node of a sender.
        sent: [d] in: all a sender has; out: scratch.
        node: [d] in: node of each batch, a full placement; out: scratch.
        members, at: [d] scratch: the batches of each node, and where each batch stands there.
        best: [d] out: node of each batch.
        steps: exchanges to look for.
        kick: exchanges at random after none helps.
    """
    d = len(node)
    _fill(firsts, node, members)
    for spot in range(d):
        j = members[spot]
        at[j] = spot
        for i in range(firsts[node[j]], firsts[node[j] + 1]):
            sent[i] -= volume[j * d + i]
    least, seed = -1, 1
    for step in range(steps + 1):
        worst = 0
        for i in range(1, d):
            if sent[i] > sent[worst]:
                worst = i
        if least < 0 or sent[worst] < least:
            least = sent[worst]
            for j in range(d):
                best[j] = node[j]
        if step == steps or least == 0:
            break
        mine, theirs = _best_swap(volume, begins, having, firsts, node_of, sent, node, members, worst)
        if mine >= 0:
            _swap(volume, firsts, sent, node, members, at, mine, theirs)
            continue
        if kick == 0 or len(firsts) < 3:
            break
        for _ in range(kick):
            seed = (seed * _MULTIPLIER + _INCREMENT) & _MASK
            one = (seed >> 8) % d
            seed = (seed * _MULTIPLIER + _INCREMENT) & _MASK
            other = (seed >> 8) % d
            if node[one] != node[other]:
                _swap(volume, firsts, sent, node, members, at, one, other)


def _fill(firsts: Any, node: Any, members: Any) -> None:
    """List the batches of each node."""
    for spot in range(len(node)):
        members[spot] = -1
    for j in range(len(node)):
        spot = firsts[node[j]]
        while members[spot] >= 0:
            spot += 1
        members[spot] = j


def _best_swap(
    volume: Any, begins: Any, having: Any, firsts: Any, node_of: Any, sent: Any, node: Any, members: Any, worst: int
) -> tuple[int, int]:
    """Two batches whose exchange leaves every sender of both nodes below what `worst`, the greatest, sends; or -1."""
    home = node_of[worst]
    least, found, with_ = sent[worst], -1, -1
    for spot in range(begins[worst], begins[worst + 1]):
        j = having[spot]
        if node[j] == home:
            continue
        gain = sent[worst] - volume[j * len(node) + worst]
        for here in range(firsts[home], firsts[home + 1]):
            if gain + volume[members[here] * len(node) + worst] >= least:
                continue
            top = _after(volume, firsts, sent, home, members[here], node[j], j, least)
            if top < least:
                least, found, with_ = top, members[here], j
    return found, with_


def _after(volume: Any, firsts: Any, sent: Any, home: int, mine: int, away: int, theirs: int, least: int) -> int:
    """The most any sender of both nodes sends after the exchange of two batches; `least` as soon as that is reached."""
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


def _swap(volume: Any, firsts: Any, sent: Any, node: Any, members: Any, at: Any, mine: int, theirs: int) -> None:
    d, a, b = len(node), node[mine], node[theirs]
    lost, won = mine * d, theirs * d
    for i in range(firsts[a], firsts[a + 1]):
        sent[i] += volume[lost + i] - volume[won + i]
    for i in range(firsts[b], firsts[b + 1]):
        sent[i] += volume[won + i] - volume[lost + i]
    members[at[mine]], members[at[theirs]] = theirs, mine
    at[mine], at[theirs] = at[theirs], at[mine]
    node[mine], node[theirs] = b, a


def seat(volume: Any, firsts: Any, node: Any, members: Any, taken: Any, places: Any) -> None:
    """Give each batch an instance of its node, the one with most of it where possible; `taken` is zeros, [d]."""
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


def stay(
    order: Any, cuts: Any, homes: Any, owners: Any, per_node: int, heads: Any, links: Any, taken: Any, found: Any
) -> None:
    """Within each run of `order`, deal its destinations (`owners`) out again: home instance first, then home node.

    Args:
        order, cuts: examples that may trade places are order[cuts[g]] to order[cuts[g + 1] - 1].
        homes, owners: [n] instance that holds an example, and its planned destination.
        heads: [d] scratch, all -1; links: [n] scratch; taken: [n] scratch, zeros.
        found: [n] in: all -1; out: the instance to which each example goes.
    """
    for g in range(len(cuts) - 1):
        begin, end = cuts[g], cuts[g + 1]
        for divisor in (1, per_node):
            for at in range(end - 1, begin - 1, -1):
                slot = order[at]
                if taken[slot] == 0:
                    links[slot] = heads[owners[slot] // divisor]
                    heads[owners[slot] // divisor] = slot
            for at in range(begin, end):
                e = order[at]
                slot = heads[homes[e] // divisor]
                if found[e] < 0 and slot >= 0:
                    heads[homes[e] // divisor] = links[slot]
                    found[e] = owners[slot]
                    taken[slot] = 1
            for at in range(begin, end):
                heads[owners[order[at]] // divisor] = -1
        free = begin
        for at in range(begin, end):
            if found[order[at]] < 0:
                while taken[order[free]] == 1:
                    free += 1
                found[order[at]] = owners[order[free]]
                taken[order[free]] = 1
