"""verl engines on `odc.fully_shard`: strategy `odc`, for language models and for value heads. For verl 0.9 only.

Subclasses of verl's FSDP engines replace how the module is sharded, the loop over microbatches, and what the model is
given of a row that runs in pieces; the rest stays verl's code. verl makes all ranks run equally many microbatches; here
each rank runs as many as its own samples need, and ranks meet once for each minibatch. Importing this module registers
the engines.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import fsdp2_load_full_state_dict
from verl.utils.metric import AggregationType, Metric
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from odc.balance import Cost, cost_of
from odc.balance.cost import VERL_WORKLOAD
from odc.errors import OdcError, UnsupportedError
from odc.fsdp import fully_shard, root_of
from odc.integrations.verl.config import options_of
from odc.integrations.verl.old_policy import teach_worker
from odc.integrations.verl.pieces import (
    RowPieces,
    cut,
    divide,
    inputs_of,
    refuse_batch,
    refuse_options,
    spread,
)
from odc.integrations.verl.published import PublishedReader, published_here
from odc.integrations.verl.rebalance import move_rows, owners_of, refuse_long, refuse_losses
from odc.integrations.verl.seqlen_balancing import rearrange_micro_batches, row_lengths
from odc.integrations.verl.units import units_of
from odc.split import SamplePiece, ranks_of_host

_log = logging.getLogger(__name__)
_DEVICES = ["cpu", "cuda"]  # odc.fully_shard refuses what it cannot shard


class OdcEngine(FSDPEngine):  # type: ignore[misc]
    """The parts of verl's `FSDPEngine` that odc replaces."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _correct_local_world_size()
        self._options = options_of(self.engine_config)
        offload = self.engine_config.param_offload
        if offload and self.engine_config.forward_only:  # fsdp2 overrules it there, too, by another way to offload
            _log.warning(
                "param_offload of a reference model has no effect under strategy odc: shards stay on the device"
            )
            self._is_offload_param = offload = False
        refused = {
            "param_offload": offload,
            "offload_policy": self.engine_config.offload_policy,
            "enable_activation_offload": self.model_config.enable_activation_offload,
            "mixed_precision.param_dtype=fp16": self._precision()[0] is torch.float16,
        }
        for name, wanted in refused.items():
            if wanted:
                raise UnsupportedError(f"strategy odc does not support {name}")
        self._rows: RowPieces | None = None
        self._piece: SamplePiece | None = None  # that a forward step is for
        self._published = PublishedReader(self._options.settings.timeout_s)  # for rollouts beside this rank
        if self._options.split:
            refuse_options(self.model_config, self.engine_config)

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **options: Any
    ) -> tuple[Any, Any]:
        """As verl's, which gathers each parameter on all ranks. Without adapters, quantization and NVSHMEM's memory a
        rank reads what all of them publish instead, in their compute dtype: no rank waits for another's rollout. Shards
        on several hosts are gathered too: each rank of a host would read the whole model over the network.
        """
        quantized, exported = getattr(self, "_qat_enabled", False), self._options.settings.memory == "driver"
        gathered = quantized or hasattr(self.module, "peft_config") or not exported
        if gathered or root_of(self.module).grid.shards_span_hosts:
            weights, adapter = super().get_per_tensor_param(layered_summon, base_sync_done, **options)
            return weights, adapter
        return published_here(self, self._published), None

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
        if self.engine_config.forward_only:  # a reference model, before it is sharded: no memory is kept for gradients
            module.requires_grad_(False)
        weights = module.state_dict()
        blocks = (self.engine_config.wrap_policy or {}).get("transformer_layer_cls_to_wrap")
        for unit in units_of(module, blocks, head_apart=not self.model_config.use_fused_kernels):
            fully_shard(unit, **options)
        fully_shard(module, **options)
        fsdp2_load_full_state_dict(module, weights, self.device_mesh)
        if self._options.split:
            keep = not self.model_config.enable_gradient_checkpointing
            self._rows = RowPieces(module, keep=keep, node=ranks_of_host(), timeout_s=self._options.settings.timeout_s)
        return module

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """One minibatch: any number of microbatches of this rank, then one wait for all ranks.

        A collective over the data-parallel ranks. Another rank than the one that passed a training row may compute it,
        so outputs are returned only where rows stay: with `forward_only` or `return_model_output`.
        """
        group, ranks = self.get_data_parallel_group(), self.get_data_parallel_size()
        keep = forward_only or tu.get_non_tensor_data(data, "return_model_output", default=False)
        mine = row_lengths(data), data["loss_mask"].sum().item()  # no whole number where tokens are weighted
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, mine, group=group)
        tokens = sum(count for _, count in gathered)
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size, batch_num_tokens=tokens, dp_size=ranks)
        if self._options.split and not keep:
            refuse_batch(data, loss_function)
        if not forward_only:
            refuse_losses(data, loss_function)
        data, pieces, (microbatches, indices) = self._divided(data, [lengths for lengths, _ in gathered], stay=keep)
        work = itertools.chain(pieces, zip(itertools.repeat(None), microbatches))
        outputs, weights = [], []
        with torch.no_grad() if forward_only else self.module.minibatch():
            for number, (self._piece, microbatch) in enumerate(work):
                with torch.profiler.record_function(f"micro_batch{number}"):
                    loss, output = self.forward_step(microbatch, loss_function=loss_function, forward_only=forward_only)
                    if not forward_only:
                        self.module.set_is_last_backward(self._piece is None and microbatch is microbatches[-1])
                        loss.backward()
                if not keep:
                    del output["model_output"]
                outputs.append(output)
                weights.append(float(microbatch["loss_mask"].sum()))
        metrics = collapse([output.pop("metrics") for output in outputs], weights, ranks / tokens if tokens else 0.0)
        return postprocess_batch_func(outputs, indices, data) | {"metrics": metrics}

    def _divided(self, data: Any, lengths: list[list[int]], *, stay: bool) -> Any:
        """The rows that this rank computes, its pieces, and (its microbatches, the row indices of each, or None)."""
        if not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            return data, (), prepare_micro_batches(data, same_micro_num_in_dp=False)
        together = tu.get_non_tensor_data(data, "force_group_size", default=1)
        cap, group = data["max_token_len_per_gpu"] * self.ulysses_sequence_parallel_size, self.get_data_parallel_group()
        if self._rows is not None and not stay:
            refuse_long(lengths, cap, pieces=self._rows.most(len(lengths)))
            plan = self._rows.plan(lengths, cap, self._cost)
            if plan is not None:
                self._rows.prepare(plan, cap)
                rows, microbatches = divide(data.to("cpu"), lengths, plan, group)
                return data, self._rows.of(plan, rows), (microbatches, None)
        refuse_long(lengths, cap, together)
        if self._options.rebalance and not stay:
            data = move_rows(data.to("cpu"), owners_of(lengths, self._cost, together), group)
        if not len(data):  # all rows of the minibatch are on other ranks
            return data, (), ([], None)
        return data, (), rearrange_micro_batches(data, cap, same_micro_num_in_dp=False, force_group_size=together)

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        """As verl's; in a forward step for a piece what the model takes for it."""
        if self._piece is None:
            return super().prepare_model_inputs(micro_batch)
        _, arguments = super().prepare_model_inputs(cut(self._piece, micro_batch))
        inputs, targets = inputs_of(self._piece, micro_batch)
        return inputs, arguments | {"input_ids_rmpad_rolled": targets}

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any) -> Any:
        """As verl's; of a piece, for the whole row, with zeros where the piece has no tokens."""
        logits_processor_func = _as_of_fsdp(logits_processor_func)
        if self._piece is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        part = cut(self._piece, micro_batch)
        found = super().prepare_model_outputs(output, output_args, part, logits_processor_func)
        return {name: spread(self._piece, micro_batch, one) for name, one in found.items()}

    @functools.cached_property
    def _cost(self) -> Cost:
        """FLOPs of a sample of the model, or verl's formula for models whose FLOPs odc cannot count."""
        sizes = self.model_config.hf_config.to_dict()
        if self.model_config.model_type == "value_model":
            sizes["vocab_size"] = 1
        checkpointing = self.model_config.enable_gradient_checkpointing
        return cost_of(sizes, checkpointing=checkpointing, otherwise=VERL_WORKLOAD)


def _as_of_fsdp(loss_function: Any) -> Any:
    """A loss with a configuration of strategy fsdp: by its strategy verl finds how logits are distilled.

    verl 0.9.0 does not know fsdp2 there.
    """
    config = getattr(loss_function, "keywords", {}).get("config")
    if getattr(config, "strategy", "") != "odc":
        return loss_function
    config = copy.copy(config)
    object.__setattr__(config, "strategy", "fsdp")  # verl freezes its configurations
    return functools.partial(loss_function, config=config)


def _correct_local_world_size() -> None:
    """Under Ray, verl's workers set LOCAL_WORLD_SIZE to 1; odc reads there how many ranks a host has."""
    if known := os.environ.get("RAY_LOCAL_WORLD_SIZE"):
        os.environ["LOCAL_WORLD_SIZE"] = known


def collapse(microbatches: Sequence[Mapping[str, Any]], weights: Sequence[float], scale: float) -> dict[str, Any]:
    """The metrics of this rank's microbatches, collapsed to one value each.

    verl merges the ranks' values microbatch by microbatch and raises if ranks had different numbers of them. A mean is
    weighted by tokens and scaled so that verl's mean over ranks is the mean over all tokens of the minibatch. A metric
    that a loss leaves out of some microbatches counts as 0 there.

    Args:
        microbatches: what the loss function returned for each: verl's `Metric`s, scalars, or lists of them.
        weights: predicted tokens of each microbatch.
        scale: data-parallel ranks / predicted tokens of all ranks; 0, which makes all means 0, if there is no token.

    Returns a `Metric` of the same aggregation, or for a plain number a list of one (verl's form): the largest or
    smallest if "max" or "min" is in the name, as verl reads names, else the mean.
    """
    found: dict[str, list[tuple[Any, float]]] = {}
    for metrics, weight in zip(microbatches, weights, strict=True):
        for name, value in metrics.items():
            found.setdefault(name, []).append((value, weight))
    return {name: _collapse_one(name, values, scale) for name, values in found.items()}


def _collapse_one(name: str, values: list[tuple[Any, float]], scale: float) -> Any:
    first = values[0][0]
    if isinstance(first, Metric):
        kind = first.aggregation
    else:
        kind = next((AggregationType(word) for word in ("max", "min") if word in name), AggregationType.MEAN)
    each = [(float(_as_metric(kind, value).aggregate()), weight) for value, weight in values]
    if kind is AggregationType.MEAN:
        whole = scale * sum(value * weight for value, weight in each if weight)  # a mean over no tokens may be nan
    else:
        whole = float(_as_metric(kind, [value for value, _ in each]).aggregate())
    return Metric(kind, whole) if isinstance(first, Metric) else [whole]


def _as_metric(kind: AggregationType, value: Any) -> Any:
    if isinstance(value, Metric):
        return value
    metric = Metric(kind)
    metric.extend(value if isinstance(value, list) else [value])
    return metric


@EngineRegistry.register("language_model", "odc", device=_DEVICES)
class OdcEngineWithLMHead(OdcEngine, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Language models: actor, reference, supervised fine-tuning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.engine_config.forward_only:
            _trained.add(self)
            teach_worker()


#: Language models that this process trains; verl makes one, and beside it a reference model or a critic.
_trained: weakref.WeakSet[OdcEngineWithLMHead] = weakref.WeakSet()


def actor_here() -> OdcEngineWithLMHead | None:
    """The engine of the language model that this process trains, if it trains one."""
    found = list(_trained)
    if len(found) > 1:
        raise OdcError(f"this process trains {len(found)} language models: which one rollouts get is not known")
    return found[0] if found else None


@EngineRegistry.register("value_model", "odc", device=_DEVICES)
class OdcEngineWithValueHead(OdcEngine, FSDPEngineWithValueHead):  # type: ignore[misc]
    """Critics."""
