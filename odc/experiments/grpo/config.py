"""The options of one GRPO job, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from odc.errors import ConfigError
from odc.experiments.config import check_fields, option
from odc.settings import Settings

GrpoArm = Literal["fsdp2", "fsdp2-resident", "odc-equal", "odc", "odc-split"]
Balance = Literal["arm", "verl"]
ObjectiveName = Literal["auto", "verl", "odc"]
Lengths = Literal["model", "drawn"]


@dataclass(frozen=True)
class GrpoConfig:
    """One GRPO job; help texts and docs/rl.md describe its fields.

    Ratios are clipped to 1 - `clip_low` and 1 + `clip_high`, and at `clip_dual`. `timeout_s` bounds the wait for a
    rollout too. `spans` is a folder for each rank's spans.
    """

    model: str = field(
        default="qwen2-toy", metadata=option("Hugging Face config (JSON) or model folder, or a shipped config's name.")
    )
    arm: GrpoArm = field(default="odc", metadata=option(f"One of {', '.join(get_args(GrpoArm))}."))
    balance: Balance = field(default="arm", metadata=option("arm (the arm's own planner) or verl (equal counts)."))
    ranks: int = field(default=2, metadata=option("Training processes on this machine; one more generates.", "Work"))
    steps: int = field(default=20, metadata=option("Rollouts, each followed by its updates."))
    prompts: int = field(default=8, metadata=option("Prompts of a step, over all ranks.", "Rollout"))
    group: int = field(default=4, metadata=option("Responses to each prompt, which are compared.", "Rollout"))
    prompt_tokens: int = field(default=6, metadata=option("Tokens of a prompt.", "Rollout"))
    response_tokens: int = field(default=32, metadata=option("Most tokens of a response.", "Rollout"))
    lengths: Lengths = field(
        default="model", metadata=option("model, or drawn: cut at skewed lengths, for measurements.", "Rollout")
    )
    minibatches: int = field(default=1, metadata=option("Optimizer steps a rollout.", "Objective"))
    max_tokens: int = field(
        default=256, metadata=option("Most tokens of one microbatch; under odc-split also of a piece of a sample.")
    )
    least_piece: int = field(default=256, metadata=option("Fewest tokens of a piece under odc-split."))
    lag: Literal[0, 1] = field(default=0, metadata=option("1: generate one step ahead, while training.", "Rollout"))
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0
    kl: float = field(
        default=0.0,
        metadata=option("Weight of the KL to the initial model.", "Objective"),
    )
    objective: ObjectiveName = field(
        default="auto",
        metadata=option("Whose formulae: verl, odc (the same) or auto.", "Objective"),
    )
    lr: float = field(default=5e-3, metadata=option("Learning rate.", "Objective"))
    weight_decay: float = 0.0
    clip: float = field(default=1.0, metadata=option("Largest gradient norm; 0: no clipping.", "Optimizer"))
    seed: int = field(default=0, metadata=option("Seeds weights, prompts and sampling.", "Work"))
    reproducible: bool = field(default=False, metadata=option("fp64 accumulators under the odc arms.", "Runtime"))
    second_buffer: bool = field(
        default=False, metadata=option("Keep two published versions for the rollout.", "Rollout")
    )
    timeout_s: float = field(
        default=600.0,
        metadata=option("Seconds to wait for a rank or rollout.", "Runtime", "--timeout"),
    )
    spans: str | None = None
    output: str | None = field(default=None, metadata=option("New file that gets one line of JSON a step."))
    folder: str | None = field(
        default=None, metadata=option("Folder for checkpoints, new or the resumed run's.", "Checkpoints")
    )
    save_every: int = field(default=0, metadata=option("Steps between checkpoints; 0: only at the end.", "Checkpoints"))
    resume: str | None = field(
        default=None, metadata=option("Checkpoint, or a run's folder (its latest).", "Checkpoints")
    )
    show: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _LEAST)
        if self.lr == 0 or self.timeout_s == 0:
            raise ConfigError("lr and timeout_s must be above 0")
        if self.clip_low >= 1 or self.clip_dual <= 1:
            raise ConfigError("clip_low must be below 1 and clip_dual above 1")
        if self.minibatches > self.prompts:
            raise ConfigError(f"minibatches ({self.minibatches}) must not be more than prompts ({self.prompts})")
        if self.balance == "verl" and self.arm == "odc-split":
            raise ConfigError("balance verl splits no sample; take another arm than odc-split")
        if self.arm != "odc-split" and self.max_tokens < self.longest:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) must hold a prompt and a response "
                f"({self.prompt_tokens} + {self.response_tokens} tokens)"
            )
        if self.save_every and self.folder is None:
            raise ConfigError("save_every needs a folder for checkpoints (--folder)")
        if self.balance == "verl" and self.group * (self.prompts // self.minibatches) % self.ranks:
            raise ConfigError("balance verl needs minibatches whose samples divide by the ranks")

    @property
    def longest(self) -> int:
        """Most tokens of a sample: a prompt and a response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def on_demand(self) -> bool:
        """Whether the arm is one of odc's, from whose ranks rollouts read the weights."""
        return self.arm.startswith("odc")

    def settings(self) -> Settings:
        return Settings(reproducible=self.reproducible, second_buffer=self.second_buffer, timeout_s=self.timeout_s)

    def with_(self, **changes: Any) -> GrpoConfig:
        return replace(self, **changes)


_LEAST = dict.fromkeys(
    ("ranks", "steps", "prompts", "prompt_tokens", "response_tokens", "minibatches", "least_piece"), 1
) | {"group": 2, "max_tokens": 2}
