"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from odc.cli import main
from odc.errors import install

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")

_ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}


def odc(*arguments: str, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python, "-m", "odc.cli", *arguments], capture_output=True, text=True, env=_ENV, check=False)


def options_of_a_job(folder: Path) -> list[str]:
    """Of one that takes a second, on files made in `folder`."""
    model = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
    }
    (folder / "model.json").write_text(json.dumps(model))
    texts = ["ab " * (1 + 7 * (i % 5)) for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--model", str(folder / "model.json"), "--data", str(folder / "data.jsonl"), "--tokenizer", "bytes"]
    return [*options, "--max-tokens", "100", "--steps", "2", "--cache", str(folder / "cache")]


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Options of a job that takes a second."""
    return options_of_a_job(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A job that has been run, and its folder: its options' files, "out" and "model"."""
    folder = tmp_path_factory.mktemp("trained")
    job = options_of_a_job(folder)
    return folder, odc("train", *job, "--output", str(folder / "out"), "--export", str(folder / "model"))


def test_train_launches_its_ranks_saves_and_exports(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.setenv(name, _ENV[name])
    with pytest.raises(SystemExit) as ended:
        main(["train", *job, "--output", str(tmp_path / "out"), "--export", str(tmp_path / "model")])
    _check_trained(tmp_path, ended.value.code, *capfd.readouterr())


def _check_trained(folder: Path, code: object, out: str, err: str) -> None:
    assert code == 0, err
    assert re.fullmatch(r"step 2: loss \d\.\d{4}; .* tokens/s \(medians\); checkpoint .*step-00000002\n", out)
    assert err.startswith("odc train: odc, 2 ranks, 2 steps\nodc train [")
    assert "Traceback" not in err and "Warning" not in err
    assert sorted(os.listdir(folder / "out")) == ["checkpoints", "steps.jsonl"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert AutoTokenizer.from_pretrained(folder / "model")("ab")["input_ids"] == [97, 98]


@pytest.mark.thorough
def test_train_goes_on_from_an_export_under_torchrun(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    export = str(trained[0] / "model")
    job = [
        "auto" if option == "bytes" else export if option.endswith("model.json") else option
        for option in options_of_a_job(trained[0])
    ]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = odc("train", *job, "--arm", "odc", python=launcher)
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss" in done.stderr
    assert done.stdout.startswith("step 2: loss")
    assert done.stderr.count("step 2/2") == 1, "one rank shows progress"


def test_compare_writes_one_table_and_what_it_names(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    output = tmp_path / "out"
    arguments = ["compare", *job, "--arms", "fsdp2,odc-dynamic", "--slow", "1:1.5", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["odc", *arguments])
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.setenv(name, _ENV[name])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said, progress = capfd.readouterr()
    assert ended.value.code == 0, progress
    for text in ("bubble, measured", "peak memory, MiB", "final loss", "fsdp2", "odc-dynamic", "rank 1 slowed 1.5x"):
        assert text in " ".join(said.split())  # the title may be broken into lines
    named = re.findall(r"^(?:figures|timeline|trace \S+) +(\S+)$", said, re.MULTILINE)
    assert [Path(path).name for path in named] == [
        "compare.json",
        "timeline.png",
        "trace-fsdp2.json.gz",
        "trace-odc-dynamic.json.gz",
    ]
    assert all(Path(path).stat().st_size > 100 for path in named)
    figures = json.loads((output / "compare.json").read_text())
    assert list(figures["arms"]) == ["fsdp2", "odc-dynamic"]
    assert figures["command"][:2] == ["odc", "compare"]
    assert figures["load_1min"].keys() == {"begin", "end"} and {"commit", "date"} <= figures.keys()
    assert all(figures["arms"][arm]["loss"]["largest_difference"] < 1e-4 for arm in figures["arms"])


def test_traceback_shows_where_it_came_from(job: list[str], capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--traceback", "train", *job, "--arm", "zero1"])
    said = capfd.readouterr().err
    assert "Traceback" in said and "config.py" in said


@pytest.mark.thorough
def test_a_failing_rank_is_named(job: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "checkpoints").write_text("a file in the way")
    done = odc("train", *job, "--output", str(output), "--arm", "fsdp2")
    assert done.returncode == 1
    assert re.search(r"odc: rank \d failed: CheckpointError: cannot prepare .*step-00000002.partial", done.stderr)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_libraries_it_names_the_extra(
    missing: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 2
    said = f"odc: {missing} is not installed; the command line needs: {install('cli')}\n"
    assert capfd.readouterr().err == said


def test_first_words_come_before_torch(tmp_path: Path) -> None:
    program = """
import sys
from odc.cli import app, compare, train

class Said(Exception): pass

def first(*words, **_):
    assert "torch" not in sys.modules, f"torch was loaded before {words}"
    raise Said

assert app.run(["--help"]) == app.run(["compare", "--help"]) == app.run(["train", "--help"]) == 0
assert app.run(["train", "--model", "m", "--data", "d", "--arm", "zero1"]) == 2
compare.print = train.print = first
for arguments in (["compare", "--demo"], ["train", "--model", "m", "--data", "stdlib"]):
    try:
        app.run(arguments)
    except Said:
        continue
    raise AssertionError(f"{arguments} said nothing")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=_ENV)
