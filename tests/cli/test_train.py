"""`odc train` as people fine-tune: prompts and completions, a validation set, plans, and what is left at the end."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import odc
from support.tiny_job import CONFIG
from support.word_model import completions, model_folder, transformers_loss, write_rows

from odc.arms import PLANS
from odc.cli.launched import Start
from odc.cli.train import what_is_left
from odc.experiments.config import JobConfig

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")


def steps_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """Of a job on twelve completions, all of them in every minibatch; and four to validate on."""
    write_rows(tmp_path / "train.jsonl", completions(12))
    write_rows(tmp_path / "valid.jsonl", completions(4))
    options = ["--model", model_folder(tmp_path / "model"), "--data", tmp_path / "train.jsonl", "--lr", 1e-2]
    return [*options, "--minibatch-size", 12, "--max-tokens", 64, "--steps", 3, "--cache", tmp_path / "cache"]


def test_losses_are_those_of_transformers(
    options: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the first update on the whole data, and after the last on the validation set, from the export."""
    output, export = tmp_path / "out", tmp_path / "export"
    validate = ["--valid", tmp_path / "valid.jsonl", "--valid-every", 2]
    assert odc("train", *options, *validate, "--output", output, "--export", export, "--schedule", "linear") == 0
    printed = capfd.readouterr()
    assert "12 documents, 4 for validation" in printed.err and "3 steps of 12 are 3 epochs" in printed.err
    assert "is kept" not in printed.err
    from transformers import AutoModelForCausalLM

    first, second, third = steps_of(output)
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    after = AutoModelForCausalLM.from_pretrained(export)
    assert first["loss"] == pytest.approx(transformers_loss(before, tmp_path / "model", completions(12)), rel=1e-5)
    assert third["valid_loss"] == pytest.approx(transformers_loss(after, export, completions(4)), rel=1e-5)
    assert first["valid_loss"] is None and second["valid_loss"] != third["valid_loss"]
    assert f"; validation loss {third['valid_loss']:.4f};" in printed.out
    assert f"\nwrote     {output}/steps.jsonl, {output}/checkpoints/step-00000003, {export}\n" in printed.out
    assert f"step 2: validation loss {second['valid_loss']:.4f}" in printed.err
    assert [step["lr"] for step in (first, second, third)] == pytest.approx([1e-2, 5.5e-3, 1e-3])


@pytest.mark.parametrize(
    ("sizes", "balanced"),
    [
        ({"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}, "by FLOPs"),
        (
            {"model_type": "opt", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24}
            | {"word_embed_proj_dim": 16},
            "by FLOPs",
        ),
        (CONFIG | {"lru_width": 16}, "by tokens alone"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_models_whose_configs_are_unlike_llamas(
    sizes: dict[str, Any], balanced: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file from the hub has none of the fields that are as usual."""
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    data = write_rows(tmp_path / "train.jsonl", completions(4))
    options = ["--model", tmp_path / "config.json", "--data", data, "--tokenizer", "bytes", "--steps", 1]
    assert odc("train", *options, "--cache", tmp_path / "cache", "--output", tmp_path / "out") == 0
    (step,) = steps_of(tmp_path / "out")
    assert step["loss"] > 0
    assert ("balanced by tokens alone" in capfd.readouterr().err) == (balanced == "by tokens alone")


@pytest.mark.thorough
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_and_goes_on_where_it_stopped(
    plan: str, options: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert odc("train", *options, "--plan", plan, "--output", whole) == 0
    assert f"odc train: {PLANS[plan]}, 2 ranks, 3 steps" in capfd.readouterr().err
    assert odc("train", *options, "--plan", plan, "--output", parts, "--save-every", 2) == 0
    (parts / "checkpoints" / "latest").write_text("step-00000002\n")  # as if the third step had never been saved
    assert odc("train", *options, "--plan", plan, "--output", parts, "--resume", parts) == 0
    assert [step["step"] for step in steps_of(parts)] == [1, 2, 3]
    losses = [[step["loss"] for step in steps_of(output)] for output in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Jobs that reach their start, which none does."""
    import odc.experiments.job

    class Result:
        checkpoint = None

        def summary(self) -> str:
            return "not run"

    jobs: list[Any] = []
    monkeypatch.setattr(odc.experiments.job, "run", lambda job: jobs.append(job.config) or [Result()])
    return jobs


def test_what_is_lost_is_named_before_it_starts(
    options: list[object], unstarted: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = {
        (): "NOTHING of this training is kept; keep checkpoints and losses by --output FOLDER, or the model by",
        ("--export", tmp_path / "e"): "no checkpoint is kept; keep checkpoints and losses by --output FOLDER\n",
        ("--output", tmp_path / "o"): "",
    }
    for more, message in kept.items():
        assert odc("train", *options, *more) == 0
        printed = capfd.readouterr().err
        assert message in printed and ("is kept" in printed) == bool(message)


def test_the_last_lines_name_what_is_left_and_what_comes_next() -> None:
    given: dict[str, Any] = {"model": "m", "data": "a b.jsonl", "steps": 4, "timeout_s": 9.0, "reproducible": True}
    config = JobConfig(**given)
    assert what_is_left(given, config, None) == []
    begin = "odc train --model m --data 'a b.jsonl' --timeout 9.0 --reproducible"
    kept = {"output": "run 1", "resume": "old"}
    assert what_is_left(given | kept, config.with_(**kept), "run 1/checkpoints/step-00000004") == [
        "wrote     'run 1/steps.jsonl', 'run 1/checkpoints/step-00000004'",
        f"go on     {begin} --output 'run 1' --steps 8 --resume 'run 1'",
        f"export    {begin} --output 'run 1' --steps 4 --resume 'run 1' --export FOLDER",
    ]
    by = Start(("torchrun", "-m", "odc.cli"), "on every host, as this job")
    lines = what_is_left(given | kept, config.with_(**kept), None, by)
    assert [line.split(" --data")[0] for line in lines[1:]] == [
        "go on     torchrun -m odc.cli train --model m",
        "export    torchrun -m odc.cli train --model m",
        "start     each of these on every host, as this job",
    ]
    assert what_is_left(given, config.with_(export="tuned"), None) == [
        "wrote     tuned",
        "evaluate  lm_eval --model hf --model_args pretrained=tuned --tasks arc_easy",
    ]
    adapter = config.with_(export="tuned", lora=4)
    assert what_is_left(given, adapter, None)[1].endswith("--model_args pretrained=m,peft=tuned --tasks arc_easy")


def test_more_steps_need_no_export_to_merge_into(
    options: list[object], unstarted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {"model": "m", "data": "d", "output": "run", "lora": 4}
    given = kept | {"merge": True, "export": "tuned"}
    (line,) = [one for one in what_is_left(given, JobConfig(**given), None) if one.startswith("go on ")]
    command = shlex.split(line)[2:]
    assert command == shlex.split("odc train --model m --data d --output run --lora 4 --steps 20 --resume run")
    assert odc(*command[1:]) == 0
    assert unstarted.pop() == JobConfig(**kept, steps=20, resume="run")


@pytest.mark.thorough
def test_the_last_lines_are_commands_that_run(
    options: list[object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """First the export of what was trained, then more steps, in the order of use."""
    assert odc("train", *options, "--output", tmp_path / "out") == 0
    lines = capfd.readouterr().out.splitlines()
    (export,) = [shlex.split(line)[2:] for line in lines if line.startswith("export ")]
    (more,) = [shlex.split(line)[2:] for line in lines if line.startswith("go on ")]
    assert odc(*export[:-1], tmp_path / "tuned") == 0
    assert (tmp_path / "tuned" / "config.json").is_file()
    assert odc(*more[1:]) == 0
    assert [step["step"] for step in steps_of(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]


def test_a_plan_is_short_for_an_arm(
    options: list[object], unstarted: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    for plan, arm in PLANS.items():
        assert odc("train", *options, "--plan", plan) == 0
        assert unstarted.pop().arm == arm
    assert odc("train", *options) == 0
    assert unstarted.pop().arm == PLANS["lb-mini"], "the default, as in --help"
    capfd.readouterr()
    assert odc("train", *options, "--plan", "best") == 2
    assert "odc: plan must be one of lb-mini, " in capfd.readouterr().err
    assert odc("train", *options, "--plan", "dynamic", "--arm", "odc") == 2
    assert "give --plan or --arm, not both" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("missing", "more", "message"),
    [
        ("transformers", [], "training a model needs transformers: pip install -e '.[train]' in a clone of odc"),
        ("peft", ["--lora", 4], "lora needs peft: pip install -e '.[lora]'"),
        ("pyarrow", ["--valid", "valid.parquet"], "valid: reading Parquet needs pyarrow: pip install -e '.[parquet]'"),
        (
            "datasets",
            ["--data", "saved"],
            "reading a datasets folder needs datasets: pip install -e '.[datasets]'",
        ),
        (None, ["--valid", "none.jsonl"], "valid: there is no file or folder none.jsonl"),
        (None, ["--tokenizer", "none"], "tokenizer: none is no folder and none of auto, bytes, bpe"),
    ],
)
def test_what_is_missing_is_named_before_a_folder_is_made(
    missing: str | None,
    more: list[object],
    message: str,
    options: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "valid.parquet").write_text("")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    if missing is not None:
        monkeypatch.setitem(sys.modules, missing, None)
    assert odc("train", *options, *more, "--output", "out", "--export", "export") == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("missing", "command", "message"),
    [
        ("PIL", ["train-mm", "--demo"], "train-mm needs PIL: pip install -e '.[multimodal]'"),
        ("soundfile", ["train-mm", "--demo"], "train-mm needs soundfile: pip install -e '.[multimodal]'"),
        ("transformers", ["compare", "--demo"], "training a model needs transformers: "),
        (None, ["train-mm", "--demo", "--plan", "split"], "plan: train-mm balances each phase and splits no sample"),
    ],
)
def test_other_commands_too_say_it_before_a_folder_is_made(
    missing: str | None,
    command: list[object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if missing is not None:
        monkeypatch.setitem(sys.modules, missing, None)
    assert odc(*command, "--output", tmp_path / "out") == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_need_weights_to_adapt(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("odc.experiments.preflight.find_spec", lambda name: name)
    model = tmp_path / "model" / "config.json"
    assert odc("train", *options, "--model", model, "--lora", 4) == 2
    assert f"odc: lora: {model} holds no weights to adapt; name a model folder" in capfd.readouterr().err
