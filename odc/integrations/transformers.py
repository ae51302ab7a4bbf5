"""Hugging Face's Trainer over odc: a mixin, `class MyTrainer(OdcTrainer, Trainer)`, and nothing else to change.

Chose overriding three of the Trainer's methods (`create_optimizer`, `training_step`, `save_model`) over accelerate's
FSDP plugin: it needs no flag and runs on CPU too, where accelerate has no FSDP. The one thing of accelerate's that
would wrap the model, `Accelerator.prepare_model`, is replaced on the Trainer's own accelerator *instance*. Trainers
of trl and others that are subclasses of Trainer work the same way. On CUDA there is a way without this file: shard
the model with `odc.fully_shard` yourself and set `TrainingArguments(fsdp=True)`; accelerate leaves a sharded model
alone.

What it costs: all ranks run the same number of microbatches a step, because the Trainer counts them (their lengths may
differ: ranks meet once a step). Checkpoints hold the model only; resuming the optimizer is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from odc.errors import ConfigError
from odc.fsdp import fully_shard
from odc.settings import Settings


class OdcTrainer:
    """Mixin for `transformers.Trainer` and its subclasses; comes first among the bases.

    Shards the model in place when the optimizer is made: each block (`_no_split_modules`) is a unit, the rest another.
    Class attributes set what `fully_shard` gets; override them in the subclass:

        odc_settings: of the runtime.
        odc_options: other arguments of `fully_shard`, such as `mp_policy`. With `TrainingArguments(bf16=True)` and no
            policy here, parameters are computed in bf16 and gradients reduced in fp32.

    Raises ConfigError for arguments that odc cannot honour: an FSDP or DeepSpeed config beside it, checkpoints that
    would have to hold optimizer state, resuming from one.
    """

    odc_settings: Settings = Settings()
    odc_options: dict[str, Any] = {}  # noqa: RUF012  # a subclass replaces it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        this: Any = self
        _check(this.args)
        if this.is_fsdp_enabled or this.is_deepspeed_enabled:
            raise ConfigError("OdcTrainer shards the model itself: leave fsdp and deepspeed out of TrainingArguments")
        this.accelerator.prepare_model = lambda model, *_, **__: model  # of this instance: it would wrap it for DDP

    def create_optimizer(self, *args: Any) -> Any:
        """The Trainer's own optimizer, over the parameters of the model, which is sharded first. On every rank."""
        this: Any = self
        if not isinstance(this.model, torch.distributed.fsdp.FSDPModule):
            options = dict(self.odc_options)
            if this.args.bf16 and "mp_policy" not in options:
                policy = torch.distributed.fsdp.MixedPrecisionPolicy
                options["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in (*_blocks(this.model), this.model):
                fully_shard(block, settings=self.odc_settings, **options)
        return super().create_optimizer(*args)  # type: ignore[misc]

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """One microbatch. Gradients travel while it runs; ranks meet after the step's last one."""
        this: Any = self
        model.set_requires_gradient_sync(this.accelerator.sync_gradients)
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model in Hugging Face's format, written by the rank that saves. On every rank; ranks meet."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        this: Any = self
        state = get_model_state_dict(this.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if this.args.should_save:
            this._save(output_dir or this.args.output_dir, state_dict=state)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


def _check(arguments: Any) -> None:
    strategy = str(getattr(arguments.save_strategy, "value", arguments.save_strategy))
    if strategy != "no" and not arguments.save_only_model:
        raise ConfigError(
            "a Trainer's checkpoint would hold one rank's share of the optimizer: set save_only_model=True (models "
            "only), or save_strategy='no'; to resume bit for bit use `odc train` or torch's distributed checkpoints"
        )
    if arguments.resume_from_checkpoint:
        raise ConfigError("resuming is not supported: a checkpoint of OdcTrainer holds the model only")


def _blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The modules that transformers says must not be split, outermost first of none that lies in another."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(f"{type(model).__name__} does not say which modules are its blocks (_no_split_modules)")
    inside = {id(below) for block in blocks for below in block.modules() if below is not block}
    return [block for block in blocks if id(block) not in inside]
