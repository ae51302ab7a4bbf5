"""`odc train-mm`: a multimodal model, trained as one job or under every balance and transport in one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from odc.cli.compare import Figures, Repeats, Skip, carry_out, chosen_arms, new_folder, progress
from odc.cli.files import writing
from odc.cli.launched import carry_out_job, given_by_launcher, join_launcher, refuse_launcher, under_launcher
from odc.cli.options import options_from
from odc.errors import ConfigError
from odc.experiments.config import JobConfig

if TYPE_CHECKING:
    from odc.experiments.multimodal.workload import MultimodalWorkload

_MODEL = "mm-demo"
_DEMO: dict[str, Any] = {"steps": 5, "minibatch_size": 12, "max_tokens": 8192, "lr": 1e-3}
_ARM = "TRANSPORT/BALANCE: fsdp2 or odc; none, llm-only, all-pad, all-rmpad, all-gather or full."
_TEXT_ONLY = (
    "tokenizer",
    "vocab",
    "precision",
    "activation_checkpointing",
    "cache",
    "device",
    "long",
    "slow",
    "optimizer_sharding",
)
_NOT_YET = (
    *("least_piece", "valid", "valid_every", "lora", "lora_alpha", "lora_dropout", "lora_targets", "merge"),
    *("recover", "keep", "fewest", "rejoin_s"),
)


@options_from(
    JobConfig,
    without=("arm", "export", *_TEXT_ONLY, *_NOT_YET),
    optional=("data",),
    helps={
        "data": "JSONL of `messages` with text, image and audio parts; files relative to it.",
        "max_tokens": "Most positions of one example.",
    },
)
def train_mm(
    given: dict[str, Any],
    model: Annotated[str, Option(help="Multimodal config (JSON), or a shipped one's name.")] = _MODEL,
    demo: Annotated[
        bool, Option("--demo", help="On a corpus made up for it, whose examples differ wildly in their modalities.")
    ] = False,
    arm: Annotated[str | None, Option(help=f"Train one job under this arm. {_ARM}", show_default="compare")] = None,
    arms: Annotated[str | None, Option(help="Compare these arms, with commas.", show_default="all")] = None,
    per_node: Annotated[int, Option(help="Ranks of one declared node; 0: those of a host.")] = 1,
    repeats: Repeats = 1,
    skip: Skip = 1,
    output: Annotated[
        str | None,
        Option(
            help="Folder for checkpoints and steps.jsonl of one arm, or for a comparison's files.",
            show_default="none, or runs/train-mm-DATE",
        ),
    ] = None,
    json: Figures = None,
    plan: Annotated[str | None, Option(hidden=True, show_default="none")] = None,
) -> None:
    """Train a vision tower, an audio encoder and a language model: one arm, or every balance and transport compared.

    One arm may be saved and resumed, and runs under torchrun, srun and the like; a comparison prints a table.
    """
    from odc.experiments.preflight import require

    if plan is not None:
        raise ConfigError(f"plan: train-mm balances each phase and splits no sample; choose one by --arm. {_ARM}")
    for package in ("transformers", "PIL", "soundfile"):
        require(package, "multimodal", "train-mm")
    _refuse_unknown([arm] if arm is not None else arms.split(",") if arms is not None else [])
    fields = {"model": model, **(_DEMO if demo else {}), **given}
    folder = Path(output or new_folder("train-mm"))
    made_up = "data" not in fields
    if made_up:
        fields["data"] = _place_of_demo(demo, folder)
    if arm is None:
        _compare(fields, made_up, per_node, arms, repeats, skip, folder, Path(json or folder / "train-mm.json"))
    elif arms is not None or json is not None or (repeats, skip) != (1, 1):
        raise ConfigError("arm trains one job; --arms, --repeats, --skip and --json are options of a comparison")
    else:
        _train(fields | {"output": output}, made_up, per_node, arm)


def _refuse_unknown(arms: list[str]) -> None:
    from odc.experiments.multimodal.workload import MultimodalWorkload

    for arm in arms:
        if arm.strip() not in MultimodalWorkload.arms:
            raise ConfigError(f"arm must be one of {', '.join(MultimodalWorkload.arms)}, not {arm.strip()!r}")


def _place_of_demo(demo: bool, folder: Path) -> str:
    """The path of the demo's corpus, which is still to be written."""
    if not demo:
        raise ConfigError("data: say which (--data), or run the demo (--demo)")
    if (launcher := under_launcher()) is not None:
        raise ConfigError(f"demo: its corpus is made before ranks start; under {launcher} say which data (--data)")
    return str(folder / "corpus" / "corpus.jsonl")


def _make_up(workload: MultimodalWorkload) -> None:
    """Writes the demo's corpus where the job reads it, once nothing that was asked for is refused."""
    from odc.experiments.multimodal.corpus import CorpusConfig, write_corpus

    workload.check()
    job = workload.config.job
    folder = Path(job.data).parent
    with writing("output", folder):
        write_corpus(folder, CorpusConfig(seed=job.seed))


def _compare(
    fields: dict[str, Any],
    made_up: bool,
    per_node: int,
    arms: str | None,
    repeats: int,
    skip: int,
    folder: Path,
    figures: Path,
) -> None:
    refuse_launcher("a comparison by odc train-mm")
    show = progress("train-mm")
    show(f"figures and pictures go to {folder}")
    from odc.experiments.compare import CompareConfig
    from odc.experiments.multimodal.config import MultimodalConfig
    from odc.experiments.multimodal.workload import MultimodalWorkload, table

    workload = MultimodalWorkload(MultimodalConfig(JobConfig(**fields, output=str(folder)), per_node=per_node))
    config = CompareConfig(workload, repeats=repeats, skip=skip, **chosen_arms(arms))
    if made_up:
        _make_up(workload)
    carry_out(config, figures, show, lambda found, _: [table(found)])


def _train(fields: dict[str, Any], made_up: bool, per_node: int, arm: str) -> None:
    from odc.experiments.multimodal.config import MultimodalConfig
    from odc.experiments.multimodal.workload import MultimodalWorkload

    transport, _, balance = arm.partition("/")
    each = join_launcher(fields)
    if each:
        fields = fields | {"ranks": given_by_launcher(fields)["ranks"]}
    job: Any = JobConfig(**fields, arm=transport)  # type: ignore[arg-type]
    if not each:
        print(f"odc train-mm: {arm}, {job.ranks} ranks, {job.steps} steps", file=sys.stderr, flush=True)
    workload = MultimodalWorkload(MultimodalConfig(job, balance, per_node))  # type: ignore[arg-type]
    if made_up:
        _make_up(workload)
    result = carry_out_job(workload, each)
    if result is not None:
        print(result.summary())
