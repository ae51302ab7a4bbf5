"""Each optimizer step's samples spread over the ranks by LB-Mini, for a Trainer: `OdcTrainer(..., max_tokens=...)`.

Every rank draws the same order of samples and plans the same step from their lengths, so that nothing is exchanged; it
then loads its own microbatches, as many as the plan gives it, which may be none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from odc.balance import Plan, cost_of, lb_mini, lb_split, linear_cost, longest_in_pieces, most_pieces
from odc.balance.cost import Cost
from odc.errors import ConfigError
from odc.integrations.transformers_pieces import SplitSamples


class PlannedMicrobatch(NamedTuple):
    """A microbatch of a planned step.

    Args:
        rows: indices into the dataset, or what the collator made of those.
        weight: ranks x tokens of the microbatch / tokens of the step, on all ranks; 1 in the mean where each rank has
            one microbatch.
    """

    rows: Any
    weight: float


class StepOfRank(NamedTuple):
    """What one rank computes in one optimizer step: the pieces of split samples first, then collated microbatches.

    A tuple, because torch pins the tensors in it where a loader has `pin_memory`.
    """

    split: SplitSamples | None
    microbatches: list[PlannedMicrobatch]

    @classmethod
    def of(cls, items: Sequence[PlannedMicrobatch | SplitSamples]) -> StepOfRank:
        """A step of a planned batch, whose split samples come in one item at most."""
        split = next((one for one in items if isinstance(one, SplitSamples)), None)
        return cls(split, [one for one in items if isinstance(one, PlannedMicrobatch)])

    def counted(self, rank: int) -> list[Any]:
        """Batches whose labels this rank reports: each sample's on one rank."""
        whole = [one.rows for one in self.microbatches]
        return whole + ([] if self.split is None else self.split.counted(rank))


class PlannedSteps(Sampler[list[Any]]):
    """For every optimizer step of an epoch this rank's microbatches, of indices into the dataset.

    With `split`, the ranks of one host, long samples are split over them: their `SplitSamples` come first.

    `order`, which has a length, draws the indices of an epoch. All ranks draw alike: its `generator`, or torch's own if
    it has none, is seeded for that with `seed` and the epoch. `epoch` returns the number of the one that begins, until
    `set_epoch` gives it. `lengths` are the tokens of every sample, `samples` how many one step has over all ranks (the
    last of an epoch may have fewer, unless `drop_last`), `max_tokens` the cap of a microbatch.
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
        epoch: Callable[[], int],
        drop_last: bool,
        split: int | None = None,
    ) -> None:
        self._order, self._lengths, self._samples = order, lengths, samples
        self._max_tokens, self._cost = max_tokens, cost
        self._rank, self._world, self._seed, self._drop_last = rank, world, seed, drop_last
        self._epoch, self._node = epoch, split
        if not hasattr(order, "__len__"):
            raise ConfigError(f"max_tokens needs a sampler with a length, which {type(order).__name__} has not")
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        pieces = 1 if split is None else most_pieces(split)
        if lengths[longest] > longest_in_pieces(max_tokens, pieces):
            more = f" on each of {pieces} ranks" if pieces > 1 else ""
            raise ConfigError(
                f"sample {longest} has {lengths[longest]} tokens, more than max_tokens={max_tokens}{more}"
            )

    def __len__(self) -> int:
        whole, rest = divmod(len(self._order), self._samples)
        return whole + (rest > 0 and not self._drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from the next iteration on."""
        self._epoch = lambda: epoch

    def __iter__(self) -> Iterator[list[Any]]:
        seed = self._seed + self._epoch()
        if hasattr(self._order, "generator"):
            self._order.generator = torch.Generator().manual_seed(seed)
        if hasattr(self._order, "set_epoch"):
            self._order.set_epoch(self._epoch())
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            indices = [int(i) for i in self._order]
        for step in range(len(self)):
            chosen = indices[step * self._samples : (step + 1) * self._samples]
            lengths = [self._lengths[i] for i in chosen]
            items: list[PlannedMicrobatch | SplitSamples] = []
            plan = self._plan(lengths)
            if plan.splits:
                items.append(SplitSamples.of(plan, chosen, self._rank))
            for samples in filter(None, plan.ranks[self._rank]):
                weight = self._world * sum(lengths[i] for i in samples) / max(1, sum(lengths))
                items.append(PlannedMicrobatch([chosen[i] for i in samples], weight))
            yield items

    def _plan(self, lengths: list[int]) -> Plan:
        if self._node is None:
            return lb_mini(lengths, self._world, self._max_tokens, self._cost)
        return lb_split(lengths, self._world, self._max_tokens, self._cost, node=self._node)


class _Microbatches(Dataset[Any]):
    """A dataset whose index is a `PlannedMicrobatch` of indices, and whose item is the same with its rows collated.

    An index may be `SplitSamples` too: each of its rows is then collated alone.
    """

    def __init__(self, rows: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._rows, self._collate = rows, collate

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: PlannedMicrobatch | SplitSamples) -> PlannedMicrobatch | SplitSamples:
        if isinstance(item, SplitSamples):
            return item._replace(rows={sample: self._collate([self._rows[i]]) for sample, i in item.rows.items()})
        return item._replace(rows=self._collate([self._rows[i] for i in item.rows]))


class _PlannedLoader(DataLoader[Any]):
    """A loader whose epoch a Trainer sets, but for the one in which it is resumed: that is drawn by another loader."""

    def set_epoch(self, epoch: int) -> None:
        steps = self.batch_sampler
        assert isinstance(steps, PlannedSteps)
        steps.set_epoch(epoch)


def planned_loader(stock: Any, steps: PlannedSteps) -> DataLoader[Any]:
    """A loader of `StepOfRank`, with the rows, the collator and the workers of a Trainer's own loader."""
    workers: dict[str, Any] = {"num_workers": stock.num_workers, "pin_memory": stock.pin_memory}
    if stock.num_workers:
        workers |= {"persistent_workers": stock.persistent_workers, "prefetch_factor": stock.prefetch_factor}
        workers |= {"worker_init_fn": stock.worker_init_fn, "in_order": stock.in_order}
        workers |= {"multiprocessing_context": stock.multiprocessing_context}
    rows = _Microbatches(stock.dataset, stock.collate_fn)
    return _PlannedLoader(rows, batch_sampler=steps, collate_fn=StepOfRank.of, **workers)


def lengths_of(dataset: Any, column: str) -> list[int]:
    """Tokens of every sample: of the column of lengths, if there is one, else of its `input_ids`.

    ConfigError naming the first row without tokens, which a model cannot run alone, as a plan may have it.
    """
    if not hasattr(dataset, "__len__"):
        raise ConfigError("max_tokens needs a dataset with a length: leave it out for an iterable one")
    try:
        if column in getattr(dataset, "column_names", ()):
            lengths = [int(length) for length in dataset[column]]
        else:
            lengths = [len(dataset[i]["input_ids"]) for i in range(len(dataset))]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"max_tokens needs samples with input_ids, or a column {column!r} of lengths") from error
    for row, length in enumerate(lengths):
        if length < 1:
            raise ConfigError(f"max_tokens cannot plan row {row} of the dataset, which has no tokens: leave it out")
    return lengths


def cost_of_model(model: Any) -> Cost:
    """`cost_of` a Hugging Face model's configuration; tokens alone for a model that has none."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return linear_cost if to_dict is None else cost_of(to_dict())


@contextlib.contextmanager
def local_metrics(accelerator: Any) -> Iterator[None]:
    """Have `accelerator.gather_for_metrics` return what it is given: ranks with unequal counts cannot meet in it."""
    accelerator.gather_for_metrics = lambda data, *args, **options: data
    try:
        yield
    finally:
        del accelerator.gather_for_metrics
