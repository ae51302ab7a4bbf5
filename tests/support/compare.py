"""Comparing runs, and an oracle in double precision.

Equal means equal as numbers, element for element: 0.0 and -0.0 are one, and no NaN is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from support.models import Case, Run, Tiny, make, next_token_loss, token_share, tokens

Tensors = Mapping[str, torch.Tensor | None]


def differences(mine: Tensors, other: Tensors, tolerance: Callable[[torch.Tensor], torch.Tensor] | None) -> list[str]:
    """One line for every tensor that differs by more than `tolerance` of the other (None: at all)."""
    found = [f"names differ: {sorted(set(mine) ^ set(other))}"] if set(mine) != set(other) else []
    for name in sorted(set(mine) & set(other)):
        a, b = mine[name], other[name]
        if a is None or b is None:
            if a is not b:
                found.append(f"{name}: {'None' if a is None else 'there'}, not {'None' if b is None else 'there'}")
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{name}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
            continue
        gap = (a.double() - b.double()).abs()
        allowed = torch.zeros_like(gap) if tolerance is None else tolerance(b.double())
        wrong = ~(gap <= allowed)
        if wrong.any():
            found.append(f"{name}: {int(wrong.sum())} of {gap.numel()} elements, by up to {gap.max().item():.3e}")
    return found


def _scalars(run: Run) -> dict[str, torch.Tensor | None]:
    named: dict[str, torch.Tensor | None] = {"norms": torch.tensor(run.norms, dtype=torch.float64)}
    for step, losses in enumerate(run.losses):
        named[f"losses of step {step}"] = torch.tensor(losses, dtype=torch.float64)
    return named


def compare(run: Run, reference: Run, tolerance: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Fail, listing every tensor, unless losses, norms, gradients of each step and parameters agree."""
    assert reference.losses and all(torch.isfinite(torch.tensor(reference.norms))), f"no reference: {reference.norms}"
    found = differences(_scalars(run), _scalars(reference), tolerance)
    for step, (mine, other) in enumerate(zip(run.gradients, reference.gradients, strict=True)):
        found += [f"step {step} gradient of {line}" for line in differences(mine, other, tolerance)]
    found += [f"parameter {line}" for line in differences(run.parameters, reference.parameters, tolerance)]
    assert not found, "\n".join(found[:20])


def assert_same(run: Run, reference: Run) -> None:
    """Bit for bit."""
    compare(run, reference, None)


def assert_close(run: Run, reference: Run, *, relative: float, absolute: float) -> None:
    """Within `absolute` + `relative` x the reference, element for element."""
    compare(run, reference, lambda b: absolute + relative * b.abs())


def assert_trained_alike(run: Run, reference: Run, *, low_precision: bool) -> None:
    """That sums were rounded differently is all that distinguishes two runs of several steps.

    So the first step's gradients are as near as that. Later steps train on the difference, which in bf16 can grow: the
    last bit of a sum may decide how a weight is rounded to bf16.
    """
    step_one = differences(run.gradients[0], reference.gradients[0], _of_largest)
    assert not step_one, "\n".join(step_one)
    assert_close(run, reference, **LATER[low_precision])


LATER = {False: {"relative": 2e-4, "absolute": 2e-5}, True: {"relative": 2e-2, "absolute": 2e-3}}


def _of_largest(values: torch.Tensor) -> torch.Tensor:
    """What a tensor's largest element allows each of them: a sum's rounding scales with what is added."""
    largest = values.abs().max() if values.numel() else values.new_zeros(())
    return (2e-6 * largest + 1e-9).expand_as(values)


def own_chunk(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What `Shard(0)` gives to `rank`; empty where there is nothing left."""
    chunks = torch.chunk(whole, ranks, dim=0)
    return chunks[rank] if rank < len(chunks) else whole[:0]


class Oracle:
    """Gradients of a step: every microbatch of every rank, unsharded, in compute dtype; summed in fp64.

    The microbatches' gradients are those that ranks push, to the bit, so what is left is the accumulator's rounding.

    Attributes:
        mean: fp64 gradient by parameter name: the sum divided by the ranks.
        size: fp64, the same of absolute values: rounding is relative to it.
        pushes: how many gradients were added.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], case: Case, step: int, ranks: int) -> None:
        model = make(case)
        model.load_state_dict(dict(weights))
        if case.low_precision:
            model = model.to(torch.bfloat16)
        self.pushes = sum(case.of(step))
        self.mean = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
        self.size = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
        for rank, count in enumerate(case.of(step)):
            for i in range(count):
                self._add(model, tokens(rank, step, i), token_share(case.of(step), ranks), ranks)

    def _add(self, model: Tiny, x: torch.Tensor, share: float, ranks: int) -> None:
        (next_token_loss(model(x), x) * share).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                self.mean[name] += p.grad.double() / ranks
                self.size[name] += p.grad.double().abs() / ranks
                p.grad = None

    def errors(self, own: Tensors, rank: int, ranks: int, *, unit: float, roundings: int) -> list[str]:
        """One line for every own gradient shard that is off by more than rounding explains.

        Args:
            unit: relative rounding error of one addition in the accumulator.
            roundings: additions; the last rounding, to fp32, comes on top.
        """
        found = []
        for name, gradient in own.items():
            mean, size = (own_chunk(source[name], rank, ranks) for source in (self.mean, self.size))
            if gradient is None:
                found += [f"{name}: None"] if bool(size.any()) else []
                continue
            allowed = roundings * unit * size * 1.01 + 2.0**-24 * mean.abs() * 1.01 + 1e-44
            gap = (gradient.double() - mean).abs()
            if not bool((gap <= allowed).all()):
                found.append(f"{name}: off by up to {(gap / allowed).max().item():.1f} x the rounding")
        return found
