"""The engine's configuration: verl's FSDP configuration with the strategy `odc` and odc's own options.

`_target_` selects it, so verl's list of strategies needs no patch. RL does not need it:
`actor_rollout_ref.actor.strategy=odc` works with verl's own configuration, and the options are then the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.workers.config import FSDPEngineConfig
from verl.workers.config.engine import EngineConfig

from odc.errors import ConfigError
from odc.settings import Settings


@dataclass
class OdcEngineConfig(FSDPEngineConfig):  # type: ignore[misc]
    """verl's `FSDPEngineConfig` with `odc`: `rebalance`, `split` and any field of `odc.Settings`.

    The strategies "fsdp" and "fsdp2" are accepted because RL sets the strategy only after construction.
    """

    strategy: str = "odc"
    odc: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # FSDPEngineConfig's knows only verl's strategies
        if self.strategy not in ("odc", "fsdp", "fsdp2"):
            raise ConfigError(f"strategy {self.strategy!r}: {type(self).__name__} is only for odc")
        options_of(self)


@dataclass(frozen=True)
class EngineOptions:
    """What odc has to know of one engine.

    With `rebalance`, rows of each training minibatch are spread over the data-parallel ranks by LB-Mini; without, ranks
    train on the rows that verl's trainer gave to each. With `split` besides, long rows run as pieces on several ranks.
    """

    rebalance: bool
    split: bool
    settings: Settings


def options_of(config: Any) -> EngineOptions:
    """The `odc` options of an engine configuration; the defaults for verl's own. Raises ConfigError."""
    given: Mapping[str, Any] = dict(getattr(config, "odc", None) or {})
    own = {"rebalance", "split"}
    known = {*own, *(one.name for one in fields(Settings))}
    if unknown := given.keys() - known:
        raise ConfigError(f"odc has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    wanted = {key: value for key, value in given.items() if key not in own}
    if getattr(config, "full_determinism", False) and not wanted.setdefault("reproducible", True):
        raise ConfigError("engine.full_determinism=true needs sums in a fixed order: leave odc.reproducible=false out")
    try:
        settings = Settings(**wanted)
    except ValueError as error:
        raise ConfigError(f"engine.odc: {error}") from error
    rebalance, split = bool(given.get("rebalance", True)), bool(given.get("split", False))
    if split and not rebalance:
        raise ConfigError("engine.odc.split=true moves rows between ranks: leave rebalance=false out")
    return EngineOptions(rebalance, split, settings)
