"""The old policy of an actor with rollouts beside it: what verl's `DetachActorWorker` keeps and loads under odc."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.verl import import_verl, join_as_verl, needs_verl
from support.verl_engine import build, loss_with_metrics, rows

pytestmark = needs_verl


def looked_at(engine: Any, rank: int) -> list[torch.Tensor]:
    """Log-probabilities of this rank's rows."""
    with engine.eval_mode():
        data = rows([30, 40], 2 * rank, use_dynamic_bsz=True, max_token_len_per_gpu=100)
        output = engine.infer_batch(data)
    return [row[:-1].clone() for row in output["model_output"]["log_probs"].unbind()]


def trained(engine: Any, rank: int) -> None:
    with engine.train_mode():
        data = rows([30, 40], 2 * rank, use_dynamic_bsz=True, max_token_len_per_gpu=100)
        engine.train_batch(data, loss_with_metrics)


def old_and_new(rank: int, world: int, model: Path, fsdp_size: int, reshard: bool) -> list[list[torch.Tensor]]:
    """As verl's trainer does it in its second update after a sync: what the actor computes before the first, after it,
    with the old policy, with the new one again, and after the second.
    """
    join_as_verl(rank, world)
    worker = import_verl("verl.experimental.separation.engine_workers").DetachActorWorker
    engine = build(model, "odc", fsdp_size=fsdp_size, reshard_after_forward=reshard)
    here = SimpleNamespace(config=SimpleNamespace(actor=SimpleNamespace(strategy="odc")), _strategy_handlers=None)
    keep, load = worker._get_strategy_handlers(here)
    found = [looked_at(engine, rank)]
    old = keep(engine.module)
    trained(engine, rank)
    found.append(looked_at(engine, rank))
    new = keep(engine.module)
    load(engine.module, old)
    found.append(looked_at(engine, rank))
    load(engine.module, new)
    found.append(looked_at(engine, rank))
    trained(engine, rank)
    found.append(looked_at(engine, rank))
    return found


@pytest.mark.parametrize(
    ("fsdp_size", "reshard", "world"),
    [
        pytest.param(-1, True, 2, id="sharded over all"),
        pytest.param(1, True, 2, id="hybrid sharding"),
        pytest.param(-1, False, 2, id="unsharded after inference"),
        pytest.param(-1, False, 1, id="unsharded on one rank"),
    ],
)
def test_an_old_policy_is_loaded_and_the_new_one_again(
    ranks: Any, model: Path, fsdp_size: int, reshard: bool, world: int
) -> None:
    for before, after, old, new, later in ranks(world).run(old_and_new, model, fsdp_size, reshard):
        assert all(map(torch.equal, before, old)) and all(map(torch.equal, after, new))
        assert not any(map(torch.equal, before, after)) and not any(map(torch.equal, after, later))


def strategies(rank: int, world: int) -> list[str]:
    join_as_verl(rank, world)
    from odc.integrations.verl.old_policy import teach_worker

    worker = import_verl("verl.experimental.separation.engine_workers").DetachActorWorker
    teach_worker()
    teach_worker()
    config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
    theirs = worker._get_strategy_handlers(SimpleNamespace(config=config, _strategy_handlers=None))
    config.actor.strategy = "none"
    with pytest.raises(NotImplementedError, match="none"):
        worker._get_strategy_handlers(SimpleNamespace(config=config, _strategy_handlers=None))
    return [one.__name__ for one in theirs]


def test_other_strategies_stay_verls(ranks: Any) -> None:
    assert ranks(1).run(strategies) == [["fsdp2_sharded_save_to_cpu", "fsdp2_sharded_load_from_cpu"]]
