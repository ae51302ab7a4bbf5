"""The loss of a Trainer with `max_tokens`: what it must be, and how router losses are weighted.

The losses of a step's microbatches are added up, over ranks with unequal numbers of them. So each must be a sum over
targets divided by `num_items_in_batch`, the targets of all ranks; a mean over a microbatch would count once for each
microbatch that the plan happens to make. The router loss of a mixture of experts is such a mean: it gets a weight.
"""

from __future__ import annotations

import copy
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from odc.errors import ConfigError, refuse_together

_STOCK = "transformers.trainer"
_SFT = "trl.trainer.sft_trainer"
_METRICS = ("_metrics", "_total_train_tokens")  # of that, which computing a loss adds to
_APART = 1e-2  # of a loss that is divided by the count: rounding is far below, a mean is off by the whole of it


def refuse_unplanned(trainer: Any, max_tokens: int) -> None:
    """Raise ConfigError if a Trainer's loss or arguments do not allow ranks to have unequal microbatches."""
    args = trainer.args
    wrong = {
        "gradient_accumulation_steps": (args.gradient_accumulation_steps != 1, "set it to 1; the plan counts"),
        "average_tokens_across_devices": (not args.average_tokens_across_devices, "leave it True"),
        "include_num_input_tokens_seen": (args.include_num_input_tokens_seen != "no", "leave it out"),
        "split_batches": (args.accelerator_config.split_batches, "leave it out; the plan divides the samples"),
        "dispatch_batches": (args.accelerator_config.dispatch_batches, "leave it out; each rank loads its own"),
        "train_sampling_strategy='batch_rebalance'": (
            str(getattr(args, "train_sampling_strategy", "")).endswith("batch_rebalance"),
            "use 'random', 'sequential' or 'group_by_length'",
        ),
        f"the loss of {type(trainer).__name__}": (
            _is_a_mean(trainer) or not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func),
            "it is a mean over a microbatch; leave max_tokens out",
        ),
        f"compute_loss of {type(trainer).__name__}": (
            has_own_loss(trainer) and not _declares_scaled(trainer),
            "set loss_is_scaled_for_ga = True in its class if it is ranks x a sum over targets / num_items_in_batch",
        ),
    }
    refuse_together(f"max_tokens={max_tokens}", wrong)


def _is_a_mean(trainer: Any) -> bool:
    """Whether a trainer declares so, or a class of TRL has a loss of its own, as for preferences; transformers 5.19."""
    theirs = [one for one in type(trainer).__mro__ if one.__module__.partition(".")[0] == "trl"]
    declared = any(vars(one).get("loss_is_scaled_for_ga") is not None for one in theirs)
    return declared or getattr(trainer, "loss_is_scaled_for_ga", None) is False


def has_own_loss(trainer: Any) -> bool:
    """Whether `compute_loss` is neither the stock Trainer's nor that of TRL's SFTTrainer."""
    return trainer.compute_loss.__module__ not in (_STOCK, _SFT)


def _declares_scaled(trainer: Any) -> bool:
    """Whether the class that defines `compute_loss` declares, in transformers' way, that a batch's loss is no mean."""
    owner = next(one for one in type(trainer).__mro__ if "compute_loss" in vars(one))
    return vars(owner).get("loss_is_scaled_for_ga") is True and owner.__module__.partition(".")[0] != "trl"


class RouterLoss:
    """The router loss of one microbatch: a context for one forward and backward.

    A model adds coefficient x `aux_loss` to its loss, and a Trainer may scale that. The gradient that comes to
    `aux_loss` is the product of both, so that neither needs to be known: it is multiplied by `weight`.

    Args:
        model: the root, whose output has `aux_loss` where the model has a router loss.
        weight: ranks x tokens of the microbatch / tokens of the step, on all ranks.
        wanted: the configuration asks for a router loss. ConfigError if the output has none then.
    """

    def __init__(self, model: nn.Module, weight: float, *, wanted: bool) -> None:
        self._model, self._weight, self._wanted = model, weight, wanted
        self.counted: Tensor | float = 0.0  # what the loss that the model returned has of it
        self._handle: Any = None

    def __enter__(self) -> RouterLoss:
        # Before any hook that casts the output: the loss was computed from what the model returned.
        self._handle = self._model.register_forward_hook(self._after_forward, prepend=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        loss = getattr(output, "aux_loss", None)
        if not isinstance(loss, Tensor):
            if self._wanted:
                raise ConfigError(
                    f"odc cannot apply max_tokens with the router loss of {type(module).__name__}: its output has no "
                    "aux_loss; set output_router_logits=False"
                )
            return
        if loss.requires_grad:
            value = loss.detach()
            loss.register_hook(lambda grad: self._weigh(grad, value))

    def _weigh(self, grad: Tensor, value: Tensor) -> Tensor:
        self.counted = self.counted + grad * value
        return grad * self._weight

    @property
    def missing(self) -> Tensor | float:
        """What has to be added to the loss that the model returned, after its backward."""
        return self.counted * (self._weight - 1)


def wants_router_loss(trainer: Any) -> bool:
    """Whether the model's configuration, or TRL, asks for router losses."""
    config: Any = getattr(trainer.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    asked = any(getattr(one, "output_router_logits", False) for one in (config, text))
    return bool(asked or getattr(trainer, "aux_loss_enabled", False))


class ScaledLoss:
    """The check on the first microbatch with targets: twice the count must give half of the loss.

    It sees what a class does not declare: models that accept `num_items_in_batch` and ignore it (all for classification
    of sequences), and losses of one's own. It costs one forward without gradients.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # That of TRL's SFTTrainer is known. With labels smoothed it is a mean or not by the version of transformers.
        known = trainer.compute_loss_func is None and trainer.label_smoother is None
        self._done = trainer.compute_loss.__module__ == _SFT and known

    def halved(self, model: nn.Module, inputs: dict[str, Any], count: Tensor) -> Tensor | None:
        """The loss for twice the count, if that is still to be checked; random numbers and TRL's metrics stay."""
        if self._done:
            return None
        trainer, device = self._trainer, self._trainer.args.device
        metrics = copy.deepcopy({name: one for name, one in vars(trainer).items() if name in _METRICS})
        model.train()
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            found: Tensor = trainer.compute_loss(model, trainer._prepare_inputs(inputs), num_items_in_batch=2 * count)
        vars(trainer).update(metrics)
        return found

    def compare(self, loss: Tensor, halved: Tensor | None, router: Tensor | float) -> None:
        """Raise ConfigError if `loss` without its router loss is not twice `halved` without it."""
        if halved is None:
            return
        once, half = float(loss - router), float(halved - router)
        if abs(2 * half - once) > _APART * abs(once):
            raise ConfigError(
                f"odc cannot apply max_tokens with the loss of {type(self._trainer.model).__name__} under "
                f"{type(self._trainer).__name__}: it is {once:.4g}, and {half:.4g} for twice num_items_in_batch, where "
                "it should be half. It must be a sum over targets divided by that; leave max_tokens out"
            )
        self._done = once != 0
