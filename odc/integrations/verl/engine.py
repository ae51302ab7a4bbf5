"""verl engines on `odc.fully_shard`: strategy `odc`, for language models and for value heads.

Chose to subclass verl's FSDP engine and replace two things, how the module is sharded and the loop over microbatches.
Loss, clipping, optimizer, checkpoints and export stay verl's code, because an odc module is an `FSDPModule` with
DTensor parameters. verl makes all ranks run as many microbatches; here each runs as many as its own samples need, and
ranks meet once a minibatch. The price is a tie to verl's internals, so this is for verl 0.9 only.

Importing this module registers the engines; verl does it through the entry point (`odc.integrations.verl.plugin`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import fsdp2_load_full_state_dict
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from odc.balance import Cost, cost_from_config
from odc.errors import PlanError, UnsupportedError
from odc.fsdp import fully_shard
from odc.integrations.units import units_of
from odc.integrations.verl.config import options_of
from odc.integrations.verl.metrics import collapse
from odc.integrations.verl.rebalance import move_rows, owners_of, refuse_long
from odc.integrations.verl.seqlen_balancing import WORKLOAD, rearrange_micro_batches, row_lengths

_DEVICES = ["cpu", "cuda"]  # where odc.fully_shard cannot shard, it says so


class OnDemand(FSDPEngine):  # type: ignore[misc]
    """The parts of verl's `FSDPEngine` that are replaced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = options_of(self.engine_config)
        refused = {
            "param_offload": self.engine_config.param_offload,
            "offload_policy": self.engine_config.offload_policy,
            "enable_activation_offload": self.model_config.enable_activation_offload,
            "mixed_precision.param_dtype=fp16": self._precision()[0] is torch.float16,
        }
        for name, wanted in refused.items():
            if wanted:
                raise UnsupportedError(f"strategy odc does not support {name}")

    def _precision(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of compute and of reduction, with verl's defaults."""
        given = self.engine_config.mixed_precision or {}
        names = given.get("param_dtype", "bf16"), given.get("reduce_dtype", "fp32")
        return PrecisionType.to_dtype(names[0]), PrecisionType.to_dtype(names[1])

    def _build_fsdp_module(self, module: Any) -> Any:
        """Shard as verl's strategy fsdp2 does: each block, embedding and head a unit, then load rank 0's weights."""
        param_dtype, reduce_dtype = self._precision()
        self._autocast_dtype, self.scaler = param_dtype, None
        options: dict[str, Any] = {
            "mesh": self.device_mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=True),
            "reshard_after_forward": self.engine_config.reshard_after_forward,
            "settings": self._options.settings,
        }
        weights = module.state_dict()
        blocks = (self.engine_config.wrap_policy or {}).get("transformer_layer_cls_to_wrap")
        for unit in units_of(module, blocks):
            fully_shard(unit, **options)
        fully_shard(module, **options)
        fsdp2_load_full_state_dict(module, weights, self.device_mesh)
        return module

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """One minibatch: this rank's microbatches, as many as they are, then one meeting of all ranks.

        A collective over the data-parallel ranks. Training rows may be computed on another rank than the one that
        passed them, so outputs are returned only where rows stay: with `forward_only` or `return_model_output`.
        """
        group, ranks = self.get_data_parallel_group(), self.get_data_parallel_size()
        keep = forward_only or tu.get_non_tensor_data(data, "return_model_output", default=False)
        mine = row_lengths(data), int(data["loss_mask"].sum())
        told: list[Any] = [None] * ranks
        dist.all_gather_object(told, mine, group=group)
        tokens = sum(count for _, count in told)
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size, batch_num_tokens=tokens, dp_size=ranks)
        data, (microbatches, indices) = self._divided(data, [lengths for lengths, _ in told], stay=keep)
        outputs, weights = [], []
        with torch.no_grad() if forward_only else self.module.minibatch():
            for number, microbatch in enumerate(microbatches):
                with torch.profiler.record_function(f"micro_batch{number}"):
                    loss, output = self.forward_step(microbatch, loss_function=loss_function, forward_only=forward_only)
                    if not forward_only:
                        loss.backward()
                if not keep:
                    del output["model_output"]
                outputs.append(output)
                weights.append(float(microbatch["loss_mask"].sum()))
        metrics = collapse([output.pop("metrics") for output in outputs], weights, ranks / tokens if tokens else 0.0)
        return postprocess_batch_func(outputs, indices, data) | {"metrics": metrics}

    def _divided(self, data: Any, lengths: list[list[int]], *, stay: bool) -> Any:
        """The rows that this rank computes, and (its microbatches, the rows of each or None)."""
        if not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            return data, prepare_micro_batches(data, same_micro_num_in_dp=False)
        together = tu.get_non_tensor_data(data, "force_group_size", default=1)
        cap = data["max_token_len_per_gpu"] * self.ulysses_sequence_parallel_size
        refuse_long(lengths, cap, together)
        if self._options.rebalance and not stay:
            owners = owners_of(lengths, self._cost(), together)
            data = move_rows(data.to("cpu"), owners, self.get_data_parallel_group())
        return data, rearrange_micro_batches(data, cap, same_micro_num_in_dp=False, force_group_size=together)

    def _cost(self) -> Cost:
        """FLOPs of a sample of the model; by verl's formula for models that odc cannot count."""
        sizes = self.model_config.hf_config.to_dict()
        if self.model_config.model_type == "value_model":
            sizes["vocab_size"] = 1
        try:
            return cost_from_config(sizes, checkpointing=self.model_config.enable_gradient_checkpointing)
        except PlanError:
            return WORKLOAD


@EngineRegistry.register("language_model", "odc", device=_DEVICES)
class OdcEngineWithLMHead(OnDemand, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Language models: actor, reference, supervised fine-tuning."""


@EngineRegistry.register("value_model", "odc", device=_DEVICES)
class OdcEngineWithValueHead(OnDemand, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critics."""
