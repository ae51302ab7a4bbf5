"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import command
from support.tiny_job import tiny_job

from odc.cli import app
from odc.errors import install
from odc.experiments.launch import JobFailedError

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")

_ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}


def odc(*arguments: str, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*python, "-m", "odc.cli", *arguments], capture_output=True, text=True, env=_ENV, check=False)


def options_of_a_job(folder: Path) -> list[str]:
    """Of one that takes a second, on files made in `folder`."""
    job = tiny_job(folder)
    options = ["--model", job.model, "--data", job.data, "--tokenizer", "bytes", "--cache", str(job.cache)]
    return [*options, "--max-tokens", "100", "--steps", "2"]


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Options of a job that takes a second."""
    return options_of_a_job(tmp_path)


def test_train_launches_its_ranks_saves_and_exports(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.setenv(name, _ENV[name])
    assert command.odc("train", *job, "--output", tmp_path / "out", "--export", tmp_path / "model") == 0
    out, err = capfd.readouterr()
    summary, *after = out.splitlines()
    assert re.fullmatch(r"step 2: loss \d\.\d{4}; .* tokens/s \(medians\); checkpoint .*step-00000002", summary)
    assert any(line.split()[0] == "wrote" for line in after) and str(tmp_path / "model") in out
    assert err.startswith("odc train: odc, 2 ranks, 2 steps\nodc train [")
    assert "Traceback" not in err and "Warning" not in err
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoints", "steps.jsonl"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("ab")["input_ids"] == [97, 98]


@pytest.mark.thorough
def test_train_goes_on_from_an_export_under_torchrun(job: list[str], tmp_path: Path) -> None:
    export = tmp_path / "model"
    done = odc("train", *job, "--export", str(export))
    assert done.returncode == 0 and done.stderr.startswith("odc train: odc, 2 ranks, 2 steps\n"), done.stderr
    options = ["auto" if one == "bytes" else str(export) if one.endswith("model.json") else one for one in job]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    done = odc("train", *options, "--arm", "odc", python=launcher)
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
    code = command.odc(*arguments)
    printed, progress = capfd.readouterr()
    assert code == 0, progress
    for text in ("bubble, measured", "peak memory, MiB", "final loss", "fsdp2", "odc-dynamic", "rank 1 slowed 1.5x"):
        assert text in " ".join(printed.split())  # the title may be broken into lines
    named = re.findall(r"^(?:figures|timeline|trace \S+) +(\S+)$", printed, re.MULTILINE)
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
    command.odc("--traceback", "train", *job, "--arm", "zero1")
    printed = capfd.readouterr().err
    assert "Traceback" in printed and "config.py" in printed


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
    assert command.odc("--help") == 2
    printed = f"odc: {missing} is not installed; the command line needs: {install('cli')}\n"
    assert capfd.readouterr().err == printed


def test_first_words_come_before_torch(tmp_path: Path) -> None:
    program = """
import sys
from odc.cli import app, compare, train

class Printed(Exception): pass

def first(*words, **_):
    assert "torch" not in sys.modules, f"torch was loaded before {words}"
    raise Printed

assert app.run(["--help"]) == app.run(["compare", "--help"]) == app.run(["train", "--help"]) == 0
assert app.run(["train", "--model", "m", "--data", "d", "--arm", "zero1"]) == 2
compare.print = train.print = first
for arguments in (["compare", "--demo"], ["train", "--model", "m", "--data", "stdlib"]):
    try:
        app.run(arguments)
    except Printed:
        continue
    raise AssertionError(f"{arguments} printed nothing")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=_ENV)


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("odc.cli.plan.require_writable", interrupted)
    assert command.odc("plan", "--lengths", "stdlib", "--json", "x.json") == 130
    assert capsys.readouterr().err.endswith("odc: interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["plan", "--help"], ["plan", "--lengths", "{lengths}"]])
def test_standard_output_that_takes_nothing_is_one_line(arguments: list[str], unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("7 5 3")
    words = [sys.executable, "-m", "odc.cli", *(one.format(lengths=tmp_path / "lengths") for one in arguments)]
    environment = _ENV | {"PYTHONUNBUFFERED": unbuffered}
    reader, closed = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(closed, "w") as pipe:
        for stream, message in ((full, "odc: [Errno 28] No space left on device\n"), (pipe, "")):
            done = subprocess.run(words, stdout=stream, stderr=subprocess.PIPE, text=True, env=environment, check=False)
            assert (done.returncode, done.stderr) == (1, message)


def test_a_closed_pipe_does_not_hide_why_a_command_failed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(**given: object) -> None:
        print("so far it went well")
        raise JobFailedError([(3, "the reason")], {})

    reader, closed = os.pipe()
    os.close(reader)
    monkeypatch.setattr("odc.cli.app.app", fails)
    with open(closed, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert app.run(["plan"]) == 1
    assert "rank 3 failed: the reason" in capfd.readouterr().err
