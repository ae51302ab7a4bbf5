"""Losses divided by a number that is known only when a minibatch is over (Fast-LLM issue 510, option A).

Let S_m be the summed loss of microbatch m and n_m what it counts (label tokens), over all ranks. A minibatch's loss is
sum(S_m) / N with N = sum(n_m), and nobody knows N before the last microbatch has been loaded. So backward runs on
c * S_m with c = grad_scale / proxy, and once all gradients are there each is multiplied by what is missing to 1 / N:
exact for any counts on any rank. Chose one proxy for all microbatches of a minibatch on all ranks over the issue's
"tokens of this microbatch", which weights microbatches against each other and is exact only when all have equal counts.
The proxy keeps 16-bit gradients in range and cancels; the token budget of a minibatch is a good one.

The price: one all-reduce of a few doubles at the minibatch's end (all ranks are there anyway), and a pass over the
gradient shards. One rescale can serve one divisor only: a second loss with a divisor of its own is refused.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from odc.errors import ConfigError, OdcError, UnsupportedError
from odc.trace import recorder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Totals:
    """A minibatch over all ranks, the same on each.

    Args:
        divisors: the true divisors by name.
        metrics: each metric's numerators over its divisor; NaN where that is 0.
        factor: what gradients were multiplied by; None when the step is to be skipped.
    """

    divisors: dict[str, float]
    metrics: dict[str, float]
    factor: float | None

    @property
    def skip(self) -> bool:
        """Whether no rank had anything to train on: gradients are None, and no optimizer step should follow."""
        return self.factor is None


class LossNormalizer:
    """Divides the gradients of each minibatch by what its losses count, all ranks and microbatches together.

        normalizer = LossNormalizer(proxy=token_budget, metrics={"loss": "labels", "reward": "samples"})
        with model.minibatch():
            for mb in mine:
                loss_sum = cross_entropy(..., reduction="sum")
                normalizer.scaled(loss_sum, mb.labels).backward()
                normalizer.metric("loss", loss_sum), normalizer.count("samples", mb.samples)
        totals = normalizer.finish(model.parameters())   # before NaN check, norm and clip
        if not totals.skip: ...clip, optimizer.step()

    Args:
        proxy: about the divisor of a minibatch, a whole number, the same on all ranks (checked by `finish`).
        metrics: name -> the divisor it is a mean over. Names are given here because a rank that has no microbatch must
            know them too.
        divisor: what the loss that is trained on is divided by.
        per_microbatch: option B: the mean over microbatches of each one's own mean, so that a token's weight is
            1 / (microbatches * n_m). Another objective, unless all counts are equal; the proxy then stands for the
            number of microbatches in a minibatch.
        grad_scale: of a gradient scaler for fp16; `finish` takes it out again.
        gradient_divide_factor: what the reduction of gradients has divided by; the number of ranks unless given, as
            FSDP2 and odc average. 1.0 where gradients are summed.
        group: ranks that share the minibatch; the default group unless given. Without torch.distributed, one rank.

    On the training thread. Only `finish` synchronizes.
    """

    def __init__(
        self,
        proxy: int,
        *,
        metrics: Mapping[str, str] | None = None,
        divisor: str = "labels",
        per_microbatch: bool = False,
        grad_scale: float = 1.0,
        gradient_divide_factor: float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(proxy, int) or isinstance(proxy, bool) or not 0 < proxy < 1 << 40:
            raise ConfigError(f"proxy must be a whole number below 2^40, about what a minibatch counts, not {proxy!r}")
        if not 0 < grad_scale < math.inf:
            raise ConfigError(f"grad_scale must be positive, not {grad_scale!r}")
        self.proxy, self.grad_scale = proxy, grad_scale
        self._metrics, self._divisor, self._per_microbatch = dict(metrics or {}), divisor, per_microbatch
        self._divided_by, self._group = gradient_divide_factor, group
        self._trained = "microbatches" if per_microbatch else divisor
        self._names = sorted({self._trained, divisor, *self._metrics.values()})
        self._start()

    def scaled(self, loss_sum: Tensor, count: int | Tensor, *, divisor: str | None = None) -> Tensor:
        """What to call `backward` on: the summed loss of one microbatch, times what keeps gradients in range.

        Args:
            loss_sum: scalar, summed over what `count` counts; of 0 where that is 0. Losses that share the divisor are
                added up before.
            count: what this microbatch adds to the divisor: labels it trains on. A tensor is not waited for.
            divisor: must be the normalizer's; see above.

        Raises:
            UnsupportedError: another divisor.
            ValueError: not a scalar, or a negative count.
        """
        if divisor not in (None, self._divisor):
            raise UnsupportedError(
                f"rank {recorder().rank}: a loss over {divisor!r} beside one over {self._divisor!r}: one rescale at "
                "the minibatch's end cannot divide both. Run it in a minibatch of its own and add the gradients, or "
                f"weight it per {self._divisor}"
            )
        if loss_sum.numel() != 1:
            raise ValueError(f"loss_sum must be a scalar, not of shape {tuple(loss_sum.shape)}")
        if not isinstance(count, Tensor) and count < 0:
            raise ValueError(f"count must be 0 or more, not {count!r}")
        self.count(self._divisor, count)
        scale = self.grad_scale / self.proxy
        if not self._per_microbatch:
            return loss_sum * scale
        some = count > 0
        self.count("microbatches", some.double() if isinstance(some, Tensor) else float(some))
        least_one = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return loss_sum * scale / least_one

    def count(self, divisor: str, count: float | Tensor) -> None:
        """Add to a divisor that only metrics have. (`scaled` counts the loss's own.)"""
        self._add(self._divisors, divisor, count)

    def metric(self, name: str, numerator: float | Tensor) -> None:
        """Add to a metric's numerator: a sum over what its divisor counts. A tensor is detached, and not waited for."""
        self._add(self._numerators, name, numerator)

    def finish(self, parameters: Iterable[Tensor]) -> Totals:
        """Reduce all counts and numerators in one all-reduce, and complete the gradients; begins the next minibatch.

        Args:
            parameters: those that train. Each `.grad` is multiplied in place (a DTensor's own shard), or set to None
                where nobody had anything to train on.

        Called by every rank of the group, outside of the minibatch, before gradients are looked at. Waits for the group
        as long as its own timeout says.

        Raises:
            OdcError: ranks had different proxies; their gradients are of different scales and cannot be mended.
        """
        grown = [parameter for parameter in parameters if parameter.grad is not None]
        ranks, sums = self._reduced(grown)
        divisors = dict(zip(self._names, sums[: len(self._names)], strict=True))
        numerators = dict(zip(self._metrics, sums[len(self._names) :], strict=True))
        metrics = {
            name: numerators[name] / divisors[over] if divisors[over] else math.nan
            for name, over in self._metrics.items()
        }
        total = divisors[self._trained]
        self._start()
        if total == 0:
            _log.warning("rank %d: no rank has anything to train on in this minibatch; skip its step", recorder().rank)
            for parameter in grown:
                parameter.grad = None
            return Totals(divisors, metrics, None)
        factor = (self._divided_by or ranks) * self.proxy / (total * self.grad_scale)
        with torch.no_grad():
            for parameter in grown:
                gradient: Any = parameter.grad
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                gradient.mul_(factor)
        return Totals(divisors, metrics, factor)

    def _start(self) -> None:
        self._divisors: dict[str, float | Tensor] = dict.fromkeys(self._names, 0.0)
        self._numerators: dict[str, float | Tensor] = dict.fromkeys(self._metrics, 0.0)

    def _add(self, sums: dict[str, float | Tensor], name: str, value: float | Tensor) -> None:
        if name not in sums:
            raise ConfigError(
                f"rank {recorder().rank}: {name!r} was not announced; there are {', '.join(sums) or 'none'}"
            )
        sums[name] = sums[name] + (value.detach().double() if isinstance(value, Tensor) else float(value))

    def _reduced(self, grown: Sequence[Tensor]) -> tuple[int, list[float]]:
        """Number of ranks, and the sums over all of them: of each divisor, then of each metric's numerators."""
        digest = zlib.crc32(str(self.proxy).encode()) & 0xFFFFFF
        own = [float(self.proxy), float(digest), *self._divisors.values(), *self._numerators.values()]
        if not dist.is_initialized():
            return 1, [float(value) for value in own[2:]]
        device = _device(grown, self._group)
        packed = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in own])
        dist.all_reduce(packed, group=self._group)
        (proxies, digests, *sums), ranks = packed.tolist(), dist.get_world_size(self._group)
        # Sums of whole numbers are exact. The digest is for the rank whose proxy is the mean of unequal ones.
        if proxies != ranks * self.proxy or digests != ranks * digest:
            raise OdcError(
                f"rank {recorder().rank} (epoch {recorder().epoch}) scaled its losses by 1/{self.proxy}, others did "
                f"not: the mean of their proxies is {proxies / ranks:g}; it must be the same on every rank"
            )
        return ranks, sums


def _device(grown: Sequence[Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """Where the group can reduce: the gradients' device; a rank without any takes the backend's usual one."""
    if grown:
        return grown[0].device
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
