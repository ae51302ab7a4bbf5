"""Where keys, values and their gradients lie for other ranks: two arenas in which every channel has room of its own.

A put asks for its channel's whole share of the arena, whatever it holds, so shares never lie apart with gaps between
them, and no put ever waits for room: it waits only for the readers of what its own channel held before.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odc.errors import OdcError, PeerLostError, PlanError, WaitTimeoutError
from odc.protocol.arena_protocol import AbsentMember
from odc.runtime import Arena
from odc.runtime.arena import entry_bytes
from odc.split.minibatch import PieceMinibatch
from odc.trace import WAIT, recorder

_PLAN = "plan"  # the channel in which each rank shows which split sample it has come to
_MARK_BITS = 20


@dataclass(frozen=True)
class Rooms:
    """What the arenas of a rank hold.

    Args:
        layers: attention layers of the model.
        kv_bytes: of the keys and values of one layer of the longest piece.
        grad_bytes: of the gradients of keys and values that a piece lays out for others in one layer, at most.
        keep: keys and values of all layers lie there until backward; otherwise those of two layers.
    """

    layers: int
    kv_bytes: int
    grad_bytes: int
    keep: bool


class PieceExchange:
    """One rank's arenas and its view of its peers'. Constructing it does not wait.

    Args:
        store: of the job.
        ranks: global ranks that split samples among each other, the same list on all; they share a host.
        rank: this global rank.
        rooms: the same on all ranks.
        timeout_s: seconds a wait may last without progress of the peer it waits for.
        name: unlike that of any other exchange of these ranks.

    Raises HeapMemoryError: the arenas do not fit into memory.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, rooms: Rooms, timeout_s: float, name: str) -> None:
        self.rooms = Rooms(rooms.layers, entry_bytes(rooms.kv_bytes), entry_bytes(rooms.grad_bytes), rooms.keep)
        held = rooms.layers if rooms.keep else 2
        kv, grads = [f"kv{at}" for at in range(held)], ["dkv0", "dkv1"]
        nbytes, plan = (self.rooms.kv_bytes * held, self.rooms.grad_bytes * 2), entry_bytes(0)
        self._rank, self._ranks = rank, list(ranks)
        self._minibatch: PieceMinibatch | None = None

        def arena(short: str, room: int, channels: list[str]) -> Arena:
            absent = functools.partial(_absent, weakref.ref(self), short)
            return Arena(store, ranks, rank, room, [_PLAN, *channels], timeout_s, f"{name}.{short}", absent=absent)

        self._kv, self._grads = arena("kv", nbytes[0] + plan, kv), arena("dkv", nbytes[1] + plan, grads)
        self._shown = 0  # number of the split sample this rank has come to, and below it a mark of what it takes it for

    def join(self, minibatch: PieceMinibatch | None) -> None:
        """Exchange for pieces of this minibatch from now on; None where none can be given up."""
        before, self._minibatch = self._minibatch, minibatch
        if minibatch is not None and before is not None and before.epoch != minibatch.epoch:
            for arena in (self._kv, self._grads):
                arena.forget()  # all ranks were done with that minibatch before this one began

    def begin(self, number: int, mark: int) -> None:
        """This rank has come to split sample `number`, and `mark` describes what it takes it for. Does not wait."""
        self._shown = number << _MARK_BITS | mark & (1 << _MARK_BITS) - 1
        for arena in (self._kv, self._grads):
            arena.put(_PLAN, number, 0, [])
            arena.show(_PLAN, self._shown)

    def absent(self, arena: str, member: int) -> bool:
        """Whether a member puts and reads nothing more for the split sample that this rank has come to."""
        if self._minibatch is not None and self._minibatch.absent(self._ranks[member]):
            return True
        return self._differs(self._kv if arena == "kv" else self._grads, member)

    def _differs(self, arena: Arena, member: int) -> bool:
        """Whether a member takes this rank's split sample for another, or has gone by it.

        A member puts all of a piece before it goes on, so that what is not there then never will be. A rank that waits
        in an arena is attached to its peer's.
        """
        shown = arena.signature(_PLAN, member)
        return shown != self._shown and shown >> _MARK_BITS >= self._shown >> _MARK_BITS

    @property
    def lost(self) -> bool:
        """Whether the minibatch will be abandoned: nothing is put any more, and no rank is waited for."""
        return self._minibatch is not None and self._minibatch.lost

    def leave(self, reason: str) -> None:
        """This rank runs no more pieces of this minibatch, though it should: all ranks give the minibatch up.

        Where that cannot be done, it ends the exchange for all ranks.
        """
        if self._minibatch is None:
            self.refuse(reason)
        else:
            self._minibatch.abandon(reason)

    def put_kv(self, number: int, layer: int, again: bool, kv: Tensor, readers: list[int], mark: int) -> None:
        """Let `readers` (members) have the keys and values of this rank's piece of split sample `number`."""
        channel, step = self._at(number, layer, again)
        self._put(self._kv, channel, step, [kv], self.rooms.kv_bytes, readers, mark)

    def kv_of(
        self, number: int, layer: int, again: bool, owner: int, like: Tensor, shape: list[int], mark: int
    ) -> Tensor | None:
        """A view of the keys and values of `owner` (a member), of `shape` and the dtype of `like`; waits for them.

        On another device than the CPU it is a copy there. None in a minibatch that is lost.
        """
        channel, step = self._at(number, layer, again)
        found = self._get(self._kv, channel, step, owner, like, torch.Size(shape).numel(), mark)
        return None if found is None else found.view(shape)

    def done_kv(self, number: int, layer: int, again: bool, owner: int) -> None:
        """This rank needs them no more."""
        if not self.lost:
            self._kv.done(*self._at(number, layer, again), owner)

    def put_grads(self, number: int, layer: int, grads: list[Tensor], readers: list[int], mark: int) -> None:
        """Let `readers` have the gradients of their keys and values, one after the other."""
        channel, step = self._grads_at(number, layer)
        self._put(self._grads, channel, step, grads, self.rooms.grad_bytes, readers, mark)

    def grads_of(
        self, number: int, layer: int, giver: int, like: Tensor, first: int, count: int, mark: int
    ) -> Tensor | None:
        """`count` numbers from the `first` of what `giver` put, flat, in the dtype of `like`; waits for them.

        None in a minibatch that is lost.
        """
        flat = self._get(self._grads, *self._grads_at(number, layer), giver, like, first + count, mark)
        return None if flat is None else flat[first : first + count]

    def done_grads(self, number: int, layer: int, giver: int) -> None:
        """This rank has added them."""
        self._grads.done(*self._grads_at(number, layer), giver)

    def refuse(self, reason: str) -> None:
        """End the exchange for all ranks, naming this rank."""
        self._kv.refuse(reason)
        self._grads.refuse(reason)

    def close(self) -> None:
        """Wait until peers have read what lies here, then leave. Idempotent.

        Does not wait after a minibatch: all ranks were done with it when it ended, even one that took no piece.
        """
        needed = self._minibatch is None or self._minibatch.open
        try:
            self._kv.close(needed)
        finally:
            self._grads.close(needed)

    def _at(self, number: int, layer: int, again: bool) -> tuple[str, int]:
        """Channel and step of keys and values; `again`: put once more by the recompute of a checkpointed layer."""
        layers = self.rooms.layers
        if self.rooms.keep:
            return f"kv{layer}", number
        return f"kv{layer % 2}", 2 * layers * (number - 1) + (2 * layers - layer if again else layer + 1)

    def _grads_at(self, number: int, layer: int) -> tuple[str, int]:
        return f"dkv{layer % 2}", self.rooms.layers * number - layer

    def _put(
        self, arena: Arena, channel: str, step: int, tensors: list[Tensor], room: int, readers: list[int], mark: int
    ) -> None:
        if not readers or self.lost:
            return
        with recorder().span(WAIT, unit=channel):
            share, at = arena.put(channel, step, room, readers), 0
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.itemsize
            share[at : at + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            at += nbytes
        arena.show(channel, mark)

    def _get(
        self, arena: Arena, channel: str, step: int, owner: int, like: Tensor, count: int, mark: int
    ) -> Tensor | None:
        if self.lost:
            return None
        try:
            with recorder().span(WAIT, unit=channel, peer=self._ranks[owner]):
                found = arena.get(channel, step, owner)
        except AbsentMember:
            if self._minibatch is None or not self._minibatch.absent(self._ranks[owner]):
                raise self._different(owner, channel, step) from None
            self._minibatch.lose(self._ranks[owner], f"{channel} of step {step}")
            return None
        except OdcError as error:
            if not isinstance(error, PeerLostError | WaitTimeoutError):  # it is a step further: plans differ
                self.refuse(str(error))
            raise
        if found.signature != mark:
            raise self._different(owner, channel, step)
        return found.raw[: count * like.itemsize].view(like.dtype).to(like.device)

    def _different(self, owner: int, channel: str, step: int) -> PlanError:
        reason = (
            f"rank {self._rank} and rank {self._ranks[owner]} have different plans or models for split sample "
            f"{channel} of step {step}: every rank must make the same plan from the same lengths"
        )
        self.refuse(reason)
        return PlanError(reason)


def _absent(exchange: weakref.ref[PieceExchange], arena: str, member: int) -> bool:
    # An arena must not hold the exchange that holds it: its heap is freed with its last reference.
    found = exchange()
    return found is not None and found.absent(arena, member)


def mark_of(*what: object) -> int:
    """A 60-bit mark that differs where any of these differ."""
    return int(hashlib.sha256(repr(what).encode()).hexdigest()[:15], 16)
