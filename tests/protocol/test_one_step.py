"""The file that shows the idea, against plain torch."""

from __future__ import annotations

import random

import pytest
import torch

from odc.protocol import one_step
from odc.protocol.one_step import ToyRank, minibatch, run, train

WORLD = 3


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WORLD, WORLD, generator=generator, dtype=torch.float64) for _ in range(2)]


def inputs() -> list[list[torch.Tensor]]:
    """Of three ranks: none, one and three microbatches."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(2, WORLD, generator=generator, dtype=torch.float64) for _ in range(count)] for count in (0, 1, 3)
    ]


def trained_by_torch() -> list[torch.Tensor]:
    parameters = [weight.clone().requires_grad_() for weight in weights()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for x in [x for one in inputs() for x in one]:
            for parameter in parameters:
                x = torch.tanh(x @ parameter)
            x.square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_the_ranks_train_as_torch_does(seed: int) -> None:
    torch.testing.assert_close(train(weights(), inputs(), seed), trained_by_torch())


def test_the_orders_differ() -> None:
    def order(seed: int) -> list[int]:
        ranks = [ToyRank(me, WORLD, weights()) for me in range(WORLD)]
        return list(run(ranks, [minibatch(one, ranks, inputs()[one.me], 0.1) for one in ranks], random.Random(seed)))

    assert order(0) != order(1)


def test_without_a_daemon_the_pushers_stop_when_the_rings_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(rank: ToyRank) -> one_step.Steps:
        yield lambda: False

    monkeypatch.setattr(one_step, "serve", none)
    with pytest.raises(RuntimeError, match="wait for one another"):
        train(weights(), inputs(), 0)
