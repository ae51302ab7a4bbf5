"""The training loss: cross-entropy summed over the labelled tokens, in fp32, without the logits of a whole microbatch.

The head's gradient is computed together with its forward, a block of tokens at a time, and only at labelled positions.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear, log_softmax

from odc.errors import UnsupportedError
from odc.experiments.data.packing import IGNORED

_BLOCK_LOGITS = 1 << 24  # fp32 logits that exist at once: 64 MiB

# Config fields by which some models change their logits after the head.
_LOGIT_FIELDS = ("logit_scale", "logits_scaling")
_CAP_FIELD = "final_logit_softcapping"


def loss_scale(world_size: int, total_label_tokens: int) -> float:
    """Factor on each rank's summed loss by which FSDP's mean over ranks is the mean over all labels; 0 without any."""
    return world_size / total_label_tokens if total_label_tokens else 0.0


def token_loss_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    cap: float | None = None,
    block_logits: int = _BLOCK_LOGITS,
) -> Tensor:
    """Cross-entropy of `linear(hidden, weight, bias)` against `labels`, summed: a scalar, fp32, differentiable once.

    `hidden` is [..., width], `weight` [vocab, width] of the same dtype, `labels` int64 [...] with -100 for none, `bias`
    [vocab]; with `cap` logits are `cap * tanh(logits / cap)`. At most `block_logits` logits exist at once. Without any
    label the loss is 0 and gradients are zeros.
    """
    if not torch.is_grad_enabled():  # the forward would compute gradients all the same
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach() if bias is not None else None
    flat = hidden.reshape(-1, hidden.shape[-1])
    targets = labels.reshape(-1)
    where = (targets != IGNORED).nonzero().squeeze(-1)
    if where.numel() != targets.numel():
        flat, targets = flat.index_select(0, where), targets.index_select(0, where)
    block = max(1, block_logits // weight.shape[0])
    loss: Tensor = _BlockedLoss.apply(flat, weight, bias, targets, block, cap)  # type: ignore[no-untyped-call]
    return loss


class _BlockedLoss(torch.autograd.Function):
    """Loss and gradients block by block in the forward; backward only scales what is there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        block: int,
        cap: float | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], block):
            rows = hidden[start : start + block]
            target = targets[start : start + block]
            logits = linear(rows, weight, bias)
            bend = None
            if cap is not None:
                bent = (logits.float() / cap).tanh()
                bend = 1.0 - bent.square()
                logits = bent.mul_(cap)
            scores = log_softmax(logits, dim=-1, dtype=torch.float32)
            total -= scores.gather(1, target[:, None]).sum()
            if not any(wanted):
                continue
            # d loss / d logits = softmax(logits) - one_hot(target), in the scores' own memory.
            slope = scores.exp_()
            slope[torch.arange(len(target), device=target.device), target] -= 1.0
            if bend is not None:
                slope *= bend
            narrow = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[start : start + block])
            if grad_weight is not None:
                _add_product(grad_weight, narrow, rows)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
        ctx.save_for_backward(
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None and bias is not None else None,
        )
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Saved tensors are scaled out of place: a retained graph may run backward again.
        scaled = (None if saved is None else saved * grads[0].to(saved.dtype) for saved in ctx.saved_tensors)
        return (*scaled, None, None, None)


def _add_product(total: Tensor, slope: Tensor, rows: Tensor) -> None:
    if total.dtype == slope.dtype:
        total.addmm_(slope.t(), rows)
    else:
        total += torch.mm(slope.t(), rows)


def use_document_loss(model: Any) -> Any:
    """Makes `model(labels=..., ...)` return the summed loss of shifted labels instead of logits; returns the model.

    `model` is a transformers causal LM. Call it before `fully_shard`, so that the head's weight is gathered there.
    Raises UnsupportedError if logits change after the head other than by a cap, if the head is not one linear layer, or
    if the model has no base model below it.
    """
    if model.base_model is model:
        raise UnsupportedError(f"{type(model).__name__} has no base model that returns hidden states")
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise UnsupportedError(f"the head of {type(model).__name__} is not one linear layer")
    for name in _LOGIT_FIELDS:
        if getattr(model.config, name, None) not in (None, 1.0):
            raise UnsupportedError(f"{type(model).__name__} changes its logits after the head (config: {name})")
    model.forward = MethodType(_forward, model)
    return model


def _forward(model: Any, *args: Any, labels: Tensor | None = None, **inputs: Any) -> Any:
    if labels is None:
        return type(model).forward(model, *args, **inputs)
    head: Module = model.get_output_embeddings()
    hidden = model.base_model(*args, **inputs).last_hidden_state
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)
    return token_loss_sum(hidden, weight, labels, bias, cap=getattr(model.config, _CAP_FIELD, None))
