"""The engine's configuration, and how verl's own configurations reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.verl import import_verl, needs_verl

from odc.errors import ConfigError

pytestmark = needs_verl


def test_options() -> None:
    import_verl()
    from odc.integrations.verl.config import OdcEngineConfig, options_of

    assert options_of(OdcEngineConfig(strategy="fsdp")).rebalance
    options = options_of(OdcEngineConfig(odc={"rebalance": False, "prefetch": 0}))
    assert not options.rebalance and not options.split and options.settings.prefetch == 0
    assert options_of(OdcEngineConfig(odc={"split": True})).split
    with pytest.raises(ConfigError, match="split=true moves rows between ranks"):
        OdcEngineConfig(odc={"split": True, "rebalance": False})
    with pytest.raises(ConfigError, match="odc has no option prefech; it has accumulate, .*rebalance"):
        OdcEngineConfig(odc={"prefech": 1})
    with pytest.raises(ConfigError, match="timeout_s must be a positive number"):
        OdcEngineConfig(odc={"timeout_s": 0})
    assert not options.settings.reproducible
    assert options_of(OdcEngineConfig(full_determinism=True)).settings.reproducible
    with pytest.raises(ConfigError, match="full_determinism=true needs sums in a fixed order"):
        OdcEngineConfig(full_determinism=True, odc={"reproducible": False})
    with pytest.raises(ConfigError, match="strategy 'megatron'"):
        OdcEngineConfig(strategy="megatron")


def ppo(model: Path, *changes: str) -> tuple[Any, Any, Any]:
    """Engine configurations of actor and critic, and what the reference model is configured with, in verl's PPO."""
    import_verl("verl.workers.config")
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass

    part = "actor_rollout_ref"
    needed = [f"{part}.actor.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2"]
    needed += [f"critic.model.path={model}", f"critic.model.tokenizer_path={model}/tokenizer"]
    needed += [f"{part}.{of}.log_prob_micro_batch_size_per_gpu=2" for of in ("ref", "rollout")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*needed, *changes])
    actor, critic = config.actor_rollout_ref.actor, config.critic
    return omega_conf_to_dataclass(actor).engine, omega_conf_to_dataclass(critic).engine, config.actor_rollout_ref.ref


def test_rl_needs_the_strategy_only(model) -> None:
    actor, critic, reference = ppo(model, "actor_rollout_ref.actor.strategy=odc", "critic.strategy=odc")
    from odc.integrations.verl.config import options_of

    assert actor.strategy == critic.strategy == reference.strategy == "odc"
    assert options_of(actor).rebalance and options_of(critic).rebalance
    offloaded = [actor.param_offload, critic.param_offload, reference.fsdp_config.param_offload]
    assert not any(offloaded), "verl's defaults ask for what the engine refuses"


def test_rl_with_options(model) -> None:
    config = "actor_rollout_ref.actor.fsdp_config"
    actor, _, _ = ppo(
        model,
        "actor_rollout_ref.actor.strategy=odc",
        f"{config}._target_=odc.integrations.verl.config.OdcEngineConfig",
        f"+{config}.odc.rebalance=false",
        f"+{config}.odc.timeout_s=5",
    )
    from odc.integrations.verl.config import options_of

    options = options_of(actor)
    assert actor.strategy == "odc" and not options.rebalance and options.settings.timeout_s == 5
