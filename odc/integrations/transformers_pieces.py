"""Long samples of a Trainer's planned steps, as pieces on several ranks: `OdcTrainer(max_tokens=..., split=True)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from odc.balance import Plan
from odc.errors import ConfigError
from odc.split import SamplePiece, Splitter, ranks_of_host


class SplitSamples(NamedTuple):
    """The split samples of one step, which come before its microbatches: the plan of all ranks, and rows by its sample.

    `rows` are indices into the dataset, or what the collator made of each alone; those of which this rank has a piece.
    """

    plan: Plan
    rows: dict[int, Any]

    @classmethod
    def of(cls, plan: Plan, chosen: list[int], rank: int) -> SplitSamples:
        """The samples of which `rank` has a piece; `chosen` are the indices that the plan's samples stand for."""
        return cls(plan, {one.sample: chosen[one.sample] for one in plan.splits if rank in one.ranks})

    def counted(self, rank: int) -> list[Any]:
        """The rows that this rank reports, so that each is counted once."""
        return [self.rows[one.sample] for one in self.plan.splits if one.ranks[0] == rank]


class TrainerPieces:
    """The pieces of one rank of a Trainer, of samples of at most `longest` tokens; every rank makes one, of its model.

    Raises UnsupportedError if samples of the model cannot be split.
    """

    def __init__(self, model: Any, longest: int, max_tokens: int, *, keep: bool) -> None:
        # In zig-zag pieces of two slices each, both rounded up.
        most = min(max_tokens, -(-longest // 2) + 1)
        self._splitter = Splitter(model, longest, piece_tokens=most, keep=keep, node=ranks_of_host())

    def of(self, samples: SplitSamples) -> Iterator[dict[str, Any]]:
        """The model's arguments for each piece of this rank, whose forward and backward come before the next."""
        for piece in self._splitter.pieces(samples.plan):
            yield arguments_of(piece, samples.rows[piece.sample])

    def close(self) -> None:
        """Wait until other ranks have read what lies here."""
        self._splitter.close()


def refuse_unsplittable(trainer: Any) -> None:
    """Raise ConfigError if a Trainer's loss is not the model's own: that of a piece needs the piece's own labels."""
    if trainer.args.label_smoothing_factor:
        raise ConfigError("odc cannot apply split=True with label_smoothing_factor: set it to 0")
    if trainer.compute_loss_func is not None:
        raise ConfigError("odc cannot apply split=True with compute_loss_func: leave one of them out")


def arguments_of(piece: SamplePiece, row: dict[str, Any]) -> dict[str, Any]:
    """What the model takes for a piece of `row`, a collated batch of one sample.

    Its loss is over `shift_labels`; `labels` are the same, one token later, for Trainers that look at them. Raises
    ConfigError for a row with inputs that odc does not know how to cut.
    """
    if other := row.keys() - {"input_ids", "attention_mask", "labels", "position_ids"}:
        raise ConfigError(f"split=True cannot cut {', '.join(sorted(other))}: let the collator leave it out")
    ids, labels = row["input_ids"][0], row["labels"][0]
    if (mask := row.get("attention_mask")) is not None:  # of padding
        ids, labels = ids[mask[0].bool()], labels[mask[0].bool()]
    if len(ids) != piece.cut.length:
        raise ConfigError(
            f"split=True: a sample of {piece.cut.length} tokens came out of the collator with {len(ids)}; it must "
            "neither cut nor pack samples"
        )
    given = piece.of(ids, labels)
    return {**given.inputs, "labels": _later(given.targets)[None], "shift_labels": given.targets[None]}


def _later(targets: Tensor) -> Tensor:
    return torch.cat([targets.new_full((1,), -100), targets[:-1]])
