"""The options of a multimodal job: a job as `odc train` has it, and how its phases are balanced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from odc.errors import ConfigError
from odc.experiments.config import JobConfig
from odc.experiments.multimodal.plan import BALANCES, Balance

TRANSPORTS = ("fsdp2", "odc")


@dataclass(frozen=True)
class MultimodalConfig:
    """One multimodal job. `per_node` is the number of ranks of a declared node: what crosses nodes is kept small; 0
    takes hosts for nodes.

    Of `job`, `model` names a multimodal config, `data` a JSONL file of messages, `arm` is `fsdp2` or `odc`, and
    `max_tokens` caps one example; fields about packing and tokenizers have no effect.
    """

    job: JobConfig
    balance: Balance = "full"
    per_node: int = 1

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            raise ConfigError(f"balance must be one of {', '.join(BALANCES)}, not {self.balance!r}")
        if self.job.arm not in TRANSPORTS:
            raise ConfigError(f"a multimodal job runs over {' or '.join(TRANSPORTS)}, not {self.job.arm!r}")
        if self.per_node < 0 or self.job.ranks % (self.per_node or 1):
            raise ConfigError(
                f"per_node must divide the number of ranks ({self.job.ranks}) into whole nodes, not {self.per_node!r}"
            )
        if self.job.precision != "fp32" or self.job.activation_checkpointing:
            raise ConfigError("a multimodal job runs in fp32 and without activation checkpointing")
        if self.job.export is not None or self.job.slow:
            raise ConfigError("a multimodal job neither exports nor slows ranks down")

    @property
    def name(self) -> str:
        """Of its arm, as in tables: `transport/balance`."""
        return f"{self.job.arm}/{self.balance}"

    def with_(self, balance: Balance | None = None, **changes: Any) -> MultimodalConfig:
        return replace(self, job=self.job.with_(**changes), balance=balance or self.balance)
