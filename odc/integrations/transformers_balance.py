"""Each optimizer step's samples spread over the ranks by LB-Mini, for a Trainer: `OdcTrainer(..., max_tokens=...)`.

Every rank draws the same order of samples and plans the same step from their lengths, so that nothing is exchanged; it
then loads its own microbatches, as many as the plan gives it, which may be none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from odc.balance import Plan, cost_from_config, lb_mini, lb_split, linear_cost, most_pieces
from odc.balance.cost import Cost
from odc.errors import ConfigError, PlanError
from odc.integrations.transformers_pieces import SplitSamples


class StepOfRank:
    """What one rank computes in one optimizer step: the pieces of split samples first, then collated microbatches."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.split = next((one for one in items if isinstance(one, SplitSamples)), None)
        self.microbatches = [one for one in items if not isinstance(one, SplitSamples)]

    def counted(self, rank: int) -> list[Any]:
        """Batches whose labels this rank reports: each sample's on one rank."""
        return self.microbatches + ([] if self.split is None else self.split.counted(rank))


class PlannedSteps(Sampler[list[Any]]):
    """For every optimizer step of an epoch this rank's microbatches, as lists of indices into the dataset.

    With `split`, the ranks of one host, long samples are split over them: their `SplitSamples` come first.

    `order` draws the indices of an epoch. It is seeded here if it has a `generator`, with `seed` and the epoch, so all
    ranks draw alike. `lengths` are the tokens of every sample, `samples` how many one step has over all ranks (the last
    of an epoch may have fewer, unless `drop_last`), `max_tokens` the cap of a microbatch.
    """

    def __init__(
        self,
        order: Any,
        lengths: Sequence[int],
        samples: int,
        max_tokens: int,
        cost: Cost,
        *,
        rank: int,
        world: int,
        seed: int,
        drop_last: bool,
        split: int | None = None,
    ) -> None:
        self._order, self._lengths, self._samples, self._max_tokens, self._cost = (
            order,
            lengths,
            samples,
            max_tokens,
            cost,
        )
        self._rank, self._world, self._seed, self._drop_last = rank, world, seed, drop_last
        self._epoch, self._node = 0, split
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        pieces = 1 if split is None else most_pieces(split)
        if lengths[longest] > max_tokens * pieces:
            more = f" on each of {pieces} ranks" if pieces > 1 else ""
            raise ConfigError(
                f"sample {longest} has {lengths[longest]} tokens, more than max_tokens={max_tokens}{more}"
            )

    @property
    def batch_sampler(self) -> PlannedSteps:
        """Itself: a Trainer looks for `set_epoch` one level below a loader's batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from the next iteration on."""
        self._epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self._lengths), self._samples)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        if hasattr(self._order, "generator"):
            self._order.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        indices = [int(i) for i in self._order]
        for step in range(len(self)):
            chosen = indices[step * self._samples : (step + 1) * self._samples]
            items: list[Any] = []
            plan = self._plan([self._lengths[i] for i in chosen])
            if plan.splits:
                items.append(SplitSamples.of(plan, chosen, self._rank))
            for microbatch in filter(None, plan.ranks[self._rank]):
                items.append([chosen[i] for i in microbatch])
            yield items

    def _plan(self, lengths: list[int]) -> Plan:
        if self._node is None:
            return lb_mini(lengths, self._world, self._max_tokens, self._cost)
        return lb_split(lengths, self._world, self._max_tokens, self._cost, node=self._node)


class _Microbatches(Dataset[Any]):
    """A dataset whose index is a list of indices, and whose item is the collated microbatch.

    An index may be `SplitSamples` too: each of its rows is then collated alone.
    """

    def __init__(self, rows: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._rows, self._collate = rows, collate

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, indices: list[int] | SplitSamples) -> Any:
        if isinstance(indices, SplitSamples):
            rows = {sample: self._collate([self._rows[i]]) for sample, i in indices.rows.items()}
            return indices._replace(rows=rows)
        return self._collate([self._rows[i] for i in indices])


def planned_loader(stock: Any, steps: PlannedSteps) -> DataLoader[Any]:
    """A loader of `StepOfRank`, with the rows, the collator and the workers of a Trainer's own loader."""
    workers: dict[str, Any] = {"num_workers": stock.num_workers, "pin_memory": stock.pin_memory}
    if stock.num_workers:
        workers |= {"persistent_workers": stock.persistent_workers, "prefetch_factor": stock.prefetch_factor}
        workers |= {"worker_init_fn": stock.worker_init_fn}
    rows = _Microbatches(stock.dataset, stock.collate_fn)
    return DataLoader(rows, batch_sampler=steps, collate_fn=StepOfRank, **workers)


def lengths_of(dataset: Any, column: str) -> list[int]:
    """Tokens of every sample: of the column of lengths, if there is one, else of its `input_ids`."""
    if not hasattr(dataset, "__len__"):
        raise ConfigError("max_tokens needs a dataset with a length: leave it out for an iterable one")
    if column in getattr(dataset, "column_names", ()):
        return [int(length) for length in dataset[column]]
    try:
        return [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"max_tokens needs samples with input_ids, or a column {column!r} of lengths") from error


def cost_of(model: Any) -> Cost:
    """The cost model of a Hugging Face model; tokens alone where its configuration does not say enough."""
    try:
        return cost_from_config(model.config.to_dict())
    except (AttributeError, PlanError, ConfigError, KeyError):
        return linear_cost


def refuse_unplanned(trainer: Any, max_tokens: int) -> None:
    """Raise ConfigError if a Trainer's loss or arguments do not allow ranks to have unequal microbatches."""
    args = trainer.args
    wrong = {
        "gradient_accumulation_steps": (args.gradient_accumulation_steps != 1, "set it to 1; the plan counts"),
        "average_tokens_across_devices": (not args.average_tokens_across_devices, "leave it True"),
        "include_num_input_tokens_seen": (args.include_num_input_tokens_seen != "no", "leave it out"),
        "train_sampling_strategy='batch_rebalance'": (
            str(getattr(args, "train_sampling_strategy", "")).endswith("batch_rebalance"),
            "use 'random', 'sequential' or 'group_by_length'",
        ),
        f"the loss of {type(trainer).__name__}": (
            _has_own_loss(trainer) or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func),
            "it is a mean over a microbatch; leave max_tokens out",
        ),
    }
    for what, (bad, instead) in wrong.items():
        if bad:
            raise ConfigError(f"odc cannot apply max_tokens={max_tokens} with {what}: {instead}")


def _has_own_loss(trainer: Any) -> bool:
    """Whether the class computes its loss itself, as TRL's do for preferences and rewards; transformers 5.19."""
    return getattr(trainer, "loss_is_scaled_for_ga", None) is not None


@contextlib.contextmanager
def local_metrics(accelerator: Any) -> Iterator[None]:
    """Have `accelerator.gather_for_metrics` return what it is given: ranks with unequal counts cannot meet in it."""
    accelerator.gather_for_metrics = lambda data, *args, **options: data
    try:
        yield
    finally:
        del accelerator.gather_for_metrics
