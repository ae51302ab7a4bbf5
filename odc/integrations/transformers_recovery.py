"""`OdcTrainer(recovery=...)`: a Trainer that goes on from the last kept step when a rank is lost (docs/recovery.md).

A Trainer's loop cannot do a step again, but it can be resumed. So it is left, and entered again as it is with
`resume_from_checkpoint`, with what was kept in place of a checkpoint's files. A step is kept where the next one
begins: its logging, evaluation and saving are done then, and the samples of the next one are drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from odc.errors import ConfigError, OdcError, install, refuse_together
from odc.recovery import Recovery
from odc.recovery.state import random_states, set_random_states

try:
    from accelerate.state import AcceleratorState, PartialState, is_initialized
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(f"OdcTrainer needs transformers and accelerate: {install('transformers')}") from error

#: What the loop is made of, since transformers 5.
_LOOP = (
    *("_inner_training_loop", "_init_training_state", "_prepare_for_training", "_load_rng_state"),
    "_finalize_training",
)
_KEPT = "the last kept step"  # in place of a checkpoint's folder; there is no file in it
#: Attributes of a Trainer that a step changes, also of TRL's.
_CHANGED = (
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"),
    *("_initial_num_input_tokens_seen", "current_flos", "_metrics", "_total_train_tokens"),
    *("_step", "_buffered_inputs", "_current_train_step_time", "_pending_metrics"),  # of those that generate
    *("entropy_coef", "_last_world_entropy", "_entropy_window_stats"),  # of GRPO's
)


def refuse_unrepeatable(trainer: Any, max_tokens: int | None, split: bool) -> None:
    """Raise ConfigError if a Trainer's steps cannot be done again as they were."""
    args, sampling = trainer.args, trainer.args.train_sampling_strategy
    sampling = str(getattr(sampling, "value", sampling))
    ordered = {"random", "sequential"} | ({"group_by_length"} if max_tokens is not None else set())
    wrong = {
        "split=True": (split, "arenas do not outlive a rank; leave it out"),
        "a dataset without a length": (not hasattr(trainer.train_dataset, "__len__"), "use one that has a length"),
        f"train_sampling_strategy={sampling!r}": (sampling not in ordered, f"use one of {sorted(ordered)}"),
        "use_seedable_sampler=False": (not args.accelerator_config.use_seedable_sampler, "leave it True"),
        "ignore_data_skip=True": (args.ignore_data_skip, "leave it out"),
        "eval_on_start=True": (args.eval_on_start, "evaluate before train()"),
        "log_completions=True": (getattr(args, "log_completions", False), "leave it out"),
        "this transformers": (not all(hasattr(Trainer, name) for name in _LOOP), "use one from 5.10 on"),
    }
    refuse_together("recovery", wrong)


class _GoOn(Exception):
    """This process has taken another's place: the loop must be entered again at the step that was loaded."""


class TrainerLoop(TrainerCallback):  # type: ignore[misc]
    """What the loop of a Trainer has of its own, to be kept and put back; it keeps a step where the next one begins."""

    def __init__(self, trainer: Any, recovery: Recovery) -> None:
        self.trainer, self.recovery = trainer, recovery
        self.kept: dict[str, Any] | None = None  # to be put back as soon as the loop has come there
        self.over = False  # the last step is done
        self.first: int | None = None  # the step that the job begins at
        self.random: dict[str, Any] | None = None  # those of the checkpoint that the job begins at
        self.epoch, self.start = 0, 0  # that of the loop, and the step at which it began: a callback may end one early
        self.entered = False  # the loop, and no epoch since
        self.began = 0  # the epoch that the job begins in

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "changed": {name: getattr(trainer, name) for name in _CHANGED if hasattr(trainer, name)},
            "state": dict(vars(trainer.state)),
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
            "scheduler": trainer.lr_scheduler.state_dict(),
            "over": self.over,
            "first": self.first,
            "began": self.began,
            "epoch": (self.epoch, trainer.state.global_step - self.start),
            "checkpoint": self.random,
            "random": random_states(),
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.kept, self.first, self.began, self.random = kept, kept["first"], kept["began"], kept["checkpoint"]

    def enter(self, epoch: int, batches: int) -> None:
        """The loop begins with this epoch, of which so many batches are done."""
        steps = batches // self.trainer.args.gradient_accumulation_steps
        self.epoch, self.start, self.entered = epoch, self.trainer.state.global_step - steps, True

    def on_epoch_begin(self, *unused: Any, **given: Any) -> None:
        """Count it."""
        if not self.entered:
            self.epoch, self.start = self.epoch + 1, self.trainer.state.global_step
        self.entered = False

    def on_step_begin(self, *unused: Any, **given: Any) -> None:
        """The state after the step before: keep it; or put it back, if the loop has just been entered again."""
        if self.kept is not None:
            self.put_back()
        elif self.trainer.state.global_step > self.recovery.step:
            self.recovery.count()

    def put_back(self) -> None:
        """Everything but what the loop needs to come there (`resumed`)."""
        kept, self.kept = self.kept, None
        assert kept is not None
        vars(self.trainer).update(kept["changed"])
        if hasattr(self.trainer, "_last_loaded_step"):  # of TRL's that generate with vLLM, which has later weights now
            self.trainer._last_loaded_step = -1
        for callback, attributes in zip(self._callbacks(), kept["callbacks"], strict=True):
            vars(callback).update(attributes)
        self.over = kept["over"]
        set_random_states(kept["random"])

    def resumed(self, epochs: int) -> tuple[int, int]:
        """Put the Trainer's state back; epochs that are done, and batches of the next one."""
        assert self.kept is not None
        vars(self.trainer.state).update(self.kept["state"])
        if self.kept["over"]:
            return epochs, 0
        done, steps = self.kept["epoch"]
        return done, steps * self.trainer.args.gradient_accumulation_steps

    def prepared(self, checkpoint: str | None) -> None:
        """Model, optimizer and schedule are there, and the Trainer's state: protect them, at first.

        `checkpoint` is the one that they are from, if any.
        """
        trainer = self.trainer
        if self.first is None:
            self.first, self.began = trainer.state.global_step, self.epoch
            self.random = None if checkpoint is None else self._random_of(checkpoint)
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            reference = getattr(trainer, "ref_model", None)  # of TRL's: sharded, too
            models = [one for one in (trainer.model, reference) if isinstance(one, nn.Module)]
            self.recovery.protect(models, optimizer, first=self.first, loop=self)
            if self.kept is not None:
                raise _GoOn
        if self.kept is not None:
            trainer.lr_scheduler.load_state_dict(self.kept["scheduler"])
            if self.recovery.step == self.first:
                self.put_back()
        # A new process has been loading for seconds. If it ends in them, a rank in a collective might not notice.
        self.recovery.wait_for_all("loop")

    def load_random_states(self) -> None:
        """Those of the checkpoint that the job begins at, if the loop goes on from there.

        Those of a later step are put back where it begins.
        """
        if self.kept is None and self.random is not None:
            set_random_states(self.random)

    def _random_of(self, checkpoint: str) -> dict[str, Any] | None:
        """The states of random generators that the loop loads from a checkpoint; None if it has none for this rank."""
        before = random_states()
        self.trainer._load_rng_state(checkpoint)
        found = random_states()
        set_random_states(before)
        return None if torch.equal(found["torch"], before["torch"]) else found

    def _callbacks(self) -> list[Any]:
        """Those with a state, by class: a Trainer that reads them from a checkpoint has them in another order."""
        found = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        return sorted(found, key=lambda one: type(one).__name__)


@contextlib.contextmanager
def alone(recovery: Recovery | None) -> Iterator[None]:
    """In a process that takes another's place accelerate's barriers are passed at once: the others are beyond them."""
    if recovery is None or not recovery.generation:
        yield
        return
    vars(PartialState())["wait_for_everyone"] = lambda: None
    try:
        yield
    finally:
        for state in (PartialState, AcceleratorState) if is_initialized() else (PartialState,):
            vars(state()).pop("wait_for_everyone", None)  # one began as a copy of the other


class RecoveringTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose loop begins again at the last kept step when a rank is lost; as the Trainer's without `_loop`."""

    _loop: TrainerLoop | None = None

    def recover_by(self, recovery: Recovery) -> None:
        """Once, when the Trainer is made."""
        self._loop = TrainerLoop(self, recovery)
        self.add_callback(self._loop)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As the Trainer's; a process that takes another's place goes on from what was kept, whatever is given."""
        if self._loop is not None and self._loop.recovery.goes_on:
            resume_from_checkpoint = None
        return super().train(resume_from_checkpoint, *args, **options)

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        loop, again = self._loop, dict(options)
        if loop is None:
            return super()._inner_training_loop(*args, **options)
        if loop.first is not None:
            raise ConfigError("a Trainer with recovery trains once: make another for more")
        while True:
            try:
                with loop.recovery.repeatable():
                    return super()._inner_training_loop(*args, **again)
            except _GoOn:
                pass
            if again.get("resume_from_checkpoint") not in (None, _KEPT) and not loop.recovery.goes_on:
                raise OdcError("a rank has ended before it kept what the checkpoint holds, which all load together")
            again = options | {"resume_from_checkpoint": _KEPT}
            self._created_lr_scheduler = False  # the loop would make another one

    def _get_train_sampler(self, *given: Any) -> Any:
        """As the Trainer's; the order of TRL's sampler depends on the epochs that it has drawn."""
        sampler: Any = super()._get_train_sampler(*given)
        kept = None if self._loop is None else self._loop.kept
        if kept is not None and getattr(sampler, "shuffle", False):
            for _ in range(kept["epoch"][0] - kept["began"]):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        kept = self._loop is not None and checkpoint == _KEPT
        from_file = None if kept else checkpoint
        found: tuple[int, int] = super()._init_training_state(max_steps, steps_per_epoch, epochs, from_file, trial)
        if self._loop is not None:
            found = self._loop.resumed(epochs) if kept else found
            self._loop.enter(*found)
        return found

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._loop is None or checkpoint != _KEPT:
            super()._load_rng_state(checkpoint)
        else:
            self._loop.load_random_states()

    def _prepare_for_training(self, max_steps: int, loader: Any, checkpoint: str | None) -> Any:
        checkpoint = None if checkpoint == _KEPT else checkpoint
        prepared = super()._prepare_for_training(max_steps, loader, checkpoint)
        if self._loop is not None:
            self._loop.prepared(checkpoint)
        return prepared

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        if self._loop is not None:
            self._loop.over = True
            self._loop.on_step_begin()  # the last step is kept
            self._loop.recovery.finish()
        return super()._finalize_training(*args, **options)
