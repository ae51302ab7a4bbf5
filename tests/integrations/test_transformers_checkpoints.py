"""Checkpoints of a Trainer whose model has parameters without a gradient, or modules that its class does not make."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainers import Logged, arguments, as_torchrun, differences, logged, model, padded, samples

from odc.errors import ConfigError

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="needs transformers and accelerate: make test-integrations",
)


def made(ours: bool, folder: Path, net: Any, **changes: Any) -> Any:
    from transformers import Trainer

    from odc.integrations.transformers import OdcTrainer

    if not ours:
        changes["ddp_find_unused_parameters"] = True
    args = arguments(folder, save_strategy="steps", save_steps=1, **changes)
    data = {"train_dataset": samples(), "eval_dataset": samples()[:8], "data_collator": padded}
    return (OdcTrainer if ours else Trainer)(model=net, args=args, **data)


def late() -> Any:
    """A model whose class makes a module that its forward does not use."""
    from transformers import Qwen2ForCausalLM

    class Late(Qwen2ForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.late = torch.nn.Linear(32, 32, bias=False)
            self.post_init()

    torch.manual_seed(0)
    return Late(model().config)


def runs_of_late(rank: int, world: int, ours: bool, folder: Path, optim: str) -> list[Logged]:
    """Logged steps of a run whose module `late` is used from the third step on, and of the run resumed after two."""
    from transformers import TrainerCallback

    as_torchrun(rank, world)

    class Use(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            net = trainer.model
            if state.global_step == 2:
                net.model.norm.register_forward_hook(lambda module, inputs, output: output + net.late(output))

    runs = []
    for checkpoint in (None, str(folder / "checkpoint-2")):
        trainer = made(ours, folder, late(), optim=optim, max_steps=5)
        trainer.add_callback(Use())
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(logged(trainer))
    return runs


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_parameter_without_gradients_has_no_moments_in_a_resumed_run_either(ranks, tmp_path, optim: str) -> None:
    theirs = ranks(2).run(runs_of_late, False, tmp_path / "ddp", optim, timeout=500)[0]
    ours = ranks(2).run(runs_of_late, True, tmp_path / "odc", optim, timeout=500)[0]
    for found, stock in zip(ours, theirs, strict=True):
        assert len(found) == 5 and max(differences(found, stock)) < 1e-4, (found, stock)
    assert max(differences(theirs[1], theirs[0])) < 1e-4


def changed() -> Any:
    """A model with one module added and another replaced, which a new one of its class does not have."""
    net = model()
    other = copy.deepcopy(net.config)
    other.intermediate_size = 48
    net.model.layers[0].mlp = type(net.model.layers[0].mlp)(other)
    net.added = torch.nn.Linear(32, 32, bias=False)
    net.model.norm.register_forward_hook(lambda module, inputs, output: output + net.added(output))
    return net


def runs_of_changed(rank: int, world: int, ours: bool, folder: Path) -> list[Logged]:
    """Logged steps, and (twice) the loss of the best model, of a run and of the one resumed after its first step."""
    as_torchrun(rank, world)
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    best |= {"greater_is_better": True, "eval_strategy": "steps", "eval_steps": 1}  # the first, whose loss is largest
    runs = []
    for checkpoint in (None, str(folder / "checkpoint-1")):
        trainer = made(ours, folder, changed(), **best)
        trainer.train(resume_from_checkpoint=checkpoint)
        loss = trainer.evaluate()["eval_loss"]
        runs.append([*logged(trainer), (loss, loss)])
    return runs


def test_modules_that_were_added_or_replaced_are_resumed_and_loaded_as_the_best(ranks, tmp_path) -> None:
    theirs = ranks(2).run(runs_of_changed, False, tmp_path / "ddp", timeout=500)[0]
    ours = ranks(2).run(runs_of_changed, True, tmp_path / "odc", timeout=500)[0]
    for found, stock in zip(ours, theirs, strict=True):
        assert max(differences(found, stock)) < 1e-4, (found, stock)


def grown(rank: int, world: int, folder: Path) -> str:
    """The error of the rank that reads, of a checkpoint without a module that the model has by now."""
    from odc.integrations.transformers_checkpoints import weights_for

    as_torchrun(rank, world)
    made(True, folder, model(), max_steps=1).train()
    trainer = made(True, folder, changed())
    with pytest.raises(ConfigError) as refusal:
        weights_for(trainer.model, trainer._kind, str(folder / "checkpoint-1"))
    return str(refusal.value)


def test_weights_that_a_checkpoint_does_not_hold_are_named(ranks, tmp_path) -> None:
    for message in ranks(2).run(grown, tmp_path, timeout=500):
        assert "no weights of the model's shape for added.weight, model.layers.0.mlp.down_proj.weight" in message
