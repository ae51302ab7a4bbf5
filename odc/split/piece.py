"""A piece of a split sample on this rank: what goes into the model, and what its layers exchange with other pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from odc.balance.slices import SplitSample
from odc.errors import OdcError, UnsupportedError
from odc.split.attention import Merged, Parts, attend_blocks, attend_blocks_backward
from odc.split.cut import Cut, targets_of
from odc.split.exchange import PieceExchange, mark_of
from odc.split.handle import OneForward, PieceHandle


class _Seen(dict[int, Tensor]):
    """Keys and values by place; those of another place are waited for when they are first asked for."""

    def __init__(self, place: int, own: Tensor, of: Callable[[int], Tensor]) -> None:
        super().__init__({place: own})
        self._of = of

    def __missing__(self, owner: int) -> Tensor:
        found = self[owner] = self._of(owner)
        return found


class PieceInputs(NamedTuple):
    """What `SamplePiece.of` gives.

    Args:
        inputs: keyword arguments of the model.
        targets: for each token of the piece the token that follows it in the sample, or -100.
    """

    inputs: dict[str, Any]
    targets: Tensor


@dataclass
class SamplePiece:
    """This rank's piece of one split sample, to be run forward and backward once, by `Splitter.pieces`.

    Args:
        split: of the plan.
        number: of the split sample; rises through the job, alike on all ranks.
        place: which piece it is.
        members: of the exchange that hold the pieces, by place.
        exchange: of this rank.
        layers: attention layers of the model.
        extra: further keyword arguments of the model.
    """

    split: SplitSample
    number: int
    place: int
    members: list[int]
    exchange: PieceExchange
    layers: int
    extra: dict[str, Any]
    cut: Cut = field(init=False)
    _forward: OneForward = field(init=False)
    _calls: dict[int, int] = field(default_factory=dict)
    _settled: set[int] = field(default_factory=set)
    _frozen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cut = Cut(self.split.slices)
        self._forward = OneForward(self.split.sample)

    @property
    def sample(self) -> int:
        """Index of the sample in the plan."""
        return self.split.sample

    @property
    def kept(self) -> bool:
        """Whether keys and values of all layers lie in the arenas until backward."""
        return self.exchange.rooms.keep

    @property
    def finished(self) -> bool:
        """Whether its backward has reached every layer."""
        return len(self._settled) == self.layers

    def of(self, tokens: Tensor, labels: Tensor | None = None, *, targets: Tensor | None = None) -> PieceInputs:
        """What this piece takes of a sample.

        Args:
            tokens: ids of the whole sample [tokens].
            labels: of the whole sample [tokens], not shifted, -100 where there is none; the tokens unless given.
            targets: in place of labels [tokens], shifted already: what each token has to predict.
        """
        if targets is None:
            targets = targets_of(tokens if labels is None else labels)
        positions = self.cut.positions(self.place, tokens.device)[None]
        inputs = {"input_ids": self.cut.take(self.place, tokens)[None], "position_ids": positions}
        handle = PieceHandle(self, positions, self._forward)
        return PieceInputs({**inputs, **self.extra, "odc_piece": handle}, self.cut.take(self.place, targets))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """See `odc.split.attend`."""
        expected = self.cut.sizes[self.place]
        if query.shape[0] != 1 or query.shape[2] != expected or key.shape[2] != expected:
            raise UnsupportedError(
                f"layer {layer} attends with queries {list(query.shape)} and keys {list(key.shape)}, but the piece has "
                f"{expected} tokens in one row: no cache, padding or packing goes with a split sample"
            )
        if not 0 <= layer < self.layers:
            raise UnsupportedError(f"layer {layer} attends, but {self.layers} layers were declared")
        out: Tensor = SplitAttention.apply(query, key, value, self, layer, scale, window)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and not out.requires_grad:  # all below is frozen: backward will not come here
            self._settled.add(layer)
            self._frozen.add(layer)
        return out

    def let_go_frozen(self) -> None:
        """Give back the others' keys and values of layers that backward did not come to, once it has ended.

        Not before: a checkpointed layer that is recomputed reads them again.
        """
        for layer in self._frozen:
            self._let_go(layer)

    def gather(self, layer: int, kv: Tensor) -> Parts:
        """Put this piece's keys and values unless they lie there already; those that it sees, of every place.

        Where they are kept, the others' are views that are right until `settle`.
        """
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        again, mark = call > 0, self._mark(layer, kv)
        if call > 1 and not self.kept:
            raise OdcError(f"layer {layer} was recomputed more than once: that needs a Splitter with keep=True")
        if not (self.kept and again):
            readers = [self.members[place] for place in self.cut.readers(self.place)]
            self.exchange.put_kv(self.number, layer, again, kv, readers, mark)

        def of(owner: int) -> Tensor:
            member, shape = self.members[owner], [2, kv.shape[1], self.cut.sizes[owner], kv.shape[3]]
            found = self.exchange.kv_of(self.number, layer, again, member, kv, shape, mark)
            if found is None:  # the minibatch is lost
                return kv.new_zeros([*shape[:2], self.cut.seen[owner][self.place], shape[3]])
            found = found[:, :, : self.cut.seen[owner][self.place]]
            if not self.kept:
                found = found.clone()
                self.exchange.done_kv(self.number, layer, again, member)
            return found

        return _Seen(self.place, kv, of)

    def give(self, layer: int, grads: Parts, kv: Tensor) -> None:
        """Lay out gradients of others' keys and values for them; they travel in the dtype of `kv`, this piece's."""
        laid_out = []
        for owner in self.cut.owners(self.place):
            missing = [2, kv.shape[1], self.cut.seen[owner][self.place], kv.shape[3]]  # where a window ends before it
            laid_out.append(grads[owner].to(kv.dtype) if owner in grads else kv.new_zeros(missing))
        receivers = [self.members[owner] for owner in self.cut.owners(self.place)]
        self.exchange.put_grads(self.number, layer, laid_out, receivers, self._mark(layer, kv))
        self._let_go(layer)

    def settle(self, layer: int, total: Tensor, kv: Tensor) -> Tensor:
        """Add to the gradients of this piece's keys and values what the other places have for them, in their order."""
        mark = self._mark(layer, kv)
        row = 2 * kv.shape[1] * kv.shape[3]
        for giver in self.cut.readers(self.place):
            before = sum(self.cut.seen[owner][giver] for owner in self.cut.owners(giver) if owner < self.place)
            seen, member = self.cut.seen[self.place][giver], self.members[giver]
            found = self.exchange.grads_of(self.number, layer, member, kv, row * before, row * seen, mark)
            if found is None:
                break
            total[:, :, :seen] += found.view(2, kv.shape[1], seen, kv.shape[3])
            self.exchange.done_grads(self.number, layer, member)
        return total

    def _let_go(self, layer: int) -> None:
        """The others' keys and values of a layer are read for the last time."""
        self._settled.add(layer)
        for owner in self.cut.owners(self.place) if self.kept else []:
            self.exchange.done_kv(self.number, layer, False, self.members[owner])

    def _mark(self, layer: int, kv: Tensor) -> int:
        """Alike on all ranks of the sample, if they have the same plan and model."""
        split = self.split
        return mark_of(split.sample, split.ranks, split.slices, self.number, layer, kv.dtype, kv.shape[1], kv.shape[3])


class SplitAttention(torch.autograd.Function):
    """Attention of one layer of a piece: exchanges keys and values in forward, and their gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        piece: SamplePiece,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        kv = torch.cat([key, value])
        parts = piece.gather(layer, kv)
        blocks = piece.cut.blocks(piece.place, window)
        merged = attend_blocks(query, parts, blocks, scale)
        owners = [] if piece.kept else piece.cut.owners(piece.place)
        ctx.how = piece, layer, blocks, scale, merged.rests, owners
        ctx.save_for_backward(query, kv, merged.out, merged.lse, *(parts[owner] for owner in owners))
        return merged.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        piece, layer, blocks, scale, rests, owners = ctx.how
        query, kv, out, lse, *others = ctx.saved_tensors
        if piece.kept:
            parts = piece.gather(layer, kv)
        else:
            parts = {**dict(zip(owners, others, strict=True)), piece.place: kv}
        dq, own = torch.zeros_like(query, dtype=lse.dtype), sum(block.owner == piece.place for block in blocks)
        for at in (slice(own, None), slice(own)):  # what others wait for first
            merged = Merged(out, lse, rests[at])
            dkv = attend_blocks_backward(grad, query, parts, blocks[at], merged, scale, dq)
            if at.start:
                piece.give(layer, dkv, kv)
        total = piece.settle(layer, dkv[piece.place], kv).to(kv.dtype)
        return dq.to(query.dtype), total[:1], total[1:], None, None, None, None
