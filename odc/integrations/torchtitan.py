"""torchtitan's stock trainer on odc: `with_odc(config)` gives it another function that shards the model.

Activation checkpointing and compilation are torchtitan's. Each block is a unit; embedding, last norm and head are the
root's, so that torchtitan's chunked loss may run the head alone, over and over, without ending a minibatch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from odc.errors import install, refuse_setting
from odc.fsdp import fully_shard
from odc.settings import Settings

try:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed.compile import apply_compile
except ImportError as error:
    raise ImportError(f"odc.integrations.torchtitan needs torchtitan: {install('torchtitan')}") from error


def with_odc(config: Any, settings: Settings | None = None) -> Any:
    """The same `Trainer.Config` of torchtitan, whose decoder is sharded by odc over all ranks, without CUDA graphs.

    Call it in your function of a config registry, and name that with `--module` and `--config`. Raises ConfigError for
    what odc cannot do, from here or, where the command line asks for it, when the trainer is made.
    """
    _refuse_parallelism(config.parallelism)
    sharding = functools.partial(parallelize, settings=settings)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, disable_cuda_graphs=True),
        model_spec=dataclasses.replace(config.model_spec, parallelize_fn=sharding),
    )


def parallelize(
    model: Any,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    settings: Settings | None = None,
) -> Any:
    """A `ModelSpec`'s `parallelize_fn`: shard a decoder on the meta device, in place."""
    _refuse_parallelism(parallelism)
    if training.enable_cpu_offload:
        refuse_setting("training.enable_cpu_offload", "leave it out; each rank holds its shard on its device")
    if not training.disable_cuda_graphs and torch.cuda.is_available():  # elsewhere torchtitan makes none
        refuse_setting("CUDA graphs", "set training.disable_cuda_graphs, as with_odc does")
    if not hasattr(model, "layers"):
        refuse_setting(f"sharding to {type(model).__name__}", "it is no decoder with layers")
    if torch.are_deterministic_algorithms_enabled():  # debug.deterministic
        settings = settings or Settings()
        if settings.sums_dtype != "accumulator":
            refuse_setting("debug.deterministic with rounded sums", 'leave it out, or sums_dtype="accumulator"')
        settings = dataclasses.replace(settings, reproducible=True)
    checkpointing = None if ac_config is None else ac_config.build(dump_folder=dump_folder)
    encoder = getattr(model, "vision_encoder", None)  # it stays in the root
    for stack in (model,) if encoder is None else (model, encoder):
        if checkpointing is not None:
            checkpointing.apply(stack)
        if compile_config.enable and "model" in compile_config.components:
            apply_compile(stack, compile_config=compile_config, parallel_dims=parallel_dims)
    replicated = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(replicated),
        "mp_policy": MixedPrecisionPolicy(
            TORCH_DTYPE_MAP[training.mixed_precision_param],
            TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "settings": settings,
    }
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never", **options)
    fully_shard(model, **options)
    for unit in (*model.layers.values(), model):
        unit.set_gradient_divide_factor(1.0)  # the trainer has divided each loss by the tokens of all ranks
    return model


def _refuse_parallelism(parallelism: Any) -> None:
    if parallelism.spmd_backend != "partial_dtensor":
        refuse_setting(f"parallelism.spmd_backend={parallelism.spmd_backend!r}", "set it to 'partial_dtensor'")
    for kind in ("tensor", "context", "pipeline", "expert"):
        if getattr(parallelism, f"{kind}_parallel_degree") > 1:
            refuse_setting(f"{kind} parallelism", "odc shards over all ranks; leave its degree at 1")
    if parallelism.enable_fsdp_symm_mem:
        refuse_setting("parallelism.enable_fsdp_symm_mem", "leave it out; there are no collectives")
