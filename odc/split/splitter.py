"""What a training loop calls to run the split samples of a plan: the model's check, the arenas, piece after piece.

docs/protocol.md, "Pieces of split samples", explains why nothing hangs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from odc.balance.plan import Plan
from odc.balance.slices import longest_piece
from odc.errors import OdcError, PlanError, UnsupportedError
from odc.fsdp import default_store
from odc.split import models
from odc.split.cut import Cut
from odc.split.exchange import PieceExchange, Rooms, mark_of
from odc.split.minibatch import PieceMinibatch, open_minibatch
from odc.split.piece import SamplePiece
from odc.split.rehearsal import rehearse

_A_MINIBATCH = 1_000_000  # split samples, at most
_nameless = itertools.count(1)  # splitters of this process, which all ranks make in the same order


def ranks_of_host() -> int:
    """Ranks of each host by torchrun's variable, else all ranks: the `node` of `lb_split` and `Splitter`.

    All ranks of the job call it together, and wait for each other. Raises UnsupportedError, on all of them, where hosts
    have unequally many: each rank would plan for hosts like its own.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()))
    if len(set(found)) > 1:
        raise UnsupportedError(f"split samples need equally many ranks on every host; there are {sorted(set(found))}")
    return int(found[0])


class Splitter:
    """Runs the split samples of plans on one rank; every rank of the job makes one alike.

    Args:
        model: a causal language model of transformers, sharded or not; or one of your own that calls
            `odc.split.attend` and passes `odc_piece` to its layers.
        longest: tokens of the longest sample that will be split.
        piece_tokens: tokens of the longest piece; half of `longest`, rounded up, unless given.
        layers: attention layers; only needed for a model of your own.
        keep: keys and values of all layers lie in memory until backward. False keeps those of two layers, and puts
            them again when a checkpointed layer is recomputed.
        ranks: global rank of each rank of the plans; all ranks in order unless given.
        node: ranks of one host, which share memory; all unless given. As in `odc.balance.lb_split`.
        rank: this global rank; by the default process group unless given.
        store: of the job; that of the default process group unless given.
        timeout_s: seconds a wait may last without progress of the peer it waits for.
        name: unlike that of any other splitter of these ranks; numbered unless given.

    Raises UnsupportedError: samples of this model cannot be split; lists every reason found.

    Attributes:
        node: as given, or all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        longest: int,
        *,
        piece_tokens: int | None = None,
        layers: int | None = None,
        keep: bool = True,
        ranks: Sequence[int] | None = None,
        node: int | None = None,
        rank: int | None = None,
        store: Any = None,
        timeout_s: float = 600.0,
        name: str | None = None,
    ) -> None:
        self._model, self._keep, self._timeout_s = model, keep, timeout_s
        self._name = name or f"split{next(_nameless)}"
        self._extra: dict[str, Any] = models.hook(model) if models.is_of_transformers(model) else {}
        if layers is None:
            if not self._extra:
                raise UnsupportedError("a model that is not one of transformers needs `layers`, its attention layers")
            layers = models.layers_of(model)
        self._layers, self._longest = layers, longest
        self._piece_tokens = piece_tokens or longest_piece(longest)
        self._ranks = list(ranks) if ranks is not None else list(range(dist.get_world_size()))
        self._rank = dist.get_rank() if rank is None else rank
        self._me = self._ranks.index(self._rank)
        self.node = node or len(self._ranks)
        self._first = self._me // self.node * self.node  # of this host's ranks, in plans
        self._host = self._ranks[self._first : self._first + self.node]
        self._store = store
        self._exchange: PieceExchange | None = None
        self._number = self._epoch = self._made = 0

    def prepare(self) -> Rooms:
        """Check the model on a random sample and make the arenas; the first plan with pieces does so by itself.

        Runs the model six times, so for a sharded model all ranks call it; see `odc.split.rehearsal`. Returns what
        the arenas of this rank hold.

        Raises:
            UnsupportedError: outputs or gradients of a split sample are not those of the whole; names the difference.
            HeapMemoryError: the arenas do not fit into memory.
        """
        if self._exchange is None:
            device = next(self._model.parameters()).device
            self._extra = {key: one.to(device) if hasattr(one, "to") else one for key, one in self._extra.items()}
            row = rehearse(self._model, self._layers, self._extra)
            rooms = Rooms(self._layers, row * self._piece_tokens, row * self._longest, self._keep)
            self._made += 1
            name = f"{self._name}.{self._made}"  # no exchange is named like one that was closed
            store = self._store if self._store is not None else default_store()
            self._exchange = PieceExchange(store, self._host, self._rank, rooms, self._timeout_s, name)
        return self._exchange.rooms

    def pieces(self, plan: Plan) -> Iterator[SamplePiece]:
        """This rank's pieces, in the plan's order; run each forward and backward before taking the next.

        All ranks call it for every plan and take all their pieces, before their whole samples. A rank that leaves the
        loop early, or takes the next piece before it has run one backward, gives the minibatch up as
        `model.abandon_minibatch` does; on the others the loop ends early then.

        Raises:
            PlanError: the plan does not fit the ranks or the arenas; on all ranks, before any piece runs.
            OdcError: the piece before was not run backward, and no minibatch is open that can be given up.
        """
        if not plan.splits:
            return
        self._refuse(plan)
        minibatch = open_minibatch(self._model)
        self.prepare()
        exchange = self._exchange
        assert exchange is not None
        exchange.join(minibatch)
        numbered = enumerate(plan.splits, self._count(minibatch, len(plan.splits)))
        mine = [(number, split) for number, split in numbered if self._me in split.ranks]
        for left, (number, split) in zip(reversed(range(len(mine))), mine, strict=True):
            if exchange.lost:
                return
            members, place = [rank - self._first for rank in split.ranks], split.ranks.index(self._me)
            exchange.begin(number, mark_of(split.sample, split.ranks, split.slices))
            piece = SamplePiece(split, number, place, members, exchange, self._layers, self._extra)
            try:
                yield piece
            except GeneratorExit:
                if not piece.finished:
                    exchange.leave(f"rank {self._rank} left its piece of sample {split.sample} unfinished")
                elif left:
                    exchange.leave(f"rank {self._rank} left the loop over its pieces before the last {left}")
                raise
            finally:
                if piece.finished:
                    piece.let_go_frozen()
            if not piece.finished and not exchange.lost:
                reason = (
                    f"rank {self._rank}: the piece of sample {split.sample} was not run forward and backward through "
                    f"all {self._layers} layers, and peers wait for its gradients; call backward() also where no token "
                    "has a label"
                )
                exchange.leave(reason)
                if minibatch is None:
                    raise OdcError(reason)

    def _count(self, minibatch: PieceMinibatch | None, splits: int) -> int:
        """Number of a plan's first split sample, alike on all ranks: also on one that was not there for the last."""
        if minibatch is not None and minibatch.epoch != self._epoch:
            self._epoch, self._number = minibatch.epoch, minibatch.epoch * _A_MINIBATCH
        first, self._number = self._number + 1, self._number + splits
        return first

    def close(self) -> None:
        """Wait until peers have read what lies here, then free the arenas. Idempotent; a new plan makes new ones."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _refuse(self, plan: Plan) -> None:
        """Raise PlanError where the plan's pieces do not fit; a function of the plan alone, so on all ranks alike."""
        if len(plan.ranks) != len(self._ranks):
            raise PlanError(f"the plan is for {len(plan.ranks)} ranks, the splitter for {len(self._ranks)}")
        for split in plan.splits:
            cut = Cut(split.slices)
            if len({rank // self.node for rank in split.ranks}) > 1:
                raise PlanError(f"pieces of sample {split.sample} lie on several hosts: ranks {split.ranks}")
            if max(cut.sizes) > self._piece_tokens or cut.length > self._longest:
                raise PlanError(
                    f"sample {split.sample} has {cut.length} tokens in pieces of up to {max(cut.sizes)}, but the "
                    f"arenas are for {self._longest} in pieces of up to {self._piece_tokens}: make the Splitter with "
                    f"longest={max(cut.length, self._longest)}, piece_tokens={max(*cut.sizes, self._piece_tokens)}"
                )
