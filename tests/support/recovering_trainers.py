"""Hugging Face's Trainer, and a loop under Accelerate, in jobs that survive deaths: see `recovering`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

import odc
from odc import Settings
from odc.experiments.launch import launch
from odc.recovery.generations import Generations
from support.recovering import Death, Fate
from support.trainers import arguments, model, padded, samples

#: Two epochs of four steps of two microbatches. Losses are logged over steps, epochs and deaths.
CHANGES: dict[str, Any] = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "logging_steps": 3,
    "eval_strategy": "epoch",
    "save_strategy": "steps",
    "save_steps": 3,
    "lr_scheduler_type": "cosine",
}


def dropping() -> Any:
    """The small model, whose forwards draw random numbers."""
    net = model()
    for block in net.model.layers:
        block.self_attn.attention_dropout = 0.1
    return net


def train(
    folder: str, output: str, deaths: Collection[Death], changes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The program of a rank; returns what must be equal after any deaths."""
    from transformers import TrainerCallback

    from odc.integrations.transformers import OdcTrainer

    warnings.simplefilter("ignore")
    recovery = odc.Recovery(rejoin_s=120)
    fate = Fate(int(os.environ["RANK"]), deaths, Path(folder))
    args = arguments(Path(output), **(CHANGES | changes))

    class Dying(TrainerCallback):
        """Dies where its own `state` and `control` show the step; points are a callback's."""

        def on_log(self, *unused: Any, **given: Any) -> None:
            at("log")

        def on_evaluate(self, *unused: Any, **given: Any) -> None:
            at("evaluate")

        def on_save(self, *unused: Any, **given: Any) -> None:
            at("save")

        def on_epoch_begin(self, *unused: Any, **given: Any) -> None:
            at("epoch")

        def on_optimizer_step(self, *unused: Any, **given: Any) -> None:
            at("step")

    def at(point: str, *unused: Any) -> None:
        fate.step = trainer.state.global_step
        fate.at(point)

    stopping = options.pop("callbacks", [])
    given = {"train_dataset": samples(), "eval_dataset": samples()[:4], "data_collator": padded}
    settings = Settings(reproducible=True, timeout_s=60, check_protocol=True)
    trainer: Any = OdcTrainer(
        dropping(), args, recovery=recovery, settings=settings, callbacks=[Dying(), *stopping], **given, **options
    )
    forwards = [0]

    def forward(*unused: Any) -> None:
        forwards[0] += torch.is_grad_enabled()
        at("forward" if forwards[0] % 2 else "second forward")

    trainer.model.register_forward_pre_hook(forward)
    fate.watch(Generations, "finish", "finish")
    found = trainer.train()
    times = ("runtime", "per_second")
    history = [
        {name: value for name, value in one.items() if not name.endswith(times)} for one in trainer.state.log_history
    ]
    return result(trainer.model, trainer.optimizer, recovery) | {"history": history, "loss": found.training_loss}


def accelerated(folder: str, output: str, deaths: Collection[Death], *unused: Any) -> dict[str, Any]:
    """A loop of one's own under Accelerate; as `train`."""
    warnings.simplefilter("ignore")
    recovery = odc.Recovery(rejoin_s=120)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from odc.integrations.accelerate import OdcFsdpPlugin, RepeatableBatches

    fate = Fate(int(os.environ["RANK"]), deaths, Path(folder))
    settings = Settings(reproducible=True, timeout_s=60, check_protocol=True)
    wrapped: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
    wrapped["transformer_cls_names_to_wrap"] = ["Qwen2DecoderLayer"]
    plugin = OdcFsdpPlugin(settings=settings, **wrapped)
    seeded = DataLoaderConfiguration(use_seedable_sampler=True)
    made = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin, dataloader_config=seeded)
    net = dropping()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader: Any = torch.utils.data.DataLoader(samples(), batch_size=2, shuffle=True, collate_fn=padded)
    net, optimizer, schedule, loader = made.prepare(net, optimizer, schedule, loader)
    batches, losses = RepeatableBatches(made, loader), Losses()
    recovery.protect(net, optimizer, schedule=schedule, batches=batches, losses=losses)
    for step in recovery.steps(9):
        fate.step = step
        with recovery.attempt():
            for number, batch in enumerate(batches):
                with made.accumulate(net):
                    loss = net(**batch).loss
                    fate.at("second forward" if number else "forward")
                    made.backward(loss)
                    losses.all.append(float(loss.detach()))
                    if made.sync_gradients:
                        made.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if made.sync_gradients:
                    break
            fate.at("step")
    return result(net, optimizer, recovery) | {"history": losses.all, "loss": schedule.get_last_lr()}


class Losses:
    """Of every microbatch."""

    def __init__(self) -> None:
        self.all = list[float]()

    def state_dict(self) -> dict[str, Any]:
        return {"all": [*self.all]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all = state["all"]


def result(net: Any, optimizer: Any, recovery: odc.Recovery) -> dict[str, Any]:
    return {
        "weights": [parameter.to_local().detach().clone() for parameter in net.parameters()],
        "moments": [state["exp_avg_sq"].to_local().clone() for state in optimizer.state.values()],
        "random": torch.get_rng_state(),
        "seen": recovery.step,
        "recoveries": recovery.recoveries,
    }


def run(
    folder: Path, deaths: Collection[Death] = (), *, program: Any = train, changes: Any = None, **options: Any
) -> Any:
    """The job of two ranks, and what each returned."""
    (folder / "deaths").mkdir(parents=True)
    given = str(folder / "deaths"), str(folder / "output"), tuple(deaths), changes or {}, options
    return launch(program, *given, ranks=2, restarts=2 * len(deaths))
