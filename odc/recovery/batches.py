"""The batches of a data loader, in a loop whose steps may be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from odc.errors import ConfigError


class StatefulBatches:
    """The batches of a loader, epoch after epoch without end, from a place that recovery keeps.

        batches = odc.StatefulBatches(loader)
        recovery.protect(model, optimizer, batches=batches)

    A loader that is put back begins there with its next iterator only; this makes one. `loader` has `state_dict` and
    `load_state_dict`, as torchdata's StatefulDataLoader has; ConfigError without. StopIteration if an epoch is empty.
    Batch samplers, samplers and datasets that have `set_epoch`, as a DistributedSampler has, get the epoch. Workers
    that draw random numbers draw others once a loader was put back.
    """

    def __init__(self, loader: Any) -> None:
        _refuse_without_state("StatefulBatches", loader)
        self._loader, self._epoch = loader, 0
        self._put_back: dict[str, Any] | None = None  # the state in which the next iterator begins
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> StatefulBatches:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._begun())
        except StopIteration:
            self._iterator, self._epoch = None, self._epoch + 1
            return next(self._begun())

    def state_dict(self) -> dict[str, Any]:
        self._begun()  # a loader may begin to be asked for its state, and would begin once more for the first batch
        generator = getattr(self._loader, "generator", None)
        drawn = None if generator is None else generator.get_state()
        return {"loader": self._loader.state_dict(), "epoch": self._epoch, "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._epoch, self._put_back, self._iterator = state["epoch"], state, None

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            for ordering in _orderings(self._loader):
                ordering.set_epoch(self._epoch)
            # A loader draws a seed when it begins. One that begins again must not: that draw is in what was put back.
            again, self._put_back = self._put_back, None
            with torch.random.fork_rng([], enabled=again is not None):
                self._iterator = iter(self._loader)
            if again is not None and again["drawn"] is not None:
                self._loader.generator.set_state(again["drawn"])
        return self._iterator


def _orderings(loader: Any) -> list[Any]:
    """What decides on the order of a loader's samples and has `set_epoch`, each once."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None))
    found = {id(one): one for one in (*parts, getattr(loader, "dataset", None)) if hasattr(one, "set_epoch")}
    return [*found.values()]


def refuse_loaders(others: Mapping[str, object]) -> None:
    """ConfigError for what `protect` cannot put back: without a state, or a loader, whose iterators would go on."""
    for name, other in others.items():
        _refuse_without_state(name, other)
        if isinstance(other, DataLoader):
            raise ConfigError(
                f"{name}: an iterator of a loader does not go back with it; draw from odc.StatefulBatches(loader), and "
                "give that to protect()"
            )


def _refuse_without_state(name: str, thing: object) -> None:
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise ConfigError(
            f"{name}: {type(thing).__name__} has no state_dict and load_state_dict, as torchdata's "
            "StatefulDataLoader has"
        )
