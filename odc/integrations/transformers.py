"""Hugging Face's Trainer on `odc.fully_shard`: `OdcTrainer` in place of `Trainer`, nothing else changes.

Chose a subclass that shards the model itself and marks it as prepared, over accelerate's FSDP plugin: accelerate then
uses the model as it is, on CPU too, where that plugin is not to be had. The price is that checkpoints, for which a
Trainer asks accelerate, are written and read here. Ranks meet once an optimizer step; between the microbatches of
`gradient_accumulation_steps` nobody waits. All ranks still get as many samples: a Trainer's data loader deals them out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from odc.fsdp import fully_shard
from odc.integrations.units import units_of
from odc.settings import Settings

try:
    import accelerate  # noqa: F401  (a Trainer cannot be without it)
    from transformers import Trainer
except ImportError as error:
    raise ImportError("OdcTrainer needs transformers and accelerate: pip install 'odc-fsdp[transformers]'") from error

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def prepare(model: Any, *, blocks: str | Iterable[str] | None = None, **options: Any) -> Any:
    """Shard a Hugging Face model in place so that accelerate takes it as it is; for a loop of your own.

    Call it before `accelerator.prepare(model, optimizer, ...)`, and before the optimizer is made, on every rank.

    Args:
        model: a `PreTrainedModel`, the same weights on every rank.
        blocks: class names of its blocks, where the model does not say (`_no_split_modules`).
        options: of `fully_shard`, for every unit.
    """
    for unit in units_of(model, blocks):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    model._is_accelerate_prepared = True  # accelerate's own mark: not to be wrapped in DDP
    model.no_sync = lambda: _no_sync(model)  # what `accelerator.no_sync(model)` looks for
    return model


@contextlib.contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class OdcTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose model is sharded over the world with on-demand communication.

    Args:
        model, args: as of a Trainer; `fsdp` and `deepspeed` are not to be set. The model is sharded in place.
        blocks: class names of the model's blocks, where it does not name them itself.
        settings: of the runtime.
        options: as of a Trainer.

    On every rank, in a process group (torchrun). Saving and loading are collectives, which a Trainer calls on every
    rank anyway; a saved model and optimizer state are whole ones, written by one rank.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        blocks: str | Iterable[str] | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model=model, args=args, **options)
        self._kind = type(model)
        prepare(self.model, blocks=blocks, settings=settings)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model to `output_dir`, by one rank. On every rank."""
        weights = get_model_state_dict(self.model, options=_WHOLE)
        if self.args.should_save:
            folder = output_dir or self.args.output_dir
            self._save(folder, state_dict=weights)
            self.model.config.architectures = [self._kind.__name__]  # not the class that sharding has made of it
            self.model.config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=_WHOLE)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        weights = self._kind.from_pretrained(resume_from_checkpoint).state_dict()
        set_model_state_dict(model or self.model, weights, options=_WHOLE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = torch.load(Path(checkpoint) / "optimizer.pt", weights_only=True)
        set_optimizer_state_dict(self.model, self.optimizer.optimizer, state, options=_WHOLE)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))
