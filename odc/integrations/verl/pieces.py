"""Long rows of a training minibatch as pieces on several ranks of a verl engine: `engine.odc.split=true`.

A piece gives the model its own tokens. verl's loss then takes the whole row: with the piece's outputs in their places,
zeros in the others, and masks that leave only the tokens which the piece predicts, as where verl pads a row. So a loss
that sums over tokens is the sum of its pieces, whatever columns it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu

from odc.balance import Cost, Plan, lb_split, longest_in_pieces, most_pieces
from odc.errors import PlanError, UnsupportedError
from odc.integrations.verl.rebalance import Lengths, send_rows
from odc.split import SamplePiece, Splitter

_engines = itertools.count()  # of this process; all ranks make the same ones in the same order
# Losses of verl that sum over tokens, each on its own.
_SUMS = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gpg", "dro", "cispo"})
_WHOLE = frozenset({"input_ids", "position_ids", "prompts", "responses", "attention_mask"})  # the row itself


def refuse_options(model_config: Any, engine_config: Any) -> None:
    """Raise UnsupportedError if an engine with these configurations cannot run rows as pieces."""
    wrong = {
        "ulysses_sequence_parallel_size > 1": engine_config.ulysses_sequence_parallel_size > 1,
        "use_fused_kernels": model_config.use_fused_kernels,
        "pad_to_length": engine_config.pad_to_length,
    }
    for name, wanted in wrong.items():
        if wanted:
            raise UnsupportedError(f"engine.odc.split=true does not go with {name}")


def refuse_batch(data: Any, loss_function: Callable[..., Any]) -> None:
    """Raise UnsupportedError if rows of a training batch cannot run as pieces, or the loss is not a sum over tokens.

    What a loss does is known only of verl's own, by its configuration.
    """
    given = getattr(loss_function, "keywords", {})
    config = given.get("config")
    policy, mean = getattr(config, "policy_loss", None), getattr(config, "loss_agg_mode", "")
    loss = policy.get("loss_mode", "vanilla") if policy is not None else "vanilla"
    wrong = {
        "use_dynamic_bsz=false": not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True),
        "force_group_size > 1": tu.get_non_tensor_data(data, "force_group_size", default=1) > 1,
        "distillation": "distillation_config" in given
        or any(
            tu.get_non_tensor_data(data, name, default=False) for name in ("distillation_use_topk", "distillation_only")
        ),
        f"loss_agg_mode={mean}: it is a mean over the tokens of a row": mean == "seq-mean-token-mean",
        f"loss_mode={loss}: it is not a sum over tokens": loss not in _SUMS,
    }
    for name, wanted in wrong.items():
        if wanted:
            raise UnsupportedError(f"engine.odc.split=true does not go with {name}")


class RowPieces:
    """The pieces of split rows on one rank; every rank makes one, of its sharded model.

    `keep` and `timeout_s` as in `Splitter`, `node` as in `lb_split`.
    """

    def __init__(self, model: Any, *, keep: bool, node: int, timeout_s: float) -> None:
        self._model, self._keep, self._node, self._timeout_s = model, keep, node, timeout_s
        self._splitter: Splitter | None = None
        self._rooms = (0, 0)
        self._name, self._made = f"rows{next(_engines)}", 0

    def most(self, ranks: int) -> int:
        """Pieces of one row at most, with so many data-parallel ranks."""
        return most_pieces(min(self._node, ranks))

    def plan(self, lengths: Lengths, max_tokens: int, cost: Cost) -> Plan | None:
        """A plan of all ranks' rows, numbered rank by rank, the same on every rank; None where none is split.

        Raises PlanError, on every rank alike, if rows fit nowhere, or leave a rank without any.
        """
        flat = [length for rows in lengths for length in rows]
        plan = lb_split(flat, len(lengths), max_tokens, cost, node=self._node)
        if not plan.splits:
            return None
        for rank, microbatches in enumerate(plan.ranks):
            if not any(microbatches) and not any(rank in split.ranks for split in plan.splits):
                raise PlanError(
                    f"engine.odc.split=true leaves data-parallel rank {rank} without a row: {len(plan.splits)} of "
                    f"{len(flat)} rows are split, none of them over it; train with more rows a minibatch"
                )
        return plan

    def prepare(self, plan: Plan, max_tokens: int) -> None:
        """Make room for the pieces of a plan, outside a minibatch; where it is new, all ranks compare a random row.

        Raises UnsupportedError if rows of the model cannot be split, HeapMemoryError without room.
        """
        longest = max(split.length for split in plan.splits)
        pieces = max(max(split.tokens) for split in plan.splits)
        rooms = max(self._rooms[0], longest), max(self._rooms[1], pieces)
        if self._splitter is not None and rooms == self._rooms:
            return
        self.close()
        # Room for twice as many tokens, up to a whole microbatch a piece, so that new room is rarely needed.
        most = longest_in_pieces(max_tokens, self.most(len(plan.ranks)))
        rooms = max(rooms[0], min(2 * rooms[0], most)), max(rooms[1], min(2 * rooms[1], max_tokens))
        self._made += 1
        self._splitter = Splitter(
            self._model,
            rooms[0],
            piece_tokens=rooms[1],
            keep=self._keep,
            node=self._node,
            timeout_s=self._timeout_s,
            name=f"{self._name}.{self._made}",
        )
        self._splitter.prepare()
        self._rooms = rooms

    def of(self, plan: Plan, rows: dict[int, Any]) -> Iterator[tuple[SamplePiece, Any]]:
        """This rank's pieces, each with its row as `masked` leaves it; forward and backward come before the next.

        Every rank exhausts it, before its microbatches. `rows` are batches of one, by their number in the plan.
        """
        assert self._splitter is not None
        for piece in self._splitter.pieces(plan):
            yield piece, masked(piece, rows[piece.sample])

    def close(self) -> None:
        """Wait until other ranks have read what lies here."""
        splitter, self._splitter = self._splitter, None
        if splitter is not None:
            splitter.close()


def divide(data: Any, lengths: Lengths, plan: Plan, group: Any) -> tuple[dict[int, Any], list[Any]]:
    """Send every row to where the plan has it: the split rows of this rank by number, and its microbatches.

    A collective over `group`.
    """
    me, ranks = dist.get_rank(group), len(lengths)
    goals: dict[int, Sequence[int]] = {split.sample: split.ranks for split in plan.splits}
    goals |= {row: (rank,) for rank, parts in enumerate(plan.ranks) for part in parts for row in part}
    numbers = iter(range(len(goals)))
    by_rank = [list(itertools.islice(numbers, len(rows))) for rows in lengths]
    here = send_rows(data, [[goals[number] for number in rows] for rows in by_rank], group)
    sources = [me, *(rank for rank in range(ranks) if rank != me)]
    arrived = [number for rank in sources for number in by_rank[rank] if me in goals[number]]
    at = {number: place for place, number in enumerate(arrived)}
    mine = [split.sample for split in plan.splits if me in split.ranks]
    rows = {number: tu.index_select_tensor_dict(here, [at[number]]) for number in mine}
    parts = [[at[number] for number in part] for part in plan.ranks[me] if part]
    return rows, [tu.index_select_tensor_dict(here, part) for part in parts]


def masked(piece: SamplePiece, row: Any) -> Any:
    """`row`, a batch of one, with zeros in every column of tokens where another piece predicts the token."""
    length, answer = piece.cut.length, _answer(row)
    mine = torch.zeros(length, dtype=torch.bool)
    mine[piece.cut.positions(piece.place)] = True
    predicted = mine.roll(1)  # the first token: by the last position, as verl rolls a row
    found = row.copy()
    for name, column in row.items():
        if name in _WHOLE or not isinstance(column, Tensor) or column.dim() < 2:
            continue
        values = column.values() if column.is_nested else column[0]
        if column.is_nested and len(values) == length:
            known = predicted
        elif len(values) == answer or (not column.is_nested and 0 < answer < len(values)):
            known = predicted.new_zeros(len(values))  # of padding nothing is predicted
            known[:answer] = predicted[-answer:]
        else:
            continue
        kept = values.masked_fill(~known.view(-1, *[1] * (values.dim() - 1)).to(values.device), 0)
        found[name] = _nested(kept, column) if column.is_nested else kept[None]
    return found


def _answer(row: Any) -> int:
    """Tokens of the response of a row; 0 where it has none."""
    if "responses" not in row:
        return 0
    if row["responses"].is_nested:
        return len(row["responses"].values())
    return int(row["attention_mask"][0, row["prompts"].shape[1] :].sum())


def cut(piece: SamplePiece, row: Any) -> Any:
    """`row` with the tokens and positions of the piece only; other columns are as they were.

    Raises UnsupportedError if its positions do not count from 0 to the last token.
    """
    ids, positions = row["input_ids"].values(), row["position_ids"].values()
    if not torch.equal(positions, torch.arange(len(ids), device=ids.device, dtype=positions.dtype)):
        raise UnsupportedError("engine.odc.split=true needs rows of text whose position_ids count their tokens from 0")
    found = row.copy()
    for name in ("input_ids", "position_ids"):
        found[name] = _nested(piece.cut.take(piece.place, row[name].values()))
    return found


def inputs_of(piece: SamplePiece, row: Any) -> tuple[dict[str, Any], Tensor]:
    """The model's arguments for a piece, and what each token predicts; the last of a row, as in verl, its first."""
    ids = row["input_ids"].values()
    given = piece.of(ids, targets=ids.roll(-1))
    return {name: one for name, one in given.inputs.items() if name != "use_cache"}, given.targets  # verl passes that


def spread(piece: SamplePiece, row: Any, output: Tensor) -> Tensor:
    """An output of a piece, nested, in its places in the whole row; zeros in the others."""
    values = output.values()
    whole = values.new_zeros(piece.cut.length, *values.shape[1:])
    places = piece.cut.positions(piece.place, values.device)
    return _nested(whole.index_copy(0, places, values), row["input_ids"])


def _nested(values: Tensor, like: Any = None) -> Tensor:
    """A nested tensor of one row; with the offsets of `like` where they are its own."""
    offsets = torch.tensor([0, len(values)], device=values.device) if like is None else like.offsets()
    return torch.nested.nested_tensor_from_jagged(values, offsets)
