"""The lanes of a device as steps for `support.explorer`: one minibatch, after all ranks have begun it.

The host threads of a rank (main, sender, daemon) ask for work; its lanes do it in the order in which it was asked for.
Lane "server" adds both this rank's own gradients and what its peers push. Under the rule "host", which is the code's,
the sender waits for the gradient before it asks for anything. Under "follows", a planted fault, it asks for its own
addition at once, and the lane waits for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from support.explorer import Key, Program, Step

SERVERS = ("daemon",)
_AHEAD = 2  # units by which the host may be ahead of what the sender has taken


@dataclass(frozen=True)
class Device:
    """`groups` of ranks that push to each other; ranks of a `pair` compute each unit together, as by a collective."""

    groups: tuple[tuple[int, ...], ...]
    rule: Literal["follows", "host"]
    units: int = 2
    slots: int = 2
    pairs: tuple[tuple[int, int], ...] = ()

    def partner(self, rank: int) -> int | None:
        found = [a + b - rank for a, b in self.pairs if rank in (a, b)]
        return found[0] if found else None


def lanes(device: Device) -> Program:
    """Every actor of all ranks."""
    program: Program = {}
    for group in device.groups:
        for rank in group:
            program |= _rank(device, rank, [one for one in group if one != rank])
    return program


def _rank(device: Device, me: int, peers: Sequence[int]) -> Program:
    main: list[Step] = []
    compute: list[Step] = []
    sender: list[Step] = []
    own: list[Step] = []
    partner = device.partner(me)
    for unit in range(1, device.units + 1):
        main.append(Step("host", "wait", ("taken", me), unit - _AHEAD))
        main.append(Step("host", "store", ("launched", me), unit))
        compute.append(Step("compute", "wait", ("launched", me), unit))
        if partner is not None:
            compute.append(Step("compute", "store", ("arrived", me), unit))
            compute.append(Step("compute", "wait", ("arrived", partner), unit))
        compute.append(Step("compute", "store", ("computed", me), unit))
        sender += _push(device, me, peers, unit)
        mine: Key = ("own ticket", me, unit)
        own.append(Step("server", "wait", ("asked", me), unit))
        own.append(Step("server", "turn", ("server head", me), other=mine))
        own.append(Step("server", "wait", ("computed", me), unit))
        own.append(Step("server", "add", ("sum", me), 1))
        own.append(Step("server", "pass", ("server head", me)))
        own.append(Step("server", "store", ("added", me), unit))
    main.append(Step("done", "wait", ("taken", me), device.units))
    main.append(Step("done", "store", ("DONE", me), 1))
    found: Program = {(me, "main"): main, (me, "compute"): compute, (me, "sender"): sender, (me, "own"): own}
    return found | {(me, f"daemon {peer}"): _drain(device, me, peer) for peer in peers}


def _push(device: Device, me: int, peers: Sequence[int], unit: int) -> list[Step]:
    """What the sender asks for and waits for to push one unit (`DeviceRoute.push`)."""
    steps = [Step("push", "wait", ("launched", me), unit)]
    if device.rule == "host":
        steps.append(Step("push", "wait", ("computed", me), unit))
    steps += [Step("push", "wait", ("ACCUMULATED", peer, me), unit - device.slots) for peer in peers]
    steps.append(Step("push", "ticket", ("server tail", me), other=("own ticket", me, unit)))
    steps.append(Step("push", "store", ("asked", me), unit))
    steps.append(Step("push", "wait", ("computed", me), unit))  # the copies into slots settle
    steps.append(Step("push", "wait", ("added", me), unit))
    for peer in peers:
        steps.append(Step("push", "write", ("slot", peer, me, unit % device.slots), unit))
        steps.append(Step("push", "store", ("SENT", peer, me), unit))
    steps.append(Step("push", "store", ("taken", me), unit))
    return steps


def _drain(device: Device, me: int, peer: int) -> list[Step]:
    """What the daemon does for each block of a peer (`DeviceDrain`). It waits for no lane: each peer's is an actor."""
    steps: list[Step] = []
    for unit in range(1, device.units + 1):
        mine: Key = ("ticket", me, peer, unit)
        steps.append(Step("drain", "wait", ("SENT", me, peer), unit))
        steps.append(Step("drain", "ticket", ("server tail", me), other=mine))
        steps.append(Step("drain", "turn", ("server head", me), other=mine))
        steps.append(Step("drain", "read", ("slot", me, peer, unit % device.slots), unit))
        steps.append(Step("drain", "add", ("sum", me), 1))
        steps.append(Step("drain", "pass", ("server head", me)))
        steps.append(Step("drain", "store", ("ACCUMULATED", me, peer), unit))
    return steps
