"""`OdcFsdpPlugin`: accelerate's FSDP2 plugin with odc underneath, also on CPU; a loop stays as it is.

`Accelerator.prepare` asks the plugin for its wrapping policy when the optimizer has given its parameters away, just
before it would shard the model itself. The plugin shards there, into the same units, and accelerate, which finds every
unit sharded, goes on as with FSDP2.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from odc.errors import ConfigError, install, refuse_setting
from odc.fsdp import OdcModule, fully_shard
from odc.integrations._generation import generate_alone
from odc.settings import Settings

try:
    from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
    from accelerate.state import AcceleratorState, PartialState, is_initialized
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils
    from accelerate.utils.other import get_module_children_bottom_up
except ImportError as error:
    raise ImportError(f"OdcFsdpPlugin needs accelerate: {install('transformers')}") from error


@dataclass
class OdcFsdpPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]
    """For `Accelerator(fsdp_plugin=...)`; make it first, in a process group or under torchrun.

    Its fields are those of accelerate's plugin with `fsdp_version=2`, and `settings` of odc's runtime. Without a CUDA
    device, or with `cpu=True`, it runs on CPU, where accelerate alone ignores its plugin and wraps the model in DDP; it
    makes accelerate's `PartialState` then. Raises ConfigError for what odc cannot do, here or, where the Accelerator
    asks for it, from `prepare`.
    """

    fsdp_version: int | None = None  # 2 is meant
    settings: Settings | None = None
    cpu: bool = False

    def __post_init__(self) -> None:
        self.fsdp_version = 2 if self.fsdp_version is None else self.fsdp_version
        super().__post_init__()
        self._refuse_fields()
        if is_initialized():
            refuse_setting("a plugin made after the Accelerator", "make OdcFsdpPlugin first")
        if not torch.distributed.is_initialized() and "LOCAL_RANK" not in os.environ:
            refuse_setting("a single process", "start it with torchrun or accelerate launch")
        self._announced: weakref.ref[nn.Module] | None = None
        self._policy = self.auto_wrap_policy
        if self.cpu or not torch.cuda.is_available():
            state = PartialState(cpu=True)
            # An AcceleratorState begins as a copy of this one, and reads plugins on accelerators only.
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, self

    def _refuse_fields(self) -> None:
        if self.fsdp_version != 2:
            refuse_setting(f"fsdp_version={self.fsdp_version}", "use fsdp_version=2")
        if isinstance(self.cpu_offload, CPUOffloadPolicy):
            refuse_setting("cpu_offload", "leave it out; each rank holds its shard on its device")
        if self.cpu_ram_efficient_loading:
            refuse_setting("cpu_ram_efficient_loading", "load the model on every rank")
        if self.activation_checkpointing_offload:
            refuse_setting("activation_checkpointing_offload", "use activation_checkpointing alone")
        policy = self.mixed_precision_policy
        if policy is not None and policy.param_dtype is torch.float16:
            refuse_setting("fp16", "there is no loss scaling; use bf16")

    def set_mixed_precision(self, mixed_precision: Any, *args: Any, **options: Any) -> None:
        """The Accelerator's `mixed_precision`; ConfigError for fp16 and fp8."""
        if mixed_precision in ("fp16", "fp8", torch.float16):
            refuse_setting(f"mixed_precision={mixed_precision!r}", "there is no loss scaling; use 'bf16'")
        super().set_mixed_precision(mixed_precision, *args, **options)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Called twice for a model: before checkpointing and compilation, and then to shard it."""
        if self._announced is not None and self._announced() is model:
            self._announced = None
            self._shard(model)
            self.auto_wrap_policy = None  # accelerate has nothing to wrap any more
            return
        self._refuse_state()
        self.auto_wrap_policy = self._policy
        super().set_auto_wrap_policy(model)
        self._announced = weakref.ref(model)
        _refuse_unsharded(model)

    def _refuse_state(self) -> None:
        state = AcceleratorState()
        if state.parallelism_config is not None:
            refuse_setting("parallelism_config", "leave it out; odc shards over all ranks")
        plugin = state.dynamo_plugin
        if plugin is not None and plugin.backend.value != "NO" and not plugin.use_regional_compilation:
            refuse_setting("compilation of the whole model", "use TorchDynamoPlugin(use_regional_compilation=True)")

    def _shard(self, model: nn.Module) -> None:
        """Shard into accelerate's units: wrapped modules, embedding, norm and head, and the rest as the root."""
        state = AcceleratorState()
        if state.mixed_precision != "no":
            self.set_mixed_precision(state.mixed_precision)  # keeps a policy that is there
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()  # as accelerate: the optimizer's copy is fp32
        options: dict[str, Any] = {
            "mesh": init_device_mesh(state.device.type, (state.num_processes,)),
            "mp_policy": self.mixed_precision_policy or MixedPrecisionPolicy(),
            "settings": self.settings,
        }
        if self.ignored_modules is not None:
            options["ignored_params"] = fsdp_utils.get_parameters_from_modules(
                self.ignored_modules, model, state.device
            )
        wanted = fsdp_utils.fsdp2_prepare_auto_wrap_policy(self, model)
        for module in get_module_children_bottom_up(model)[:-1] if wanted else ():
            if wanted(module) and not isinstance(module, FSDPModule):
                fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
        for unit, reshard in _ends(model):
            rest = [module for module in unit if module is not None and not isinstance(module, FSDPModule)]
            if rest:
                fully_shard(rest, reshard_after_forward=reshard and self.reshard_after_forward, **options)
        fully_shard(model, **options)
        generate_alone(model)


def _ends(model: Any) -> list[tuple[tuple[nn.Module | None, ...], bool]]:
    """What accelerate shards beside the wrapped modules, and whether it reshards it after forward."""
    first = getattr(model, "get_input_embeddings", lambda: None)()
    last = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(first, "weight", None)
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    children = base.children() if isinstance(base, nn.Module) else ()
    norm = ([None] + [child for child in children if "Norm" in type(child).__name__])[-1]
    if weight is not None and weight is getattr(last, "weight", None):
        return [((norm, first, last), False)]
    return [((first,), True), ((norm, last), False)]


def _refuse_unsharded(model: nn.Module) -> None:
    """An accelerate that never asks again would shard by itself: then the model's first forward is refused."""

    def check(module: nn.Module, *unused: Any) -> None:
        handle.remove()
        if not isinstance(module, OdcModule):
            raise ConfigError("this accelerate sharded the model without odc: use one that docs/transformers.md names")

    handle = model.register_forward_pre_hook(check)


def _repeatable_order(loader: Any) -> Any:
    """The sampler that decides on the order; ConfigError unless an epoch's is the same whenever it begins."""
    order = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    order = loader.sampler if order is None else order  # a loader without batches
    while not hasattr(order, "set_epoch"):
        if isinstance(order, (BatchSamplerShard, SkipBatchSampler)):
            order = order.batch_sampler
        elif type(order) is BatchSampler:
            order = order.sampler
        else:
            break
    ordered = hasattr(order, "set_epoch") or isinstance(order, (SequentialSampler, Sequence))
    drawn = isinstance(order, RandomSampler) and not ordered
    if drawn or getattr(loader, "synchronized_generator", None) is not None:
        refuse_setting("recovery to this order of samples", "use DataLoaderConfiguration(use_seedable_sampler=True)")
    if not (ordered or isinstance(loader.dataset, IterableDataset)):
        refuse_setting(
            f"recovery to the order of {type(order).__name__}", "give it set_epoch(), which alone decides it"
        )
    return order


class RepeatableBatches:
    """The batches of a prepared loader, epoch after epoch without end, from a place that recovery keeps.

        batches = RepeatableBatches(accelerator, loader)
        recovery.protect(model, optimizer, scheduler=scheduler, batches=batches)

    Going back skips what was drawn of the epoch; collators that draw random numbers draw others then. `loader` has a
    length. ConfigError if its order may depend on what was drawn before: neither the dataset's own, nor that of a
    sampler with `set_epoch`.
    """

    def __init__(self, accelerator: Any, loader: Any) -> None:
        self._order = _repeatable_order(loader)
        self.epoch = self.drawn = 0  # batches of this epoch
        self._accelerator, self._loader = accelerator, loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> RepeatableBatches:
        return self

    def __next__(self) -> Any:
        if self._iterator is not None and self.drawn == len(self._loader):
            next(self._iterator, None)  # accelerate notes its end there
            self._iterator = None
        if self.drawn == len(self._loader):
            self.epoch, self.drawn = self.epoch + 1, 0
        again = self._iterator is None and self.drawn > 0
        # A loader draws a seed when it begins. One that begins again must not: that draw is in what was put back.
        with torch.random.fork_rng([], enabled=again):
            if self._iterator is None:
                self._loader.set_epoch(self.epoch)
                rest = self._loader
                if again:
                    rest = self._accelerator.skip_first_batches(self._loader, self.drawn)
                    rest.set_epoch(self.epoch)  # before accelerate 1.15 it begins with epoch 0
                if hasattr(self._order, "set_epoch"):  # accelerate does not reach every batch sampler
                    self._order.set_epoch(self.epoch)
                self._iterator = iter(rest)
            batch = next(self._iterator)
        self.drawn += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "drawn": self.drawn, "accumulated": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.drawn, self._accelerator.step = state["epoch"], state["drawn"], state["accumulated"]
        self._iterator = None
