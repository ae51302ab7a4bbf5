"""What of a Trainer's arguments and an Accelerator's settings is refused under odc; all else the Trainer applies.

A field of a newer transformers is refused if its name has a word of `SHARDING` and it is set.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc.errors import refuse_setting
from odc.settings import Settings

#: Fields that are refused when set, and what to use instead.
REFUSED = {
    "auto_find_batch_size": "ranks would choose different sizes; set per_device_train_batch_size",
    "bf16_full_eval": "evaluation computes as training does; use bf16=True",
    "ddp_broadcast_buffers": "buffers stay local to each rank; leave it unset",
    "deepspeed": "use transformers.Trainer for DeepSpeed",
    "enable_jit_checkpoint": "ranks would save at different steps; set save_steps",
    "fp16": "there is no loss scaling; use bf16=True",
    "fp16_full_eval": "evaluation computes as training does; use bf16=True",
    "fsdp": "OdcTrainer shards the model itself; leave it out",
    "fsdp_config": "OdcTrainer shards the model itself; use its arguments blocks and settings",
    "liger_kernel_config": "apply Liger's kernels to the model before you pass it",
    "optim_target_modules": "GaLore and APOLLO need whole matrices; leave it out",
    "parallelism_config": "odc shards over all ranks; use transformers.Trainer for other parallelism",
    "save_on_each_node": "rank 0 alone has the whole model; save to a folder that every node sees",
    "use_liger_kernel": "apply Liger's kernels to the model before you pass it",
}

#: Fields of TRL's configurations that are refused when set, and what to use instead. Its others are applied by TRL.
REFUSED_OF_TRL = {
    "precompute_ref_log_probs": "it runs the model before it is sharded; leave it out",
    "sync_ref_model": "the reference keeps the weights it was sharded with; leave it out",
    "use_transformers_continuous_batching": "it casts and moves the sharded model; leave it out",
    "use_transformers_paged": "it casts and moves the sharded model; leave it out",
}

#: Words in the names of fields that shard a model or choose a precision, which odc does.
SHARDING = frozenset({"deepspeed", "fp16", "fp8", "fsdp", "megatron", "offload", "parallel", "parallelism", "shard"})

#: Values of `optim` that update every element by itself, so that each rank can update its shard.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


def refuse_arguments(args: Any) -> None:
    """Raise ConfigError naming the first of a Trainer's arguments that odc can neither apply nor ignore.

    `args` is a `transformers.TrainingArguments`, or an instance of a subclass, of whose further fields TRL's are known.
    """
    from transformers import TrainingArguments

    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    newer = {name: "odc does not know this argument; leave it out" for name in fields if SHARDING & {*name.split("_")}}
    for name, instead in (newer | REFUSED | REFUSED_OF_TRL).items():
        if value := getattr(args, name, None):
            refuse_setting(f"{name}={value!r}", instead)
    if getattr(args, "use_vllm", False) and (mode := getattr(args, "vllm_mode", None)) != "server":
        refuse_setting(
            f"use_vllm=True with vllm_mode={mode!r}", 'it would load shards; use vllm_mode="server" (docs/rl.md)'
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in OPTIMIZERS:
        refuse_setting(f"optim={optimizer!r}", f"use one of {', '.join(OPTIMIZERS)}, or optimizer_cls_and_kwargs")
    if (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        refuse_setting("sync_each_batch=True", "ranks meet once an optimizer step; leave it out")


def settings_for(args: Any, settings: Settings | None) -> Settings | None:
    """The runtime's settings, reproducible for `full_determinism`. Raises ConfigError if `settings` contradict it."""
    if not args.full_determinism:
        return settings
    if settings is None:
        return Settings(reproducible=True)
    if not settings.reproducible:
        refuse_setting("full_determinism=True", "it needs settings=odc.Settings(reproducible=True)")
    return settings


@dataclasses.dataclass(frozen=True)
class AcceleratorOptions:
    """What an Accelerator would do to a model; `odc.integrations.transformers.prepare` does it instead.

    `precision` is "no" or "bf16"; `compiled` holds keyword arguments of `torch.compile`, None without compilation.
    """

    precision: str = "no"
    compiled: dict[str, Any] | None = None

    @staticmethod
    def known() -> bool:
        """Whether this process has made an Accelerator."""
        from accelerate.state import is_initialized

        return bool(is_initialized())

    @classmethod
    def current(cls) -> AcceleratorOptions:
        """The options of this process's Accelerator, if any. ConfigError for fp16, fp8 and other sharding."""
        from accelerate.state import AcceleratorState

        if not cls.known():
            return cls()
        state = AcceleratorState()
        for plugin in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"):
            if getattr(state, plugin, None) is not None:
                refuse_setting(f"the Accelerator's {plugin}", "odc shards the model; make an Accelerator without it")
        if state.mixed_precision not in ("no", "bf16"):
            refuse_setting(f"mixed_precision={state.mixed_precision!r}", "there is no loss scaling; use 'bf16'")
        plugin = state.dynamo_plugin
        if plugin is None or plugin.backend.value == "NO":
            return cls(state.mixed_precision)
        return cls(state.mixed_precision, plugin.to_kwargs())

    @classmethod
    def mesh(cls) -> DeviceMesh | None:
        """All ranks, on the Accelerator's device; None if this process has made none."""
        from accelerate.state import AcceleratorState

        if not cls.known():
            return None
        state = AcceleratorState()
        return init_device_mesh(state.device.type, (state.num_processes,))

    def policy(self, *, root: bool) -> MixedPrecisionPolicy | None:
        """Mixed precision of a unit, if any. In bf16 the root returns fp32, as under an Accelerator."""
        if self.precision == "no":
            return None
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32 if root else None)

    def compile(self, block: nn.Module) -> None:
        """Compile a block in place, if the Accelerator would. Call it before the block is sharded."""
        if self.compiled is not None:
            block.compile(**self.compiled)


def keep_labels(model: nn.Module) -> None:
    """Have arguments of forward whose names have "label", and the count of targets, come as they are: torch's policy
    would cast them to bf16. Rounded labels are other targets, and the loss is divided by the count, a float in
    transformers 5.23. Call it after the root is sharded.
    """
    kept: list[dict[str, Any]] = []  # of the forwards in progress

    def take(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        named = [name for name in options if "label" in name or name == "num_items_in_batch"]
        kept.append({name: options.pop(name) for name in named})
        return args, options

    def give(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        return args, options | kept.pop()

    model.register_forward_pre_hook(take, prepend=True, with_kwargs=True)  # before torch's, which casts
    model.register_forward_pre_hook(give, with_kwargs=True)
