"""A parameter may set the dtype of its gradient: `Tensor.grad_dtype`, heeded by FSDP2 from torch 2.15 on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import own_gradients, own_parameters
from support.programs import Compared, Make, Programs, Result
from support.ranks import Pools
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"), reason=f"FSDP2 of torch {torch.__version__} ignores grad_dtype"
)

programs = Programs()


def one_step(
    make: Make,
    rank: int,
    dtype: torch.dtype,
    kept: torch.dtype | None,
    policy: MixedPrecisionPolicy,
    only: str = "",
) -> Result:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).to(dtype)
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.grad_dtype = kept
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        make(layer, mesh=mesh, mp_policy=policy)
    make(model, mesh=mesh, mp_policy=policy)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).to(policy.param_dtype or dtype)
    model(x).float().logsumexp(-1).sum().backward()
    gradients = own_gradients(model)
    assert all(grad is not None for grad in gradients.values())
    return {**{f"gradient of {name}": grad for name, grad in gradients.items()}, **own_parameters(model)}


@programs.add
def bf16_parameters_with_fp32_gradients(make: Make, rank: int, world: int) -> Result:
    found = one_step(make, rank, torch.bfloat16, torch.float32, MixedPrecisionPolicy())
    assert {grad.dtype for name, grad in found.items() if "gradient" in name and grad is not None} == {torch.float32}
    return found


@programs.add
def fp32_parameters_with_gradients_of_any_dtype(make: Make, rank: int, world: int) -> Result:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return one_step(make, rank, torch.float32, None, policy)


@programs.add
def bf16_computation_without_a_reduce_dtype(make: Make, rank: int, world: int) -> Result:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return one_step(make, rank, torch.float32, torch.float32, policy)


@programs.add
def a_gradient_of_any_dtype_beside_fp32_ones(make: Make, rank: int, world: int) -> Result:
    """A group is reduced in one dtype, which the gradient then keeps, though it was computed in bf16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = one_step(make, rank, torch.float32, None, policy, only="weight")
    assert {grad.dtype for name, grad in found.items() if "gradient" in name and grad is not None} == {torch.float32}
    return found


@programs.add
def biases_that_are_computed_with_in_fp32(make: Make, rank: int, world: int) -> Result:
    """A policy may leave single parameters in their own dtype: a unit is then gathered in two dtypes."""

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        return parameter.dtype if parameter.ndim == 1 else None

    options: Any = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "param_dtype_override_fn": override}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return one_step(make, rank, torch.float32, torch.float32, MixedPrecisionPolicy(**options))


@programs.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Compared) -> None:
    ranks(2).run(program)
