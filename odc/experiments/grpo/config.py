"""Everything one GRPO job is told, in one frozen dataclass that is checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from odc.errors import ConfigError
from odc.experiments.config import check_fields
from odc.settings import Settings

GrpoArm = Literal["fsdp2", "fsdp2-resident", "odc-equal", "odc"]
Balance = Literal["arm", "verl"]
ObjectiveName = Literal["auto", "verl", "odc"]
Lengths = Literal["model", "drawn"]


@dataclass(frozen=True)
class GrpoConfig:
    """One GRPO job.

    Args:
        model: a Hugging Face config (JSON), a folder with a config and perhaps weights, or a shipped config's name.
        arm: how ranks communicate and how work is balanced, see `odc.arms`.
        balance: "arm": the arm's own planner. "verl": what verl 0.9 does: equal sample counts on all ranks, and as many
            microbatches on each as the fullest needs.
        ranks: training processes on this machine; one more process generates.
        steps: rollouts, each followed by its updates.
        prompts: of one step, over all ranks.
        group: responses to each prompt, which GRPO compares with each other; 2 or more.
        prompt_tokens, response_tokens: of a toy prompt; most of a response.
        lengths: "model": a response ends with a stop token or at `response_tokens`. "drawn": it is cut at a length from
            a clipped lognormal, for measurements on skewed lengths that do not change as the model learns.
        minibatches: optimizer steps a rollout; prompts are dealt to them.
        max_tokens: most tokens of one microbatch.
        lag: 0: rollouts come from the weights that are then trained. 1: they come from the step before and are made
            while the job trains.
        clip_low, clip_high, clip_dual: ratios at which the objective is clipped: 1 - low, 1 + high, and the dual clip.
        kl: weight of the KL divergence to the initial model in the loss; 0 leaves it out, and its forward.
        objective: whose formulae: "verl", "odc" (the same, see `odc.experiments.grpo.objective`), or "auto":
            verl's if installed.
        lr, weight_decay, clip: AdamW, and the largest gradient norm (0 does not clip).
        seed: of weights, prompts and sampling.
        reproducible, second_buffer, timeout_s: see `odc.Settings`; `timeout_s` bounds the wait for a rollout too.
        spans: folder that gets each rank's recorded spans; None stores none.
        output: new file that gets one line of JSON a step; None writes none.
        folder: folder for checkpoints, new or that of the run which is resumed; None saves none.
        save_every: steps between checkpoints, 0 for none but the last one when there is a folder.
        resume: a checkpoint, or the folder of a job (its latest is taken).
        show: print a line a step on standard error.
    """

    model: str = "qwen2-toy"
    arm: GrpoArm = "odc"
    balance: Balance = "arm"
    ranks: int = 2
    steps: int = 20
    prompts: int = 8
    group: int = 4
    prompt_tokens: int = 6
    response_tokens: int = 32
    lengths: Lengths = "model"
    minibatches: int = 1
    max_tokens: int = 256
    lag: Literal[0, 1] = 0
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0
    kl: float = 0.0
    objective: ObjectiveName = "auto"
    lr: float = 5e-3
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    reproducible: bool = False
    second_buffer: bool = False
    timeout_s: float = 600.0
    spans: str | None = None
    output: str | None = None
    folder: str | None = None
    save_every: int = 0
    resume: str | None = None
    show: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _CHOICES, _WHOLE, _NUMBERS)
        if self.lr == 0 or self.timeout_s == 0:
            raise ConfigError("lr and timeout_s must be above 0")
        if self.clip_low >= 1 or self.clip_dual <= 1:
            raise ConfigError("clip_low must be below 1 and clip_dual above 1")
        if self.minibatches > self.prompts:
            raise ConfigError(f"minibatches ({self.minibatches}) must not be more than prompts ({self.prompts})")
        if self.max_tokens < self.prompt_tokens + self.response_tokens:
            raise ConfigError(
                f"max_tokens ({self.max_tokens}) must hold a prompt and a response "
                f"({self.prompt_tokens} + {self.response_tokens} tokens)"
            )
        if self.save_every and self.folder is None:
            raise ConfigError("save_every needs a folder for checkpoints (--folder)")
        if self.balance == "verl" and self.group * (self.prompts // self.minibatches) % self.ranks:
            raise ConfigError("balance verl needs minibatches whose samples divide by the ranks")

    @property
    def on_demand(self) -> bool:
        """Whether the arm is one of odc's, from whose ranks rollouts read the weights."""
        return self.arm.startswith("odc")

    def settings(self) -> Settings:
        """The runtime's settings under the odc arms."""
        return Settings(reproducible=self.reproducible, second_buffer=self.second_buffer, timeout_s=self.timeout_s)

    def with_(self, **changes: Any) -> GrpoConfig:
        """A checked copy with some fields changed."""
        return replace(self, **changes)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "arm": get_args(GrpoArm),
    "balance": get_args(Balance),
    "objective": get_args(ObjectiveName),
    "lengths": get_args(Lengths),
    "lag": (0, 1),
}
_WHOLE = {
    "ranks": 1,
    "steps": 1,
    "prompts": 1,
    "group": 2,
    "prompt_tokens": 1,
    "response_tokens": 1,
    "minibatches": 1,
    "max_tokens": 2,
    "save_every": 0,
    "seed": 0,
}
_NUMBERS = ("clip_low", "clip_high", "clip_dual", "kl", "lr", "weight_decay", "clip", "timeout_s")
