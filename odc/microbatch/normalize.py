"""Losses divided by a number that is known only when a minibatch is over (Fast-LLM issue 510; see docs/microbatch.md).

Let S be the summed loss of one microbatch and n what it counts (label tokens). "global" is the sum of all S over the
sum of all n; "per_microbatch" the mean over i of the same for the i-th microbatches of all ranks; "per_rank_microbatch"
the mean of S / n over all microbatches of all ranks.

Under "global" backward runs on S * grad_scale / proxy, and `finish` multiplies every gradient by what is missing to 1 /
N: exact for any counts on any rank, because the proxy is the same for all microbatches. One factor can serve only one
divisor; losses over several divisors need their totals before the first backward (`announce`).
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from odc.errors import ConfigError, OdcError
from odc.microbatch.positions import Count, Counts, device_of, positions
from odc.trace import recorder

T = TypeVar("T")
Normalization = Literal["global", "per_microbatch", "per_rank_microbatch"]
_NORMALIZATIONS = ("global", "per_microbatch", "per_rank_microbatch")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Totals:
    """Figures of one minibatch over all ranks, the same on each.

    Args:
        divisors: the true divisors by name; unless the normalization is "global", also "microbatches", the number that
            the objective is a mean over.
        metrics: each metric's numerators over its divisor; NaN where that is 0.
        factor: what gradients were multiplied by; None if the step is to be skipped.
    """

    divisors: dict[str, float]
    metrics: dict[str, float]
    factor: float | None

    @property
    def skip(self) -> bool:
        """Whether no rank had anything to train on; gradients are then None, and no optimizer step should follow."""
        return self.factor is None


class LossNormalizer:
    """Divides the gradients of each minibatch by what its losses count on all ranks and microbatches together.

    For each microbatch, call backward on `scaled(loss_sum, count)`; after the minibatch, `finish(parameters)` before
    NaN check, norm and clip. Use it on the training thread. Only `finish`, `announce` and `microbatches` communicate.

    Args:
        proxy: whole number near the divisor of a minibatch (near the number of microbatches unless the normalization is
            "global"), the same on all ranks, which `finish` checks. It cancels; it keeps 16-bit gradients in range.
        metrics: name -> the divisor it is a mean over. A rank without a microbatch must know the names too.
        divisor: name of the losses' divisor, or several names for losses with different divisors that are added up;
            "per_rank_microbatch" takes one.
        normalization: the objective; see the module's text.
        grad_scale: scale of a gradient scaler for fp16; `finish` removes it again.
        gradient_divide_factor: what the reduction of gradients divides by; by default the number of ranks, because
            FSDP2 and odc average. 1.0 where gradients are summed.
        group: ranks that share the minibatch; by default the default group. Without torch.distributed, one rank.

    Attributes:
        last: whether the microbatch that `microbatches` has handed out is this rank's last, for
            `model.set_is_last_backward`. What it iterates over is one ahead, so its own `last` comes too early.

    Raises ConfigError for a value out of range.
    """

    def __init__(
        self,
        proxy: int,
        *,
        metrics: Mapping[str, str] | None = None,
        divisor: str | Sequence[str] = "labels",
        normalization: Normalization = "global",
        grad_scale: float = 1.0,
        gradient_divide_factor: float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(proxy, int) or isinstance(proxy, bool) or not 0 < proxy < 1 << 40:
            raise ConfigError(f"proxy must be a whole number below 2^40, near what a minibatch counts, not {proxy!r}")
        if not 0 < grad_scale < math.inf:
            raise ConfigError(f"grad_scale must be positive, not {grad_scale!r}")
        if normalization not in _NORMALIZATIONS:
            raise ConfigError(f"normalization must be one of {', '.join(_NORMALIZATIONS)}, not {normalization!r}")
        self._trained = (divisor,) if isinstance(divisor, str) else tuple(dict.fromkeys(divisor))
        if not self._trained or (len(self._trained) > 1 and normalization == "per_rank_microbatch"):
            raise ConfigError(
                f"divisor: {len(self._trained)} divisors are no objective under {normalization!r}; it takes one"
                + (", the other normalizations take several" if self._trained else " or more")
            )
        self.proxy, self.grad_scale, self.normalization = proxy, grad_scale, normalization
        self._metrics = dict(sorted((metrics or {}).items()))  # in one order on all ranks
        self._divided_by, self._group = gradient_divide_factor, group
        own = {"microbatches"} if normalization == "per_rank_microbatch" else set()
        self._names = sorted({*self._trained, *own, *self._metrics.values()})
        self._start()

    def _start(self) -> None:
        # This rank's sums, the divisors of all ranks as announced, and those of the position.
        self._counted: dict[str, float | Tensor] = dict.fromkeys(self._names, 0.0)
        self._numerators: dict[str, float | Tensor] = dict.fromkeys(self._metrics, 0.0)
        self._promised: dict[str, float] | None = None
        self._current: dict[str, float] | None = None
        self._positions = 0
        self.last = False

    def announce(self, counts: Mapping[str, Count]) -> dict[str, float]:
        """Exchange the counts of all ranks' microbatches of the coming minibatch, and return the totals.

        Needed with "global" and several divisors: their losses share one backward, so each needs its true divisor
        before. `counts` holds, by divisor, the sum over all microbatches that this rank will run; a missing divisor
        counts 0. Every rank of the group calls it once a minibatch, before its first `scaled`; waits for all of them
        (one all-reduce). `finish` raises if the ranks then train on other counts.
        """
        if self.normalization != "global" or self._promised is not None:
            when = "was announced already" if self.normalization == "global" else f"needs none: {self.normalization}"
            raise ConfigError(f"rank {recorder().rank}: this minibatch {when}")
        if unknown := counts.keys() - set(self._trained):
            raise ConfigError(f"{', '.join(sorted(unknown))}: losses are divided by {', '.join(self._trained)}")
        dtype, device = torch.float64, device_of(self._group)
        packed = torch.stack(
            [torch.as_tensor(counts.get(name, 0), dtype=dtype, device=device).reshape(()) for name in self._trained]
        )
        if dist.is_initialized():
            dist.all_reduce(packed, group=self._group)
        self._promised = dict(zip(self._trained, packed.tolist(), strict=True))
        return dict(self._promised)

    def microbatches(self, source: Iterable[T], counts: Callable[[T], Counts]) -> Iterator[T]:
        """Iterates over this rank's microbatches under "per_microbatch", in step with the other ranks.

        `source` may hold any number, including zero; one is taken before the previous is handed out. `counts` gives
        what a microbatch adds to its divisor, or to each divisor by name. The divisor of the i-th ones is summed
        over ranks, so a rank waits (with the group's timeout) until the slowest one is at most one microbatch behind.
        Every rank must iterate to the end, inside the minibatch.
        """
        if self.normalization != "per_microbatch":
            raise ConfigError(f"microbatches() is not for {self.normalization!r}, which does not keep ranks in step")
        if self._promised is not None:
            raise ConfigError(f"rank {recorder().rank}: microbatches() was called in this minibatch already")
        self._promised = dict.fromkeys(self._trained, 0.0)
        return self._in_step(source, counts)

    def _in_step(self, source: Iterable[T], counts: Callable[[T], Counts]) -> Iterator[T]:
        for position in positions(source, counts, self._trained, self._group):
            self._positions += 1
            self._promised = {name: so_far + position.totals[name] for name, so_far in (self._promised or {}).items()}
            self._current, self.last = position.totals, position.last
            yield from position.items
        self._current = None

    def scaled(self, loss_sum: Tensor, count: Count, *, divisor: str | None = None) -> Tensor:
        """The loss to call `backward` on: the summed loss of one microbatch, scaled to keep gradients in range.

        Args:
            loss_sum: scalar, summed over what `count` counts. Add losses that share a divisor before scaling; scale
                losses with different divisors separately, then add them.
            count: what this microbatch adds to the divisor: labels it trains on, or their weights. A tensor is
                not waited for.
            divisor: one of the normalizer's divisors; by default the first.

        Raises ConfigError if the normalizer does not know the divisor, or needs its total now and does not know it yet;
        ValueError if `loss_sum` is not a scalar, or `count` is negative.
        """
        name = self._trained[0] if divisor is None else divisor
        if name not in self._trained:
            raise ConfigError(
                f"rank {recorder().rank}: a loss over {name!r}, but the normalizer divides by "
                f"{', '.join(self._trained)}; name every divisor when it is made"
            )
        if loss_sum.numel() != 1:
            raise ValueError(f"loss_sum must be a scalar, not of shape {tuple(loss_sum.shape)}")
        if not isinstance(count, Tensor) and count < 0:
            raise ValueError(f"count must be 0 or more, not {count!r}")
        self.count(name, count)
        if self.normalization == "per_rank_microbatch":
            some = count > 0
            self.count("microbatches", some.double() if isinstance(some, Tensor) else float(some))
            over = torch.where(count > 0, count, 1) if isinstance(count, Tensor) else count or 1
            return loss_sum * (self.grad_scale / self.proxy) / over
        return loss_sum * (self.grad_scale * self._weight(name))

    def count(self, divisor: str, count: float | Tensor) -> None:
        """Add to a divisor that only metrics use; `scaled` counts those of losses."""
        self._add(self._counted, divisor, count)

    def metric(self, name: str, numerator: float | Tensor) -> None:
        """Add to a metric's numerator: a sum over what its divisor counts. A tensor is detached, and not waited for."""
        self._add(self._numerators, name, numerator)

    def finish(self, parameters: Iterable[Tensor]) -> Totals:
        """Reduce all counts and numerators in one all-reduce, complete the gradients, and start the next minibatch.

        Each `.grad` of `parameters` (of a DTensor its local shard) is multiplied in place, or set to None if no rank
        had anything to train on. Every rank of the group calls it, outside of the minibatch, before it uses gradients.
        Waits for the group with the group's own timeout. Raises OdcError if ranks had different proxies, or trained on
        other counts than they had announced; then the gradients cannot be repaired.
        """
        # Once each: parameters that two modules share may be listed by both.
        grown = [*{id(parameter): parameter for parameter in parameters if parameter.grad is not None}.values()]
        ranks, sums = self._reduced(grown)
        divisors = dict(zip(self._names, sums[: len(self._names)], strict=True))
        numerators = dict(zip(self._metrics, sums[len(self._names) :], strict=True))
        if self.normalization == "per_microbatch":
            divisors["microbatches"] = float(self._positions)
        metrics = {
            name: numerators[name] / divisors[over] if divisors[over] else math.nan
            for name, over in self._metrics.items()
        }
        missing, promised = self._missing(divisors), self._promised or {}
        self._start()
        _check(promised, divisors)
        if missing is None:
            _log.warning("rank %d: no rank has anything to train on in this minibatch; skip its step", recorder().rank)
            for parameter in grown:
                parameter.grad = None
            return Totals(divisors, metrics, None)
        factor = (self._divided_by or ranks) * missing / self.grad_scale
        with torch.no_grad():
            for parameter in grown:
                gradient: Any = parameter.grad
                gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                gradient.mul_(factor)
        return Totals(divisors, metrics, factor)

    def discard(self) -> None:
        """Forget the minibatch in progress after an `odc.AbandonedMinibatchError`, in place of `finish`. Every rank
        calls it, under "per_microbatch" after it has iterated to the end of `microbatches`; it does not wait.
        """
        self._start()

    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing is kept between minibatches. For `odc.Recovery.protect`, which keeps finished steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget the minibatch in progress: the step that counted it is repeated, or another state goes on."""
        self._start()

    def _weight(self, name: str) -> float:
        """The factor of a summed loss before backward, apart from grad_scale."""
        if self.normalization == "per_microbatch":
            if self._current is None:
                raise ConfigError("per_microbatch: run the microbatches in `for mb in normalizer.microbatches(...)`")
            total = self._current[name]
            return 1.0 / (self.proxy * total) if total else 0.0
        if self._promised is not None:
            return 1.0 / self._promised[name] if self._promised[name] else 0.0
        if len(self._trained) > 1:
            raise ConfigError(
                f"rank {recorder().rank}: losses over {', '.join(self._trained)} share one backward, so the totals of "
                "all divisors must be known before it: call announce() first, or use normalization='per_microbatch'"
            )
        return 1.0 / self.proxy

    def _missing(self, divisors: Mapping[str, float]) -> float | None:
        """The factor that gradients lack once averaging over ranks is undone; None if there is nothing to train on."""
        if not any(divisors[name] for name in self._trained):
            return None
        if self.normalization == "global":
            return 1.0 if self._promised is not None else self.proxy / divisors[self._trained[0]]
        return self.proxy / divisors["microbatches"]

    def _add(self, sums: dict[str, float | Tensor], name: str, value: float | Tensor) -> None:
        if name not in sums:
            known = ", ".join(sums) or "none"
            raise ConfigError(
                f"rank {recorder().rank}: {name!r} was not named when the normalizer was made; there are {known}"
            )
        sums[name] = sums[name] + (value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value))

    def _reduced(self, grown: Sequence[Tensor]) -> tuple[int, list[float]]:
        """Number of ranks, and the sums over all of them: each divisor, then each metric's numerators."""
        digest = zlib.crc32(str(self.proxy).encode()) & 0xFFFFFF
        own = [float(self.proxy), float(digest), *self._counted.values(), *self._numerators.values()]
        if not dist.is_initialized():
            return 1, [float(value) for value in own[2:]]
        device = grown[0].device if grown else device_of(self._group)
        packed = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in own])
        dist.all_reduce(packed, group=self._group)
        (proxies, digests, *sums), ranks = packed.tolist(), dist.get_world_size(self._group)
        # Sums of whole numbers are exact. The digest catches a rank whose proxy is the mean of unequal ones.
        if proxies != ranks * self.proxy or digests != ranks * digest:
            raise OdcError(
                f"rank {recorder().rank} (epoch {recorder().epoch}) scaled its losses by 1/{self.proxy}, but others "
                f"did not: the mean of their proxies is {proxies / ranks:g}; it must be the same on every rank"
            )
        return ranks, sums


def _check(promised: Mapping[str, float], divisors: Mapping[str, float]) -> None:
    """Raise unless the ranks trained on the counts by which their losses were divided: exactly, but for sums of
    fractions, which may be rounded to fp32.
    """
    for name, total in promised.items():
        found = divisors[name]
        rounded = not (found.is_integer() and total.is_integer()) and math.isclose(found, total, rel_tol=1e-6)
        if found != total and not rounded:
            raise OdcError(
                f"rank {recorder().rank} (epoch {recorder().epoch}): losses were divided by {total:.15g} {name} as the "
                f"ranks had announced, but they trained on {found:.15g}"
            )
