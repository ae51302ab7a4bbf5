"""Batches of a loader in a job that loses a rank: a repeated step trains the same ones, on survivors too."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import odc
from odc.errors import ConfigError
from odc.experiments.launch import launch
from odc.recovery.batches import refuse_loaders

STEPS, LENGTH = 8, 3


class Loader:
    """As torchdata's StatefulDataLoader: a state that is put back is where its next iterator begins; each draws a seed,
    and one is begun to be asked for its state.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] | None = None
        self._place: dict[str, int] | None = None

    def __iter__(self) -> Iterator[int]:
        seed = int(torch.randint(1000, ()))
        place = self._place = self._next or {"seed": seed, "drawn": 0}
        self._next = None
        return self._batches(place)

    def _batches(self, place: dict[str, int]) -> Iterator[int]:
        while place["drawn"] < LENGTH:
            place["drawn"] += 1
            yield 10 * place["seed"] + place["drawn"]

    def state_dict(self) -> dict[str, int]:
        if self._place is None:
            iter(self)
        assert self._place is not None
        return dict(self._place)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = dict(state)


def train(folder: str, death: int | None) -> dict[int, tuple[int, float]]:
    """The batch and a random number of each step that this process did, as it did it last."""
    note, done = Path(folder, "died"), {}
    with odc.Recovery(rejoin_s=60) as recovery:
        model: Any = odc.fully_shard(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(recovery.rank)
        batches = odc.StatefulBatches(Loader())
        recovery.protect(model, optimizer, batches=batches)
        for step in recovery.steps(STEPS):
            with recovery.attempt():
                done[step] = next(batches), float(torch.rand(()))
                if step == death and recovery.rank == 1 and not note.exists():
                    note.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    return done


@pytest.mark.parametrize("death", [0, LENGTH, LENGTH + 1], ids=["first batch", "next epoch", "amid an epoch"])
def test_a_repeated_step_trains_the_same_batch(death: int, tmp_path: Path) -> None:
    undisturbed = launch(train, str(tmp_path), None, ranks=2)
    survivor, replacement = launch(train, str(tmp_path), death, ranks=2, restarts=1)
    assert (tmp_path / "died").exists()
    assert survivor == undisturbed[0]
    assert replacement == {step: found for step, found in undisturbed[1].items() if step >= death}


class Seeded(Loader):
    """A loader that draws its seed from a generator of its own, and a sampler that wants the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.sampler = torch.Generator().manual_seed(1), Epochs()

    def __iter__(self) -> Iterator[int]:
        torch.randint(1000, (), generator=self.generator)
        epoch = self.sampler.epoch
        return (batch + 1000 * epoch + 10000 * self.drawn() for batch in super().__iter__())

    def drawn(self) -> int:
        return int(torch.randint(1000, (), generator=torch.Generator().set_state(self.generator.get_state())))


class Epochs:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("anew", [False, True], ids=["survivor", "replacement"])
@pytest.mark.parametrize("kept", [0, 1, LENGTH, LENGTH + 2])
def test_what_a_loader_draws_of_its_own_goes_back_with_it(kept: int, anew: bool) -> None:
    torch.manual_seed(0)
    batches = odc.StatefulBatches(Seeded())
    for _ in range(kept):
        next(batches)
    state, random = copy.deepcopy(batches.state_dict()), torch.get_rng_state()
    expected = [next(batches) for _ in range(3 * LENGTH)]
    assert len({batch // 1000 % 10 for batch in expected}) >= 3, "epochs of the sampler"
    if anew:
        batches = odc.StatefulBatches(Seeded())
        batches.state_dict()  # begins, as to be kept
    batches.load_state_dict(state)
    torch.set_rng_state(random)
    assert [next(batches) for _ in range(3 * LENGTH)] == expected


class Noted:
    """Notes each epoch that it gets."""

    def __init__(self, **parts: Any) -> None:
        self.epochs = list[int]()
        vars(self).update(parts)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.mark.parametrize("shared", [False, True])
def test_each_part_that_decides_on_the_order_gets_the_epoch_once(shared: bool) -> None:
    loader: Any = Loader()
    loader.dataset, loader.sampler = Noted(), Noted()
    loader.batch_sampler = Noted(sampler=loader.sampler if shared else Noted())
    batches = odc.StatefulBatches(loader)
    for _ in range(LENGTH + 1):
        next(batches)
    parts = [loader.dataset, loader.sampler, loader.batch_sampler, loader.batch_sampler.sampler]
    assert [one.epochs for one in parts] == [[0, 1]] * 4


def test_loaders_whose_iterators_would_go_on_are_refused() -> None:
    loader: Any = DataLoader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="data: DataLoader has no state_dict"):
        refuse_loaders({"data": loader})
    with pytest.raises(ConfigError, match="StatefulBatches: DataLoader has no state_dict"):
        odc.StatefulBatches(loader)
    loader.state_dict = loader.load_state_dict = SimpleNamespace
    with pytest.raises(ConfigError, match=r"data: .* draw from odc\.StatefulBatches\(loader\)"):
        refuse_loaders({"data": loader})
    refuse_loaders({"batches": odc.StatefulBatches(loader)})
