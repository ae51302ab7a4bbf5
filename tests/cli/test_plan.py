"""`odc plan` as a user meets it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
from support.command import odc

from odc.balance import Plan, cost_from_config, lb_micro, lb_mini, lb_split, quadratic
from odc.cli import main
from odc.simulate.catalog import config_named

pytest.importorskip("typer", reason="needs the cli extra")

plan = partial(odc, "plan")

SIZES = [60, 60, 60, 60, 100, 100, 40, 9]


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.jsonl"
    path.write_text("".join(json.dumps({"length": n, "uid": i // 2}) + "\n" for i, n in enumerate(SIZES)))
    return str(path)


def test_prints_and_saves(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "plan.json"
    options = ("--ranks", "2", "--max-tokens", "100", "--json", str(out))
    assert plan("--lengths", lengths, *options) == 0
    expected = lb_mini(SIZES, 2, 100)
    assert capsys.readouterr().out == f"{expected}\nplan     {out}\n"
    assert Plan.from_json(out.read_text()) == expected


def test_a_plan_may_go_into_a_pipe(lengths: str) -> None:
    read, write = os.pipe()
    with open(read) as pipe, open(write, "w"):
        assert plan("--lengths", lengths, "--ranks", "2", "--max-tokens", "100", "--json", f"/dev/fd/{write}") == 0
        assert Plan.from_json(os.read(pipe.fileno(), 1 << 16).decode()) == lb_mini(SIZES, 2, 100)


def test_the_plan_is_written_before_it_is_printed(
    lengths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "__str__", lambda _: 1 / 0)
    out = tmp_path / "plan.json"
    with pytest.raises(ZeroDivisionError):
        main(["plan", "--lengths", lengths, "--json", str(out)])
    assert Plan.from_json(out.read_text())


def test_a_plan_that_cannot_be_written_is_refused_before_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--lengths", tmp_path / "none", "--json", tmp_path) == 2
    assert f"odc: json: cannot write {tmp_path}: Is a directory\n" == capsys.readouterr().err


def test_options_reach_the_policy(lengths: str, capsys: pytest.CaptureFixture) -> None:
    assert (
        plan("--lengths", lengths, "--ranks", "2", "--policy", "lb-micro", "--equal-samples", "--quadratic", "1,0.5")
        == 0
    )
    assert capsys.readouterr().out == f"{lb_micro(SIZES, 2, 100, quadratic(1, 0.5), equal_samples=True)}\n"
    assert (
        plan(
            "--lengths", lengths, "--ranks", "2", "--speeds", "1,0.5", "--max-tokens", "120,60", "--group-field", "uid"
        )
        == 0
    )
    expected = lb_mini(SIZES, 2, [120, 60], speeds=[1.0, 0.5], groups=[i // 2 for i in range(8)])
    assert capsys.readouterr().out == f"{expected}\n"


def test_pieces_are_printed_and_saved(lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "plan.json"
    options = ("--ranks", "4", "--policy", "lb-split", "--quadratic", "1,1")
    where = ("--json", str(out))
    assert plan("--lengths", lengths, *options, *where, "--floor", "2", "--node", "2", "--contiguous") == 0
    expected = lb_split(SIZES, 4, 100, quadratic(1, 1), floor=2, node=2, one_slice=True)
    printed = capsys.readouterr().out
    assert printed == f"{expected}\nplan     {out}\n" and expected.splits
    for split in expected.splits:
        line = f"sample {split.sample} of {split.length} tokens, at most {max(split.tokens)} a piece, on ranks "
        assert line + ", ".join(map(str, split.ranks)) in printed
    assert Plan.from_json(out.read_text()) == expected


def test_a_model_is_named_or_a_file_or_its_folder(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_named("qwen2.5-7b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = lb_mini(SIZES, 2, 100, cost_from_config(config))
    for model in ("qwen2.5-7b", tmp_path / "config.json", tmp_path):
        assert plan("--lengths", lengths, "--ranks", "2", "--model", model) == 0
        assert capsys.readouterr().out == f"{expected}\n"


def test_a_file_that_holds_no_config_is_refused(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    assert plan("--lengths", lengths, "--model", tmp_path / "list.json") == 2
    assert f"odc: model: {tmp_path / 'list.json'} does not hold a config\n" in capsys.readouterr().err
