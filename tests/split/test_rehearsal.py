"""The check on first use: what it refuses that outputs alone do not show, and what it keeps as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import mixing_models as mixing
from support.on_ranks import on_ranks
from support.split_jobs import LONGEST, Minibatch, OwnModel, apart, losses_of, model_of, step_of
from torch import nn

from odc import MixedPrecisionPolicy, Settings, fully_shard
from odc.errors import UnsupportedError
from odc.split import Splitter, models
from odc.split.rehearsal import rehearse

OUTPUTS, GRADIENTS = "outputs that differ .* a sample of its own, or mixes", "gradients .* adds a gradient of its own"


def made(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype).train()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (mixing.BatchNorm, OUTPUTS),
        (mixing.ExpertChoice, OUTPUTS),
        (mixing.MeanOverTokens, OUTPUTS),
        (mixing.ZeroMix, OUTPUTS),
        (mixing.ZeroProjection, OUTPUTS),
        (mixing.AuxLoss, GRADIENTS),
    ],
)
def test_models_that_mix_over_the_batch_are_refused(kind: type[nn.Module], reason: str, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        rehearse(made(kind, dtype), 2, {})


@pytest.mark.parametrize("kind", [OwnModel, mixing.MixingModel])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_models_without_the_fault_pass(kind: type[nn.Module], dtype: torch.dtype) -> None:
    rehearse(made(kind, dtype), 2, {})


def test_a_layer_that_attends_twice_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedError, match="layer 0 attends more than once in a forward"):
        rehearse(made(mixing.Looped), 2, {})


def test_dropout_by_a_function_is_called_that() -> None:
    with pytest.raises(UnsupportedError, match=r"draws random numbers \(dropout or noise\)"):
        rehearse(made(mixing.Drops), 2, {})


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_check_leaves_nothing_behind(checkpoint: bool) -> None:
    """Weights, gradients, buffers and random numbers are bit for bit what they were, hooks of the check are gone."""
    model: Any = model_of("llama", checkpoint=checkpoint)
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda *_: model.calls.add_(1) and None)
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.randn_like(parameter)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    grads = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    state, hooks = torch.get_rng_state(), len(model.model.embed_tokens._forward_hooks)
    rehearse(model, models.layers_of(model), models.hook(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(model.model.embed_tokens._forward_hooks) == hooks
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)


# windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("phimoe", {"sliding_window": 100, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
        ("qwen2_moe", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3}),
    ],
)
def test_a_window_in_the_mask_only_is_refused(kind: str, more: dict[str, Any]) -> None:
    """It is longer than the sample of the check, in which it makes no difference."""
    model: Any = model_of(kind, num_key_value_heads=2, num_local_experts=4, num_experts=4, **more)
    with pytest.raises(UnsupportedError, match="layer 0 sees a window of 100 tokens, but it hands a window of all"):
        rehearse(model, models.layers_of(model), models.hook(model))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": False}),
        ("mistral", {"sliding_window": 100}),
        ("mistral", {"sliding_window": None}),
        ("qwen2_moe", {"sliding_window": 100, "use_sliding_window": False, "num_experts": 4}),
        ("gemma3_text", {"sliding_window": 100, "head_dim": 8}),
    ],
)
def test_windows_that_attention_is_given_pass(kind: str, more: dict[str, Any]) -> None:
    model: Any = model_of(kind, num_key_value_heads=2, **more)
    rehearse(model, models.layers_of(model), models.hook(model))


# sharded ----------------------------------------------------------------------------------------------------------


def sharded(param_dtype: torch.dtype | None = None, output_dtype: torch.dtype | None = None) -> Any:
    model: Any = model_of("llama")
    for unit in [*model.model.layers, model]:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, output_dtype=output_dtype if unit is model else None)
        fully_shard(unit, mp_policy=policy, settings=Settings(timeout_s=120.0))
    return model


@on_ranks(2)
def test_a_bf16_policy_with_fp32_output(rank: int, world: int, name: str) -> None:
    """The output is fp32, but all that the model computes is in bf16: so is the limit, and the gradients agree."""
    model, whole = sharded(torch.bfloat16, torch.float32), model_of("llama", torch.float32)
    splitter = Splitter(model, LONGEST, timeout_s=120.0, name=name)
    minibatch = Minibatch([(97, [0, 1], "zigzag")], [(20, 1)])
    before = [one.to_local().clone() for one in model.parameters()]
    splitter.prepare()
    model.reshard()  # as after any forward without a backward, the root is not
    assert all(torch.equal(one.to_local(), old) for one, old in zip(model.parameters(), before, strict=True))
    assert all(one.grad is None for one in model.parameters())
    with model.minibatch():
        loss = step_of(model, splitter, minibatch, rank, world)
    splitter.close()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        other.grad = one.grad.full_tensor()  # the mean over ranks, which `apart` sums
    gradients, losses = apart(whole, minibatch, model_of("llama", torch.float32), loss)
    assert gradients <= 0.2 and losses <= 1e-2, f"gradients {gradients:.1e}, loss {losses:.1e}"


@on_ranks(2)
def test_the_check_adds_nothing_to_an_open_minibatch(rank: int, world: int, name: str) -> None:
    """The check runs inside the first minibatch with pieces, where gradients have been pushed already."""
    grads = []
    for prepared in (True, False):
        model = sharded()
        splitter = Splitter(model, LONGEST, timeout_s=120.0, name=f"{name}.{prepared}")
        if prepared:
            splitter.prepare()
        with model.minibatch():
            for minibatch in (Minibatch([], [(30, 0), (20, 1)]), Minibatch([(97, [0, 1], "zigzag")])):
                for loss in losses_of(model, splitter, minibatch, rank, world):
                    loss.backward()
        grads.append(torch.cat([one.grad.to_local().flatten() for one in model.parameters()]))
        splitter.close()
        dist.barrier()
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)
