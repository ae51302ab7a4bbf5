"""What cannot be done as given is refused in one line, before a rank starts or a folder is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import tiny_job, tiny_multimodal
from support.command import odc

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")

#: By command, what is appended to options that are right, and the error. LENGTHS is a file of lengths.
REFUSED: dict[str, list[tuple[list[str], str]]] = {
    "bench": [
        (["--only", "got"], "odc: only: got is none of get, "),
        (["--ranks", "two"], "odc: ranks: whole numbers"),
        (["--ranks", "0"], "odc: ranks: at least 1"),
        (["--sizes", "64X"], "odc: sizes: bytes such as"),
        (["--sizes", "K"], "odc: sizes: bytes such as"),
        (["--sizes", "100"], "odc: sizes: multiples of 4096"),
        (["--device", "tpu"], "odc: device: cpu or cuda"),
        (["--compare", "nowhere.json", "nowhere.json"], "odc: compare: nowhere.json cannot be read"),
        *(
            (["--compare", "a.json", "b.json", *more], "odc: --compare measures nothing: leave out the other options")
            for more in (["--quick"], ["--only", "get"], ["--json", "c.json"])
        ),
        *([] if torch.cuda.is_available() else [(["--device", "cuda"], "there is no CUDA device here (`odc doctor`")]),
    ],
    "plan": [
        (["--max-tokens", "50"], "odc: sample 0 has 60 tokens, more than the cap of 50 per microbatch"),
        (["--policy", "lb_max"], "odc: there is no policy 'lb_max'"),
        (["--field", "tokens"], "has no field 'tokens'; name its field of lengths: length, uid"),
        (["--group-field", "prompt"], "has no field 'prompt'"),
        (["--speeds", "1,fast"], "odc: speeds must be numbers"),
        (["--floor", "9"], "odc: floor, node and contiguous are options of lb-split, not of lb-mini"),
        (["--equal-samples"], "odc: equal-samples is an option of lb-micro, not of lb-mini"),
        (["--quadratic", "1"], "odc: quadratic must be two numbers A,B, not '1'"),
        (["--quadratic", "1,1", "--model", "x"], "odc: quadratic and model are two costs"),
        (["--model", "nowhere.json"], "odc: model: 'nowhere.json' is neither a config file nor one of "),
        (["--json", "/does/not/exist.json"], "odc: json: cannot write /does/not/exist.json: No such file"),
        (["--json", "/"], "odc: json: cannot write /: Is a directory"),
        (["--json", "-"], "odc: json: name a file, or /dev/stdout, not -"),
    ],
    "simulate": [
        (["--lengths", "nowhere"], "longalign"),
        (["--slow", "1=2"], "RANK:FACTOR"),
        (["--link-gbit", "1", "--inter-bandwidth", "1"], "without inter_bandwidth"),
        (["--arms", "fsdp3"], "odc-dynamic"),
        (["--picture", "a.png"], "--sweep"),
        (["--json", "/does/not/exist.json"], "json: cannot write /does/not/exist.json: No such file"),
        (["--picture", "/does/not/a.png", "--sweep", "all"], "picture: cannot write /does/not/a.png"),
        (["--json", "/"], "json: cannot write /: Is a directory"),
        (["--picture", "/", "--sweep", "all"], "picture: cannot write /: Is a directory"),
        (["--picture", f"{'a' * 300}", "--sweep", "all"], "picture: cannot write aaa"),
        (["--arms", "fsdp2,odc,odc"], "arms must be different arms, not fsdp2, odc, odc"),
        (["--slow", "1:0"], "slow: ranks lie below 2 and factors above 0, unlike rank 1 with 0"),
        (["--sweep", "hosts"], "there is no sweep along 'hosts'"),
    ],
    "train": [
        (["--arm", "zero1"], "odc-equal, odc, odc-split, odc-dynamic, odc-hybrid, not 'zero1'"),
        (["--max-tokens", "5"], "more than the cap of 5; so have"),
        (["--data", "/does/not/exist"], "odc: data: there is no file or folder /does/not/exist"),
        (["--steps", "many"], "Invalid value for "),
    ],
    "compare": [
        (["--arms", "odc,zero1"], "odc: arms must be different ones of fsdp2-localsort, "),
        (["--skip", "3"], "odc: skip must leave a step to measure: it is 3, steps is 3"),
        (["--json", "/"], "odc: json: / is a folder; name a file in it"),
        *(([option, "1"], "No such option") for option in ("--recover", "--keep", "--fewest", "--rejoin")),
    ],
    "doctor": [
        *(
            (more, "odc: --ranks and --hosts go with --model")
            for more in (["--ranks", "2"], ["--reach", "--hosts", "2"])
        ),
        (["--reach", "--model", "qwen2.5-7b"], "odc: --reach and --model print different tables"),
        (["--model", "qwen2.5-7b", "--ranks", "0"], "odc: hosts: 0 ranks cannot be divided"),
    ],
    "status": [(["--json", "--watch"], "odc: --watch shows a table: leave out --json")],
    "grpo": [(["--group", "1"], "odc: group must be a whole number, 2 or more, not 1")],
    "compare-grpo": [
        (["--arms", "odc-dynamic"], "arms must be different ones of fsdp2,"),
        (["--skip", "20"], "skip must leave a step to measure"),
    ],
    "train-mm": [
        (["--arm", "odc/best"], "arm must be one of fsdp2/none,"),
        (["--arm", "odc/full", "--repeats", "2"], "arm trains one job; --arms, --repeats"),
        (["--resume", "runs/before"], "a comparison neither resumes"),
        (["--arm", "odc/full", "--resume", "runs/before"], "resume: no checkpoint in runs/before"),
        (["--arms", "odc/best"], "odc/full, not 'odc/best'"),
        (["--arms", "odc/full,odc/full"], "arms must be different"),
        (["--per-node", "3"], "per_node must divide"),
        (["--model", "mm-none"], "no shipped multimodal config"),
        (["--data", "none.jsonl"], "there is no file none.jsonl"),
        (["--skip", "10"], "skip must leave a step"),
    ],
}
CASES = [pytest.param(name, *row, id=f"{name} {' '.join(row[0])}") for name, rows in REFUSED.items() for row in rows]


def right(command: str, folder: Path) -> list[object]:
    """Options with which the command would run; its files are made in `folder`."""
    if command == "plan":
        lengths = folder / "lengths.jsonl"
        lengths.write_text("".join(json.dumps({"length": n, "uid": n}) + "\n" for n in (60, 60, 100, 9)))
        return ["--lengths", lengths]
    if command == "simulate":
        return ["--ranks", 2, "--minibatches", 1, "--samples-per-rank", 2]
    without = ("bench", "doctor", "grpo", "status")
    output = [] if command in (*without, "train") else ["--output", folder / "out"]
    if command in (*without, "compare-grpo"):
        return output
    if command == "train-mm":
        pytest.importorskip("soundfile", reason="needs the multimodal extra")
        job = tiny_multimodal.tiny_job(folder).job
    else:
        job = tiny_job.tiny_job(folder)
        output += ["--tokenizer", "bytes", "--max-tokens", 100, "--steps", 3, "--cache", folder / "cache"]
    return ["--model", job.model, "--data", job.data, *output]


@pytest.mark.parametrize(("command", "options", "message"), CASES)
def test_bad_input_is_one_line(
    command: str, options: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert odc(command, *right(command, tmp_path), *options) == 2
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error
    if message not in ("Invalid value for ", "No such option"):  # typer draws a box around it
        assert [line for line in error.splitlines() if line.startswith("odc: ")] == error.splitlines()[-1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--data", "stdlib"], "odc: model: say which (--model), or run the demo (--demo)\n"),
        (["train-mm"], "odc: data: say which (--data), or run the demo (--demo)\n"),
    ],
)
def test_a_model_and_data_or_the_demo_are_needed(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert odc(*arguments) == 2
    assert capfd.readouterr().err == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps must be a whole number, 1 or more"),
        (["--skip", "5"], "skip must leave a step"),
        (["--arm", "odc/full", "--per-node", "3"], "per_node must divide"),
        (["--arm", "odc/full", "--resume", "nowhere"], "resume: no checkpoint in nowhere"),
        (["--arm", "odc/full", "--resume", "nowhere", "--output", "new"], "resume: no checkpoint in nowhere"),
    ],
)
def test_a_demo_that_is_refused_leaves_nothing(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("soundfile", reason="needs the multimodal extra")
    monkeypatch.chdir(tmp_path)
    assert odc("train-mm", "--demo", *options) == 2
    assert message in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_demo_whose_folder_cannot_be_made_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("soundfile", reason="needs the multimodal extra")
    (tmp_path / "file").touch()
    for more in ([], ["--arm", "odc/full"]):
        assert odc("train-mm", "--demo", "--output", tmp_path / "file", *more) == 2
        assert capfd.readouterr().err.splitlines()[-1].startswith("odc: output: cannot write to ")
