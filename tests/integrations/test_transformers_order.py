"""The samples of each planned step of a Trainer, on two CPU ranks, by the epoch that it belongs to."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainers import arguments, as_torchrun, model, padded, samples

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)
LONG = [60, 22, 22, 22] * 4


class Drawn(torch.utils.data.Sampler[int]):
    """An order drawn from torch's own generator."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter(torch.randperm(12)[:6].tolist())


class Turned(Drawn):
    """An order that depends on the epoch alone."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(i + self.epoch) % 12 for i in range(6)])


def planned(order: Any, rank: int) -> list[list[list[int]]]:
    """Of two epochs, the samples of a rank in each step of four samples of all ranks."""
    from odc.balance import linear_cost
    from odc.integrations.transformers_balance import PlannedSteps

    steps = PlannedSteps(
        order, [5] * 12, 4, 10, linear_cost, rank=rank, world=2, seed=3, epoch=lambda: 0, drop_last=False
    )
    found = []
    for epoch in range(2):
        steps.set_epoch(epoch)
        torch.rand(1 + rank)  # dropout in unequal microbatches
        found.append([[row for one in step for row in one.rows] for step in steps])
        assert len(found[-1]) == len(steps)
    return found


@pytest.mark.parametrize("kind", [Drawn, Turned])
def test_ranks_share_an_order_of_any_length_without_a_generator(kind: Any) -> None:
    """Of six of twelve samples, in a step of four and one of two."""
    epochs = [
        [[*one, *other] for one, other in zip(*both, strict=True)]
        for both in zip(planned(kind(), 0), planned(kind(), 1), strict=True)
    ]
    assert [[len(step) for step in steps] for steps in epochs] == [[4, 2]] * 2
    rows = [[row for step in steps for row in step] for steps in epochs]
    assert [len(set(one)) for one in rows] == [6, 6], "ranks have drawn different orders"
    assert rows[0] != rows[1]


def test_a_row_without_tokens_is_named_when_the_loader_is_made() -> None:
    from odc.errors import ConfigError
    from odc.integrations.transformers_balance import lengths_of

    with pytest.raises(ConfigError, match="row 1 of the dataset, which has no tokens"):
        lengths_of([{"input_ids": ids} for ids in ([1], [], [1, 2], [])], "length")


def test_the_tensors_of_a_planned_step_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    from odc.integrations.transformers_balance import PlannedMicrobatch, StepOfRank
    from odc.integrations.transformers_pieces import SplitSamples

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 100)
    rows = [padded(samples([length])) for length in (2, 3)]
    step = pin_memory(StepOfRank.of([SplitSamples(None, {7: rows[0]}), PlannedMicrobatch(rows[1], 0.5)]))  # type: ignore[arg-type]
    assert isinstance(step, StepOfRank) and step.microbatches[0].weight == 0.5
    pinned = [step.split.rows[7], step.microbatches[0].rows]  # type: ignore[union-attr]
    for ours, theirs in zip(pinned, rows, strict=True):
        assert {name: tensor.tolist() for name, tensor in ours.items()} == {
            name: (tensor + 100).tolist() for name, tensor in theirs.items()
        }


def drawn(
    rank: int, world: int, folder: Path, strategy: str, resume: str | None = None, ends: int = 0
) -> list[list[int]]:
    """Of two epochs of four steps of four samples, the samples of this rank in each step. `ends`: the step after which
    a callback ends the epoch.
    """
    from transformers import TrainerCallback

    from odc.integrations.transformers import OdcTrainer

    class Ending(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= state.global_step == ends

    as_torchrun(rank, world)
    found: list[list[int]] = []

    class Noting(OdcTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            rows = [row for one in inputs.microbatches for row in one.rows["input_ids"]]
            found.append([int(row[0]) for row in rows])  # a sample begins with its number
            return super().training_step(model, inputs, num_items_in_batch)

    changes: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 2}
    changes |= {"save_strategy": "steps", "save_steps": 6, "train_sampling_strategy": strategy}
    args = arguments(folder, **changes)
    trainer = Noting(model=model(), args=args, train_dataset=samples(LONG), data_collator=padded, max_tokens=64)
    trainer.add_callback(Ending())
    trainer.train(resume_from_checkpoint=resume)
    return found


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_ranks_draw_one_order_and_another_in_each_epoch(ranks, tmp_path, strategy: str) -> None:
    both = ranks(2).run(drawn, tmp_path, strategy, timeout=500)
    steps = [one + other for one, other in zip(*both, strict=True)]
    first, second = ([i for step in steps[at : at + 4] for i in step] for at in (0, 4))
    assert len(steps) == 8 and sorted(first) == sorted(second) == list(range(16)), "each rank has its own samples"
    assert first != second, "the epochs are alike"
    resumed = ranks(2).run(drawn, tmp_path, strategy, str(tmp_path / "checkpoint-6"), timeout=500)
    assert resumed == [own[6:] for own in both], "the rest of the second epoch"
    ended = ranks(2).run(drawn, tmp_path / "ended", strategy, None, 3, timeout=500)
    assert ended == [own[:3] + own[4:] for own in both], "an epoch that ends early is followed by the next one"
