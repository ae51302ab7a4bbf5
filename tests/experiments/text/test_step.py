"""Whole jobs on two ranks: what every arm must agree on, resuming, and what stops a job."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.tiny_job import CONFIG, complete, rank_job, run_job, tiny_job
from support.word_model import model_folder, write_rows

from odc.arms import ARM_NAMES, ARMS, ArmName
from odc.errors import ConfigError, DataError, NonFiniteLossError
from odc.experiments.config import JobConfig
from odc.experiments.job import run as run_workload
from odc.experiments.preflight import preflight
from odc.experiments.results import JobResult, SkippedStep
from odc.experiments.text import step as trainer
from odc.experiments.text.step import TextStep, TextTrainer, TextWorkload
from odc.fsdp import shutdown
from odc.trace import recorder

Pools = Callable[[int], Any]


def prepare(config: JobConfig) -> None:
    TextWorkload(config).prepare()


def run(config: JobConfig) -> list[JobResult[TextStep]]:
    return run_workload(TextWorkload(config))


pytest.importorskip("transformers", reason="needs the train extra")


ONE_NODE = tuple(name for name in ARM_NAMES if not ARMS[name].within_node)
BOTH = ("fsdp2", "odc")  # what an option changes in a model does not ask for the plan
KINDS = ("fsdp2", "fsdp2-resident", "odc-equal", "odc", "odc-dynamic")  # one arm of each transport and of each planner
OPTIONS: tuple[dict[str, Any], ...] = ({"precision": "bf16"}, {"activation_checkpointing": True})


@pytest.mark.parametrize(
    ("changes", "arms"),
    [
        ({}, ONE_NODE),
        *((option, BOTH) for option in OPTIONS),
        *(pytest.param(option, KINDS, marks=pytest.mark.thorough) for option in OPTIONS),
    ],
)
def test_all_arms_train_alike(ranks: Pools, tmp_path: Path, changes: dict[str, Any], arms: tuple[ArmName, ...]) -> None:
    runs = {arm: ranks(2).run(run_job, tiny_job(tmp_path, arm=arm, **changes)) for arm in arms}
    reference = runs["fsdp2"][0].steps
    assert len(reference) == 3 and reference[-1].loss < reference[0].loss
    near = {"rel": 2e-2} if changes.get("precision") == "bf16" else {"rel": 2e-5}
    for arm, results in runs.items():
        for mine, theirs in zip(results[0].steps, results[1].steps, strict=True):
            same = {"step_s": 0.0, "bubble": None}
            assert replace(mine, **same) == replace(theirs, **same), "ranks disagree on a step"
        for step, expected in zip(results[0].steps, reference, strict=True):
            assert (step.samples, step.tokens, step.label_tokens) == (6, expected.tokens, expected.label_tokens), arm
            assert step.loss == pytest.approx(expected.loss, **near), arm
            assert step.norm == pytest.approx(expected.norm, **near), arm
            assert step.bubble is not None and 0 < step.bubble < 1, arm
        if ARMS[arm].transport != "collectives":
            assert {step.dummies for step in results[0].steps} == {2 if arm == "fsdp2-resident" else 0}, arm
    assert all(len(set(step.counts)) == 1 for step in reference), "fsdp2 needs equal counts"


@pytest.mark.thorough
def test_two_nodes_of_two_ranks_train_like_four_ranks(ranks: Pools, tmp_path: Path) -> None:
    arms: tuple[ArmName, ...] = ("fsdp2", "fsdp2-hybrid", "odc-hybrid")
    runs = {arm: ranks(4).run(run_job, tiny_job(tmp_path, arm=arm, ranks=4, minibatch_size=12)) for arm in arms}
    world = tiny_job(tmp_path, arm="odc-hybrid", ranks=4, minibatch_size=12, optimizer_sharding="world")
    runs["world"] = ranks(4).run(run_job, world)
    reference = runs["fsdp2"][0].steps
    for arm, results in runs.items():
        for mine, *others in zip(*(result.steps for result in results), strict=True):
            assert all((mine.loss, mine.norm) == (theirs.loss, theirs.norm) for theirs in others), arm
        assert [step.loss for step in results[0].steps] == pytest.approx([s.loss for s in reference], rel=2e-5), arm
        assert [step.norm for step in results[0].steps] == pytest.approx([s.norm for s in reference], rel=2e-5), arm


def pause(seed: str, longest_s: float) -> Callable[..., None]:
    draw = random.Random(seed)
    return lambda *_: time.sleep(draw.random() * longest_s)


def under_pauses(rank: int, world: int, config: JobConfig, seeds: list[int], pause_s: float) -> list[Any]:
    """(losses, norms, digest of the parameters and counts) of the same job, each time with other pauses.

    They last up to `pause_s`, and ten times that on one rank.
    """
    found = []
    for seed in seeds:
        job = rank_job(config)
        job.trainer.model.register_forward_pre_hook(
            pause(f"{seed} {rank}", pause_s * (10 if rank == seed % world else 1))
        )
        steps = job.run().steps
        digest = hashlib.sha256()
        for parameter in job.trainer.model.parameters():
            digest.update(parameter.full_tensor().detach().numpy().tobytes())
        dist.barrier()
        shutdown()
        counts = [step.counts for step in steps]
        found.append(([step.loss for step in steps], [step.norm for step in steps], digest.hexdigest(), counts))
    return found


def test_a_queue_gives_the_same_bits_on_any_rank(ranks: Pools, tmp_path: Path) -> None:
    """Dropout too belongs to a microbatch, not to a rank."""
    model = tmp_path / "dropout.json"
    model.write_text(json.dumps(CONFIG | {"attention_dropout": 0.2}))
    config = tiny_job(tmp_path, arm="odc-dynamic", model=str(model), reproducible=True, minibatch_size=12)
    for pause_s in (0.003, 0.03, 0.3):  # the slower the machine, the longer a pause must be to matter
        first, second = ranks(2).run(under_pauses, config, [0, 1, 2], pause_s)
        assert first == second, "ranks disagree"
        assert len({str(found[:3]) for found in first}) == 1, first
        assert all(sum(counts) == sum(first[0][3][step]) for found in first for step, counts in enumerate(found[3]))
        if len({str(found[3]) for found in first}) > 1:
            return
    pytest.fail("the pauses changed nothing: this shows nothing")


def slowed(rank: int, world: int, config: JobConfig) -> tuple[list[list[int]], float]:
    """Microbatches by step and rank; and seconds of sleep for each second of processor time of microbatches."""
    job, slept, used = rank_job(config), list[float](), list[float]()
    slow_down = TextTrainer._slow_down

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    def measured(self: TextTrainer, computed_s: float) -> None:
        slow_down(self, computed_s)
        used.append(computed_s)

    clock = SimpleNamespace(**{**vars(time), "sleep": sleep})
    with mock.patch.object(trainer, "time", clock), mock.patch.object(TextTrainer, "_slow_down", measured):
        steps = complete(job).steps
    return [step.counts for step in steps], sum(slept) / sum(used)


def test_a_slow_rank_sleeps_in_proportion_and_computes_less(ranks: Pools, tmp_path: Path) -> None:
    config = tiny_job(tmp_path, arm="odc-dynamic", minibatch_size=24, slow="1:40")
    (counts, awake), (_, asleep) = ranks(2).run(slowed, config)
    assert asleep == pytest.approx(39)
    assert awake == 0
    assert sum(by_rank[1] for by_rank in counts) < sum(by_rank[0] for by_rank in counts)


def run_with_little_room(rank: int, world: int, config: JobConfig) -> JobResult[TextStep]:
    """Rank 0 keeps five spans, which no step fits into."""
    mine = recorder()
    whole = mine._spans
    try:
        if rank == 0:
            mine._spans = deque(maxlen=5)
        return run_job(rank, world, config)
    finally:
        mine._spans = whole


def test_a_step_that_the_recorder_cannot_hold_has_no_bubble(ranks: Pools, tmp_path: Path) -> None:
    for result in ranks(2).run(run_with_little_room, tiny_job(tmp_path)):
        assert [step.bubble for step in result.steps] == [None] * 3
        assert "step 3: loss" in result.summary()


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_resumed(ranks: Pools, tmp_path: Path) -> None:
    output = tmp_path / "out"
    config = tiny_job(tmp_path, steps=4, save_every=2, output=str(output))
    prepare(config)
    whole, _ = ranks(2).run(run_job, config)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=rf"^output: {output} holds a run; go on with it by --resume {output}, or "):
        run(config)
    shutil.copytree(output, tmp_path / "copy")
    for other in (output / "checkpoints" / "step-00000002", tmp_path / "copy"):
        with pytest.raises(ConfigError, match=rf"^output: {output} holds a run whose last checkpoint is not --resume"):
            run(config.with_(resume=str(other)))
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}

    # Killed after step 3, in the middle of a line: the checkpoint is that of step 2.
    lines = (output / "steps.jsonl").read_text().splitlines(keepends=True)
    (output / "steps.jsonl").write_text("".join(lines[:3]) + lines[3][:9])
    (output / "checkpoints" / "latest").write_text("step-00000002\n")
    resumed = config.with_(resume=str(output))
    prepare(resumed)
    ranks(2).run(run_job, resumed)
    steps = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["loss"] for step in steps] == pytest.approx([step.loss for step in whole.steps], rel=1e-5)


class Spoiled(TextTrainer):
    """From step 2 (counted from 0) on, rank 1's summed loss is NaN though its gradients are fine."""

    def run(self, step: int, samples: list[int], between: Callable[[], None] | None = None) -> TextStep | SkippedStep:
        self.now = step
        return super().run(step, samples, between)

    def _minibatch(self, *args: Any) -> float:
        found = super()._minibatch(*args)
        return math.nan if dist.get_rank() == 1 and self.now == 2 else found


def poisoned(rank: int, world: int, config: JobConfig) -> tuple[str, int]:
    """The error of a job whose third step has a NaN loss on rank 1, and how often its optimizer stepped."""
    job = rank_job(config)
    job.trainer.__class__ = Spoiled
    with pytest.raises(NonFiniteLossError) as caught:
        job.run()
    steps = {int(state["step"]) for state in job.trainer.optimizer.state.values()}
    assert len(steps) == 1, steps
    return str(caught.value), steps.pop()


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_update(ranks: Pools, tmp_path: Path) -> None:
    for message, steps in ranks(2).run(poisoned, tiny_job(tmp_path, arm="fsdp2", steps=4)):
        assert message.startswith("step 3: the loss of rank 1 is nan; nothing was updated")
        assert steps == 2


def test_one_rank_is_enough(ranks: Pools, tmp_path: Path) -> None:
    for arm in ("fsdp2", "odc"):
        result = ranks(1).run(run_job, tiny_job(tmp_path, arm=arm, ranks=1, steps=2))[0]
        assert [len(step.counts) for step in result.steps] == [1, 1]
        assert result.peak_bytes > result.baseline_bytes > 0


def test_a_model_may_lack_ids_of_its_tokenizer_that_never_occur(ranks: Pools, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = model_folder(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([f"<image {number}>" for number in range(CONFIG["vocab_size"])], special_tokens=True)
    tokenizer.save_pretrained(folder)
    chat = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "none"}]
    data = write_rows(tmp_path / "chats.jsonl", [{"messages": chat}] * 6)
    config = tiny_job(tmp_path, model=str(folder), tokenizer="auto", data=str(data), steps=1)
    assert len(ranks(2).run(run_job, config)[0].steps) == 1


def test_empty_data_and_bad_folders_are_refused_before_ranks_start(tmp_path: Path) -> None:
    good = tiny_job(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no documents"):
        run(good.with_(data=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match="output: cannot write to"):
        run(good.with_(output=str(tmp_path / "data.jsonl")))
    with pytest.raises(ConfigError, match="model: there is no file"):
        run(good.with_(model=str(tmp_path / "none.json")))
    with pytest.raises(ConfigError, match="is no file or folder, and no shipped config: qwen2-demo"):
        run(good.with_(model="qwen2-unknown"))
    with pytest.raises(ConfigError, match="resume: no checkpoint"):
        run(good.with_(resume=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"export: .* is not empty"):
        run(good.with_(export=str(tmp_path), output=str(tmp_path / "unmade")))
    assert not (tmp_path / "unmade").exists()
    (tmp_path / "probed").mkdir()
    for name in (".odc-probe-1", ".nfs0001"):  # of another rank that looks whether it can write there
        (tmp_path / "probed" / name).touch()
    preflight(good.with_(export=str(tmp_path / "probed")))
    (tmp_path / "half" / ".partial").mkdir(parents=True)
    (tmp_path / "half" / "model.safetensors").touch()
    preflight(good.with_(export=str(tmp_path / "half")))  # an export that was interrupted is written again
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "steps.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="out holds a run that left no checkpoint to --resume; name a new folder"):
        run(good.with_(output=str(tmp_path / "out")))
