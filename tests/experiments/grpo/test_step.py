"""Whole GRPO jobs on two ranks and a rollout process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import RankPool
from support.small_model import toy, train, train_each

from odc.errors import ConfigError, OdcError
from odc.experiments.grpo import GrpoConfig, GrpoResult, GrpoStep, rollout, run, run_rank
from odc.experiments.grpo.rollout import Rollout, RolloutError
from odc.fsdp import shutdown

Pools = Callable[[int], RankPool]


def known(result: GrpoResult) -> list[GrpoStep]:
    """What must agree: all but times, versions and counts."""
    times = {"rollout_s": 0.0, "train_s": 0.0, "step_s": 0.0, "bubble": None}
    return [replace(step, version=None, counts=[], **times) for step in result.steps]


def test_fsdp2_and_odc_agree_step_for_step(ranks: Pools, tmp_path: Path) -> None:
    """Two minibatches a rollout and a KL term; then plans that differ, which change rounding only."""
    config = toy(tmp_path, minibatches=2, kl=0.05)
    arms = [("fsdp2", "arm"), ("odc-equal", "arm"), ("fsdp2", "verl"), ("odc", "arm")]
    configs = [config.with_(arm=arm, balance=balance) for arm, balance in arms]
    mine, other = ranks(2).run(train_each, configs)
    assert [known(result) for result in mine] == [known(result) for result in other], "ranks know the same"
    collective, on_demand, *rest = (known(result) for result in mine)
    assert len(collective) == 3 and collective[0].kl < collective[-1].kl
    for others in (on_demand, *rest):
        for expected, found in zip(collective, others, strict=True):
            assert (found.reward, found.response_tokens) == (expected.reward, expected.response_tokens)
            assert [found.loss, found.kl, found.norm] == pytest.approx(
                [expected.loss, expected.kl, expected.norm], rel=1e-4, abs=1e-6
            )
    assert [step.version for step in mine[0].steps] == [None] * 3
    assert [step.version for step in mine[1].steps] == [2, 4, 6], "publish, then one version for each later minibatch"


def test_long_responses_may_be_split(ranks: Pools, tmp_path: Path) -> None:
    """Samples over the cap, which no other arm takes, run as pieces; the gradients are those of whole samples."""
    fields: dict[str, Any] = {"minibatches": 2, "kl": 0.05, "prompts": 4, "group": 2, "lengths": "drawn"}
    whole = toy(tmp_path, response_tokens=90, max_tokens=96, **fields)
    split = whole.with_(arm="odc-split", max_tokens=50, least_piece=8)
    mine, other = ranks(2).run(train_each, [whole, split])
    assert known(mine[1]) == known(other[1]), "ranks know the same"
    longest = [step.longest for step in mine[1].steps]
    assert max(longest) + whole.prompt_tokens > split.max_tokens, "nothing had to be split"
    for expected, found in zip(known(mine[0]), known(mine[1]), strict=True):
        assert (found.reward, found.response_tokens) == (expected.reward, expected.response_tokens)
        assert [found.loss, found.kl, found.norm] == pytest.approx(
            [expected.loss, expected.kl, expected.norm], rel=1e-4, abs=1e-6
        )


@pytest.mark.thorough
def test_the_reward_rises(ranks: Pools, tmp_path: Path) -> None:
    config = toy(tmp_path, steps=16, minibatches=2, prompts=12)
    (result,), _ = ranks(2).run(train_each, [config])
    rewards = [step.reward for step in result.steps]
    assert rewards[0] < 0.55
    assert min(rewards[-3:]) > rewards[0] + 0.2, rewards


def train_beside_a_process(rank: int, world: int, config: GrpoConfig) -> GrpoResult:
    rollout.Rollout = Rollout  # type: ignore[misc]
    try:
        return train(config)
    finally:
        dist.barrier()
        shutdown()


@pytest.mark.thorough
def test_a_process_that_generates_a_step_ahead(ranks: Pools, tmp_path: Path) -> None:
    log, spans = tmp_path / "steps.jsonl", tmp_path / "spans"
    spans.mkdir()
    config = toy(tmp_path, lag=1, second_buffer=True, steps=4, output=str(log), spans=str(spans))
    result, _ = ranks(2).run(train_beside_a_process, config)
    versions = [step.version for step in result.steps]
    assert versions[0] == 2 and versions == sorted(versions)  # type: ignore[type-var]
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4]
    assert sorted(path.name for path in spans.iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]


def train_with_a_rollout_that_dies(rank: int, world: int, config: GrpoConfig) -> str:
    collect = Rollout.collect

    def killed(self: Rollout, *unused: object) -> object:
        self._process.kill()
        return collect(self)

    rollout.Rollout = Rollout  # type: ignore[misc]
    Rollout.collect = killed  # type: ignore[assignment, method-assign]
    try:
        train(config)
    except RolloutError as error:
        return str(error)
    finally:
        Rollout.collect = collect  # type: ignore[method-assign]
        shutdown()
    return "no error"


def test_a_rollout_process_that_dies_is_named(ranks: Pools, tmp_path: Path) -> None:
    (message,) = ranks(1).run(train_with_a_rollout_that_dies, toy(tmp_path, ranks=1))
    assert message == "the rollout process ended with code -9"


def test_an_error_of_the_rollout_process_is_passed_on(tmp_path: Path) -> None:
    """One that comes before the process has loaded transformers."""
    config = toy(tmp_path)
    (tmp_path / "model.json").unlink()
    with Rollout(config, [], None) as rollout:
        rollout.ask(0, [[1, 2]], weights={})
        with pytest.raises(RolloutError, match="ConfigError: model: there is no file"):
            rollout.collect()
    assert issubclass(RolloutError, OdcError)


@pytest.mark.parametrize("start", [run, run_rank])
def test_a_file_that_holds_a_run_is_refused_before_ranks_start(start: Callable[..., object], tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=rf"^output: {log} holds the steps of a run already; name a new file$"):
        start(toy(tmp_path, output=str(log)))
    assert log.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_resumed_job_goes_on_bit_for_bit(ranks: Pools, tmp_path: Path, lag: int) -> None:
    """With a lag, the checkpoint holds the samples that older weights have drawn for the next step."""
    folder, log = tmp_path / "out", tmp_path / "steps.jsonl"
    straight = toy(
        tmp_path, steps=4, lag=lag, minibatches=2, kl=0.05, reproducible=True, folder=str(folder), save_every=2
    )
    first = str(folder / "checkpoints" / "step-00000002")
    resumed = straight.with_(folder=str(tmp_path / "again"), resume=first, output=str(log))
    for expected, found in ranks(2).run(train_each, [straight, resumed]):
        assert len(expected.steps) == 4 and known(found) == known(expected)[2:]
        assert found.checkpoint == str(tmp_path / "again" / "checkpoints" / "step-00000004")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4] and all(0 <= line["bubble"] < 1 for line in lines)


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    config = toy(tmp_path, folder=str(tmp_path / "out"))
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "latest").write_text("step-00000001\n")
    with pytest.raises(ConfigError, match=r"^folder: .* holds a run that left no checkpoint to --resume"):
        run(config)
    with pytest.raises(ConfigError, match="resume: no checkpoint in"):
        run(config.with_(folder=None, resume=str(tmp_path)))
    with pytest.raises(ConfigError, match="save_every needs a folder"):
        config.with_(folder=None, save_every=1)
