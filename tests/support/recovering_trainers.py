"""Hugging Face's Trainers, and a loop under Accelerate, in jobs that survive deaths: see `recovering`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

import odc
from odc import Settings
from odc.experiments.data.bpe import ByteTokenizer
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
SETTINGS = Settings(reproducible=True, timeout_s=60, check_protocol=True)


def dropping(vocab: int = 60) -> Any:
    """The small model, whose forwards draw random numbers."""
    net = model(vocab)
    for block in net.model.layers:
        block.self_attn.attention_dropout = 0.1
    return net


def stock(folder: Path, changes: dict[str, Any], options: dict[str, Any]) -> Any:
    """An `OdcTrainer` on rows of tokens."""
    from odc.integrations.transformers import OdcTrainer

    given = {"train_dataset": samples(), "eval_dataset": samples()[:4], "data_collator": padded}
    return OdcTrainer(dropping(), arguments(folder, **changes), settings=SETTINGS, **given, **options)


def shortening(folder: Path, changes: dict[str, Any], options: dict[str, Any]) -> Any:
    """As `stock`, with a callback that ends the first epoch after two of its four steps."""
    from transformers import TrainerCallback

    class Shorten(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    trainer = stock(folder, changes, options)
    trainer.add_callback(Shorten())
    return trainer


def finetuning(folder: Path, changes: dict[str, Any], options: dict[str, Any]) -> Any:
    """TRL's SFTTrainer with the mixin."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcSFTTrainer(OdcTrainer, SFTTrainer): ...

    rank = os.environ["RANK"]  # each has a folder of its own, as nothing may wait for others before the loop
    ByteTokenizer().save(folder / f"tokenizer{rank}")
    given = {"train_dataset": Dataset.from_list(samples()), "eval_dataset": Dataset.from_list(samples()[:4])}
    given["processing_class"] = AutoTokenizer.from_pretrained(folder / f"tokenizer{rank}")
    args = arguments(folder, SFTConfig, bf16=False, **changes)
    return OdcSFTTrainer(dropping(ByteTokenizer.vocab_size), args, settings=SETTINGS, **given, **options)


def preferring(folder: Path, changes: dict[str, Any], options: dict[str, Any]) -> Any:
    """TRL's DPOTrainer with the mixin, and a reference model, which is sharded too."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcDPOTrainer(OdcTrainer, DPOTrainer): ...

    rank = os.environ["RANK"]
    ByteTokenizer().save(folder / f"tokenizer{rank}")
    texts = ["a", "on", "two", "four", "seven words and a few more", "nothing", "x" * 40, "end"] * 4
    rows = [{"prompt": f"{i}: ", "chosen": text, "rejected": text[::-1] + "!"} for i, text in enumerate(texts)]
    given = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:4])}
    given["processing_class"] = AutoTokenizer.from_pretrained(folder / f"tokenizer{rank}")
    args = arguments(folder, DPOConfig, bf16=False, **changes)
    given["ref_model"] = dropping(ByteTokenizer.vocab_size)
    return OdcDPOTrainer(dropping(ByteTokenizer.vocab_size), args, settings=SETTINGS, **given, **options)


def growing(folder: Path, changes: dict[str, Any], options: dict[str, Any]) -> Any:
    """TRL's GRPOTrainer with the mixin: two optimizer steps on what it generates, two epochs; it adapts its entropy."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from odc.integrations.transformers import OdcTrainer

    class OdcGRPOTrainer(OdcTrainer, GRPOTrainer): ...

    def reward(completion_ids: list[list[int]], **unused: Any) -> list[float]:
        return [sum(token % 2 for token in ids) / len(ids) - 0.01 * len(ids) for ids in completion_ids]

    rank = os.environ["RANK"]
    ByteTokenizer().save(folder / f"tokenizer{rank}")
    given: dict[str, Any] = {"train_dataset": Dataset.from_list([{"prompt": f"{i}: " * (i % 3 + 1)} for i in range(8)])}
    given["processing_class"] = AutoTokenizer.from_pretrained(folder / f"tokenizer{rank}")
    changes = changes | {"num_generations": 2, "max_completion_length": 8, "num_iterations": 2, "eval_strategy": "no"}
    changes |= {"use_adaptive_entropy": True, "entropy_target": 100.0, "entropy_coef_delta": 0.1}
    args = arguments(folder, GRPOConfig, bf16=False, **changes)
    net = dropping(ByteTokenizer.vocab_size)
    return OdcGRPOTrainer(net, args, reward_funcs=reward, settings=SETTINGS, **given, **options)


def train(
    folder: str,
    output: str,
    deaths: Collection[Death],
    made: Callable[[Path, dict[str, Any], dict[str, Any]], Any] = stock,
    changes: dict[str, Any] | None = None,
    resume: str | None = None,
    every: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """The program of a rank; returns what must be equal after any deaths. With `resume` "last" each process begins at
    the last checkpoint that it finds.
    """
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_utils import get_last_checkpoint

    warnings.simplefilter("ignore")
    recovery = odc.Recovery(rejoin_s=120, every=every)
    fate = Fate(int(os.environ["RANK"]), deaths, Path(folder))
    fate.step = 0
    forwards = [0]

    def at(point: str) -> None:
        fate.step = trainer.state.global_step
        fate.at(point)

    def forward(*unused: Any) -> None:
        forwards[0] += torch.is_grad_enabled()
        at("forward" if forwards[0] % 2 else "second forward")

    class Dying(TrainerCallback):
        """Its events are points."""

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

    options["callbacks"] = [Dying(), *options.get("callbacks", [])]
    trainer = made(Path(output), CHANGES | (changes or {}), options | {"recovery": recovery})
    trainer.model.register_forward_pre_hook(forward)
    fate.watch(Generations, "finish", "finish")
    fate.watch(odc.Recovery, "protect", "building")
    fate.watch(TrainerState, "save_to_json", "half saved")
    resume = get_last_checkpoint(output) if resume == "last" else resume
    loss = trainer.train(resume_from_checkpoint=resume).training_loss
    times = ("runtime", "per_second", "step_time")
    history = [
        {name: value for name, value in one.items() if not name.endswith(times)} for one in trainer.state.log_history
    ]
    return result(trainer.model, trainer.optimizer, recovery) | {"history": history, "loss": loss}


class Losses:
    """Of every microbatch."""

    def __init__(self) -> None:
        self.all = list[float]()

    def state_dict(self) -> dict[str, Any]:
        return {"all": [*self.all]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all = state["all"]


def accelerated(folder: str, output: str, deaths: Collection[Death]) -> dict[str, Any]:
    """A loop of one's own under Accelerate, of nine steps of two microbatches; otherwise as `train`."""
    warnings.simplefilter("ignore")
    recovery = odc.Recovery(rejoin_s=120)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from odc.integrations.accelerate import OdcFsdpPlugin, RepeatableBatches

    fate = Fate(int(os.environ["RANK"]), deaths, Path(folder))
    wrapped: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
    wrapped["transformer_cls_names_to_wrap"] = ["Qwen2DecoderLayer"]
    plugin = OdcFsdpPlugin(settings=SETTINGS, cpu=True, **wrapped)
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


def result(net: Any, optimizer: Any, recovery: odc.Recovery) -> dict[str, Any]:
    return {
        "weights": [parameter.to_local().detach().clone() for parameter in net.parameters()],
        "moments": [state["exp_avg_sq"].to_local().clone() for state in optimizer.state.values()],
        "random": torch.get_rng_state(),
        "seen": recovery.step,
        "recoveries": recovery.recoveries,
    }


def program_of(program: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return program(*given, **options)


def run(folder: Path, deaths: Collection[Death] = (), program: Callable[..., Any] = train, **options: Any) -> Any:
    """The job of two ranks, and what each returned."""
    for name in ("deaths", "output"):
        (folder / name).mkdir(parents=True)
    given = str(folder / "deaths"), str(folder / "output"), tuple(deaths)
    return launch(program_of, program, given, options, ranks=2, restarts=3 * len(deaths))
