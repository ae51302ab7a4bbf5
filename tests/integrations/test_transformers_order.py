"""The samples of each planned step of a Trainer, on two CPU ranks, by the epoch that it belongs to."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.trainers import arguments, as_torchrun, model, padded, samples

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)
LONG = [60, 22, 22, 22] * 4


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
