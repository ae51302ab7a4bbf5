"""The options of a training job, checked when they are made; `preflight` has the checks that need the disk."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from odc.arms import ARM_NAMES, ArmName, arm_named
from odc.balance import longest_in_pieces, most_pieces
from odc.errors import ConfigError
from odc.settings import Accumulate, OptimizerSharding, Settings

Long = Literal["error", "split", "drop"]
Precision = Literal["fp32", "bf16"]
Schedule = Literal["cosine", "linear", "constant"]
Device = Literal["cpu", "cuda"]
GrpoArm = Literal["fsdp2", "fsdp2-resident", "odc-equal", "odc", "odc-split"]
Balance = Literal["arm", "verl"]
Lengths = Literal["model", "drawn"]
Rollouts = Literal["hf", "vllm"]
Keep = Literal["host", "buddy"]

#: What a tokenizer may be, if it is not a Hugging Face folder.
TOKENIZERS = ("auto", "bytes", "bpe")

#: What is compared by default.
DEFAULT_ARMS: tuple[ArmName, ...] = ("fsdp2", "fsdp2-resident", "odc-equal", "odc")

# Panels of the help page.
_WORK, _DATA, _OPTIMIZER, _FILES, _RUNTIME, _LORA = "Work", "Model and data", "Optimizer", "Files", "Runtime", "LoRA"


def option(text: str, panel: str | None = None, flag: str | None = None) -> dict[str, Any]:
    """Metadata of a field that is a command-line option (`odc.cli.options`)."""
    return {"help": text, "panel": panel} | ({"flag": flag} if flag else {})


@dataclass(frozen=True)
class JobConfig:
    """One job of supervised fine-tuning; help texts describe its fields. `spans` is a folder for each rank's spans."""

    model: str = field(metadata=option("Hugging Face config (JSON) or model folder, or a shipped config's name."))
    data: str = field(
        metadata=option("JSONL, Parquet or datasets folder (docs/finetune.md), folder of text files, or `stdlib`.")
    )
    valid: str | None = field(default=None, metadata=option("Validation set, as --data; its loss is shown.", _DATA))
    valid_every: int = field(default=0, metadata=option("Steps between validations; 0: only at the end.", _DATA))
    output: str | None = field(
        default=None, metadata=option("Folder for checkpoints and steps.jsonl, new or that of --resume.", _FILES)
    )
    arm: ArmName = field(default="odc", metadata=option(f"One of {', '.join(ARM_NAMES)}."))
    per_node: int = field(default=2, metadata=option("Ranks of one declared node, for hybrid arms.", _WORK))
    optimizer_sharding: OptimizerSharding = field(
        default="mesh",
        metadata=option("Optimizer states under odc-hybrid: mesh (within a node) or world (over all ranks).", _WORK),
    )
    ranks: int = field(default=2, metadata=option("Processes on this machine.", _WORK))
    device: Device = field(default="cpu", metadata=option("cpu, or cuda: this machine's devices in turn.", _WORK))
    steps: int = field(default=10, metadata=option("Optimizer steps of the whole schedule.", _WORK))
    minibatch_size: int = field(default=8, metadata=option("Samples of one step, over all ranks.", _WORK))
    max_tokens: int = field(default=4096, metadata=option("Most tokens of one microbatch.", _WORK))
    long: Long = field(default="error", metadata=option("Documents over --max-tokens: error, split or drop.", _WORK))
    least_piece: int = field(
        default=0,
        metadata=option("Fewest tokens of a piece under odc-split; 0: 256 on a cpu, 2048 on cuda.", _WORK),
    )
    tokenizer: str = field(
        default="auto",
        metadata=option(
            "Hugging Face folder, bytes, bpe (trained on the data), or auto: the model folder's own, else bpe.", _DATA
        ),
    )
    vocab: int = field(default=4096, metadata=option("Tokens of the trained BPE.", _DATA))
    lr: float = field(default=3e-4, metadata=option("Peak learning rate.", _OPTIMIZER))
    warmup: int = field(default=0, metadata=option("Steps of linear warm-up.", _OPTIMIZER))
    schedule: Schedule = field(
        default="cosine", metadata=option("After the warm-up: cosine, linear or constant.", _OPTIMIZER)
    )
    min_lr: float = field(default=0.1, metadata=option("Fraction of --lr that cosine and linear end at.", _OPTIMIZER))
    weight_decay: float = field(default=0.1, metadata=option("Weight decay of AdamW.", _OPTIMIZER))
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = field(default=1.0, metadata=option("Largest gradient norm; 0: no clipping.", _OPTIMIZER))
    precision: Precision = field(
        default="fp32", metadata=option("fp32, or bf16 with gradients reduced and kept in fp32.", _DATA)
    )
    lora: int = field(default=0, metadata=option("Rank of the adapters, which alone are trained; 0: none.", _LORA))
    lora_alpha: float = field(default=16.0, metadata=option("Adapters are scaled by this / --lora.", _LORA))
    lora_dropout: float = field(default=0.0, metadata=option("Dropout before the adapters.", _LORA))
    lora_targets: str = field(
        default="all-linear", metadata=option("all-linear, or names of modules, with commas.", _LORA)
    )
    activation_checkpointing: bool = field(default=False, metadata=option("Recompute blocks in backward.", _DATA))
    save_every: int = field(default=0, metadata=option("Steps between checkpoints; 0: only at the end.", _FILES))
    resume: str | None = field(default=None, metadata=option("Checkpoint, or output folder (its latest).", _FILES))
    export: str | None = field(
        default=None,
        metadata=option("New folder for the model, or under --lora the adapter, and the tokenizer.", _FILES),
    )
    merge: bool = field(default=False, metadata=option("Export the model with the adapter added in.", _FILES))
    seed: int = field(default=0, metadata=option("Seeds weights, sample order and the planner's ties.", _WORK))
    reproducible: bool = field(default=False, metadata=option("fp64 accumulators under the odc arms.", _RUNTIME))
    accumulate: Accumulate = field(
        default="server",
        metadata=option("Who adds pushed gradients under the odc arms: server or direct.", _RUNTIME),
    )
    timeout_s: float = field(
        default=600.0, metadata=option("Seconds to wait for a rank without progress.", _RUNTIME, "--timeout")
    )
    recover: int = field(
        default=0,
        metadata=option("Deaths of ranks to survive, each at the price of a step; 0: the first ends it.", _RUNTIME),
    )
    keep: Keep = field(
        default="host",
        metadata=option(
            "What --recover survives: host (while a rank of each host lives) or buddy (the end of a host).", _RUNTIME
        ),
    )
    fewest: int = field(
        default=0,
        metadata=option("Go on with so many ranks or more when --recover is used up; 0: do not.", _RUNTIME),
    )
    rejoin_s: float = field(
        default=60.0,
        metadata=option("Seconds to wait for a rank before --fewest goes on without it.", _RUNTIME, "--rejoin"),
    )
    slow: str | None = field(
        default=None,
        metadata=option(
            "RANK:FACTOR, with commas: emulate slower devices by sleeping after each microbatch.", _RUNTIME
        ),
    )
    cache: str | None = field(
        default=None, metadata=option("Folder for tokenizers and ids. (default: ~/.cache/odc)", _DATA)
    )
    spans: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_fields(self, _LEAST)
        for one in fields(self):
            other, stated = _NEEDS.get(one.name, ("", ""))
            if other and getattr(self, one.name) != one.default and not getattr(self, other):
                raise ConfigError(f"{one.name} needs {stated}")
        if self.lr == 0 or self.timeout_s == 0 or self.eps == 0:
            raise ConfigError("lr, eps and timeout_s must be above 0")
        if self.min_lr > 1:
            raise ConfigError(f"min_lr is a fraction of lr, between 0 and 1, not {self.min_lr!r}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must be two numbers of at least 0 and below 1, not {self.betas!r}")
        if self.lora_dropout >= 1:
            raise ConfigError(f"lora_dropout must be below 1, not {self.lora_dropout!r}")
        if self.merge and (not self.lora or self.export is None):
            raise ConfigError("merge adds adapters (--lora) into an exported model (--export)")
        if self.warmup > self.steps:
            raise ConfigError(f"warmup ({self.warmup} steps) is longer than the job ({self.steps} steps)")
        if self.slow is not None and self.device != "cpu":
            raise ConfigError("slow emulates a slower processor; it says nothing about a CUDA device")
        if self.recover and (self.device != "cpu" or self.arm not in ("odc", "odc-equal", "odc-dynamic")):
            raise ConfigError(f"recover is for arms odc, odc-equal and odc-dynamic on the cpu, not {self.arm}")
        if self.fewest and (self.fewest > self.ranks or self.rejoin_s <= 0):
            raise ConfigError(f"fewest is at most the job's {self.ranks} ranks, and rejoin_s above 0")
        self.slowed()
        self._check_nodes()

    def _check_nodes(self) -> None:
        if not arm_named(self.arm).within_node:
            return
        if self.ranks < 2 * self.per_node or self.ranks % self.per_node:
            raise ConfigError(
                f"arm {self.arm} shards over a 2-D mesh: it needs at least 2 nodes of per_node={self.per_node} ranks, "
                f"so {2 * self.per_node} ranks or another multiple of {self.per_node}, not {self.ranks}"
            )

    @property
    def longest(self) -> int:
        """Most tokens of a document: under an arm that splits, those of as many largest pieces as ranks can hold."""
        if not arm_named(self.arm).splits or self.long != "error":
            return self.max_tokens
        return longest_in_pieces(self.max_tokens, most_pieces(self.ranks))

    @property
    def piece_floor(self) -> int:
        """Fewest tokens of a piece."""
        return self.least_piece or (256 if self.device == "cpu" else 2048)

    def settings(self) -> Settings:
        """The runtime's settings under the odc arms; only the dynamic one has a queue."""
        # Room for the largest microbatches that a rank may offer: as many as its part of the samples, however few ranks
        # are left.
        samples = -(-self.minibatch_size // (self.fewest or self.ranks))
        room = 64 + samples * (_OFFER_BYTES + self.max_tokens * _OFFER_BYTES_PER_TOKEN)
        return Settings(
            reproducible=self.reproducible,
            accumulate=self.accumulate,
            timeout_s=self.timeout_s,
            queue_bytes=room if arm_named(self.arm).dynamic else 0,
        )

    def slowed(self) -> dict[int, float]:
        """Slowdown by rank, of `slow`."""
        found = factors_by_rank(self.slow) if self.slow is not None else {}
        if any(not 0 <= rank < self.ranks or not 1 <= factor < math.inf for rank, factor in found.items()):
            raise ConfigError(f"slow needs ranks below {self.ranks} and factors of at least 1, not {self.slow!r}")
        return found

    def with_(self, **changes: Any) -> JobConfig:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"betas": list(self.betas)}


# Of options that do nothing without another one: that one, and what it is.
_NEEDS = {
    "valid_every": ("valid", "a validation set (--valid)"),
    "save_every": ("output", "an output folder (--output)"),
    "keep": ("recover", "a job that survives deaths (--recover)"),
    "fewest": ("recover", "a job that survives deaths (--recover)"),
    "rejoin_s": ("fewest", "a job that goes on with fewer ranks (--fewest)"),
    **dict.fromkeys(("lora_alpha", "lora_dropout", "lora_targets"), ("lora", "adapters (--lora)")),
}
# Of one microbatch in the queue, at most: names, table and alignment; ids, labels and lengths of int32.
_OFFER_BYTES, _OFFER_BYTES_PER_TOKEN = 1024, 12
_LEAST = dict.fromkeys(("ranks", "steps", "minibatch_size"), 1) | {"per_node": 2, "max_tokens": 2, "vocab": 257}


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
    rollout: Rollouts = field(
        default="hf", metadata=option("What generates: hf (Hugging Face) or vllm (docs/rl.md).", "Rollout")
    )
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
    kl: float = field(default=0.0, metadata=option("Weight of the KL to the initial model.", "Objective"))
    lr: float = field(default=5e-3, metadata=option("Learning rate.", "Objective"))
    weight_decay: float = 0.0
    clip: float = field(default=1.0, metadata=option("Largest gradient norm; 0: no clipping.", "Optimizer"))
    seed: int = field(default=0, metadata=option("Seeds weights, prompts and sampling.", "Work"))
    reproducible: bool = field(default=False, metadata=option("fp64 accumulators under the odc arms.", "Runtime"))
    second_buffer: bool = field(
        default=False, metadata=option("Keep two published versions for the rollout.", "Rollout")
    )
    timeout_s: float = field(
        default=600.0, metadata=option("Seconds to wait for a rank or rollout.", "Runtime", "--timeout")
    )
    recover: int = field(
        default=0,
        metadata=option("Deaths of ranks to survive, each at the price of a step; 0: the first ends it.", "Runtime"),
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
        check_fields(self, _LEAST_OF_GRPO)
        if self.lr == 0 or self.timeout_s == 0:
            raise ConfigError("lr and timeout_s must be above 0")
        if self.clip_low >= 1 or self.clip_dual <= 1:
            raise ConfigError("clip_low must be below 1 and clip_dual above 1")
        if self.minibatches > self.prompts:
            raise ConfigError(f"minibatches ({self.minibatches}) must not be more than prompts ({self.prompts})")
        if self.balance == "verl" and self.arm == "odc-split":
            raise ConfigError("balance verl splits no sample; take another arm than odc-split")
        pieces = most_pieces(self.ranks) if self.arm == "odc-split" else 1
        if self.longest > longest_in_pieces(self.max_tokens, pieces):
            raise ConfigError(
                f"max_tokens ({self.max_tokens}{f' in each of {pieces} pieces' if pieces > 1 else ''}) must hold a "
                f"prompt and a response ({self.prompt_tokens} + {self.response_tokens} tokens)"
            )
        if self.rollout == "vllm" and not self.on_demand:
            raise ConfigError(f"rollout vllm reads the weights of odc's ranks: take an arm of odc, not {self.arm}")
        if self.save_every and self.folder is None:
            raise ConfigError("save_every needs a folder for checkpoints (--folder)")
        if self.recover and self.arm not in ("odc", "odc-equal"):
            raise ConfigError(f"recover is for arms odc and odc-equal, not {self.arm}")
        sizes = {self.prompts // self.minibatches, -(-self.prompts // self.minibatches)}
        if self.balance == "verl" and any(self.group * prompts % self.ranks for prompts in sizes):
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


_LEAST_OF_GRPO = dict.fromkeys(
    ("ranks", "steps", "prompts", "prompt_tokens", "response_tokens", "minibatches", "least_piece"), 1
) | {"group": 2, "max_tokens": 2}


def factors_by_rank(text: str) -> dict[int, float]:
    """RANK:FACTOR, several with commas, as `--slow` is written; ConfigError for anything else."""
    try:
        return {int(rank): float(factor) for rank, factor in (entry.split(":") for entry in text.split(","))}
    except ValueError:
        raise ConfigError(f"slow must be RANK:FACTOR, for example 1:1.5, not {text!r}") from None


def check_fields(config: object, least: Mapping[str, int]) -> None:
    """Raises `ConfigError` naming the first field of the dataclass `config` whose value its type does not allow.

    Choices are as annotated, whole numbers at least the one in `least` (0 by default), others finite and 0 or more.
    """
    for name, kind in get_type_hints(type(config)).items():
        value, from_ = getattr(config, name), least.get(name, 0)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(f"{name} must be one of {', '.join(map(str, get_args(kind)))}, not {value!r}")
        if kind is int and (type(value) is not int or value < from_):
            raise ConfigError(f"{name} must be a whole number, {from_} or more, not {value!r}")
        if kind is float and (not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0):
            raise ConfigError(f"{name} must be a finite number, 0 or more, not {value!r}")


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(ranks: int) -> int:
    """Compute threads of one rank when `ranks` share this machine, at least 1."""
    return max(1, cores() // ranks)
