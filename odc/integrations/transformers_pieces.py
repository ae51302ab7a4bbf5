"""Long samples of a Trainer's planned steps, as pieces on several ranks: `OdcTrainer(max_tokens=..., split=True)`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from odc.balance import Plan
from odc.errors import ConfigError, refuse_together
from odc.integrations.transformers_loss import has_own_loss, wants_router_loss
from odc.split import SamplePiece
from odc.split.cut import NO_LABEL

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Rates in configurations of transformers; those of heads for other tasks are there without one.
_DROPS, _HEADS = ("dropout", "dropout_prob", "dropout_rate", "pdrop", "layerdrop"), ("classifier", "summary")


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
        """Batches that this rank reports, so that each sample is counted once: as pieces are cut, without padding."""
        cut = [row_of(self.rows[one.sample], one.length) for one in self.plan.splits if one.ranks[0] == rank]
        return [{"input_ids": ids[None], "labels": labels[None]} for ids, labels in cut]


def refuse_unsplittable(trainer: Any) -> None:
    """Raise ConfigError if a Trainer's samples cannot run as pieces, naming the argument or the model's setting."""
    args, asks = trainer.args, "leave split out, or "
    own = f"compute_loss of {type(trainer).__name__}"
    wrong = {
        "label_smoothing_factor": (args.label_smoothing_factor, "set it to 0"),
        "compute_loss_func": (trainer.compute_loss_func is not None, "leave one of them out"),
        own: (has_own_loss(trainer), "the loss of a piece must be the model's own"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, asks + "leave the noise out: it depends on the length"),
        "packing": (
            getattr(args, "packing", False) and getattr(trainer, "padding_free", False),
            "leave it out; the plan fills microbatches up to max_tokens",
        ),
        "padding_free": (getattr(trainer, "padding_free", False), "leave it out; padding is not counted"),
        "router losses (output_router_logits)": (
            wants_router_loss(trainer),
            asks + "set output_router_logits=False, of SFTConfig router_aux_loss_coef=0.0",
        ),
    }
    refuse_together("split=True", wrong)
    if dropouts := _dropouts(trainer.model):
        raise ConfigError(
            f"odc cannot apply split=True with dropout ({', '.join(dropouts)}): set it to 0, or leave split out; "
            "pieces would drop otherwise than the whole sample"
        )


def _dropouts(model: nn.Module) -> list[str]:
    """What drops in training, as "name=rate": settings of the configuration, else modules, of which the first."""
    config: Any = getattr(model, "config", None)
    found = _dropouts_of(config.to_dict()) if hasattr(config, "to_dict") else []
    modules = model.named_modules()
    return found or [f"{name}={one.p}" for name, one in modules if isinstance(one, _DROPOUT) and one.p > 0][:1]


def _dropouts_of(config: dict[Any, Any]) -> list[str]:
    found = []
    for key, value in config.items():
        name = str(key)
        if isinstance(value, dict):
            found += _dropouts_of(value)
        elif isinstance(value, int | float) and value > 0 and name.endswith(_DROPS) and not name.startswith(_HEADS):
            found.append(f"{name}={value}")
    return found


def refuse_documents(dataset: Any) -> None:
    """Raise ConfigError naming the first row whose own `position_ids` make it several documents; as on every rank."""
    if "position_ids" not in getattr(dataset, "column_names", ("position_ids",)):
        return
    for number in range(len(dataset)):
        row = dataset[number]
        if "position_ids" in row:
            _refuse_positions(torch.as_tensor(row["position_ids"]), f"row {number} of the dataset")


def _refuse_positions(positions: Tensor, what: str) -> None:
    """Raise ConfigError unless the positions [tokens] are 0, 1, 2 and so on."""
    if positions.dim() != 1 or not torch.equal(positions.long().cpu(), torch.arange(len(positions))):
        raise ConfigError(
            f"split=True: the position_ids of {what} do not count its tokens from 0, as where a row is several packed "
            "documents: make each document a row, which the plan packs up to max_tokens, or leave split out"
        )


def row_of(row: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, both [length], of a collated batch of one sample of so many tokens.

    Raises ConfigError for a row with inputs that odc does not know how to cut.
    """
    if other := row.keys() - {"input_ids", "attention_mask", "labels", "position_ids"}:
        raise ConfigError(f"split=True cannot cut {', '.join(sorted(other))}: let the collator leave it out")
    if missing := {"input_ids", "labels"} - row.keys():
        raise ConfigError(f"split=True needs {' and '.join(sorted(missing))} from the collator")
    ids, labels, positions = row["input_ids"][0], row["labels"][0], row.get("position_ids")
    if positions is not None:
        positions = positions[0]
    if (mask := row.get("attention_mask")) is not None:  # of padding
        there = mask[0].bool()
        ids, labels = ids[there], labels[there]
        if positions is not None and positions.shape == there.shape:
            positions = positions[there]
    if len(ids) != length:
        raise ConfigError(
            f"split=True: a sample of {length} tokens came out of the collator with {len(ids)}; it must neither cut "
            "nor pack samples"
        )
    if positions is not None:
        _refuse_positions(positions, f"a row of {length} tokens that the collator made")
    return ids, labels


def arguments_of(piece: SamplePiece, row: dict[str, Any]) -> dict[str, Any]:
    """What the model takes for a piece of `row`, a collated batch of one sample; ConfigError as `row_of`.

    Its loss is over `shift_labels`; `labels` are the same, one token later, for Trainers that read them.
    """
    given = piece.of(*row_of(row, piece.cut.length))
    return {**given.inputs, "labels": _later(given.targets)[None], "shift_labels": given.targets[None]}


def _later(targets: Tensor) -> Tensor:
    return torch.cat([targets.new_full((1,), NO_LABEL), targets[:-1]])
