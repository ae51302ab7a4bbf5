"""Names of the user's files and models are printed as they are, whatever they mean to rich or matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command import odc

from odc.cli.compare import carry_out
from odc.cli.status import table
from odc.runtime.daemon import RankStatus

pytest.importorskip("typer", reason="needs the cli extra")
ODD = "[/x]:smile:$_$"


def test_the_title_of_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    monkeypatch.chdir(tmp_path)
    Path(ODD).mkdir(parents=True)
    lengths = Path(ODD, "l.txt")
    lengths.write_text("60 70 80")
    few = ("--ranks", "2", "--minibatches", "1", "--arms", "odc")
    assert odc("simulate", *few, "--lengths", lengths, "--sweep", "packing_ratio", "--picture", "a.png") == 0
    assert f"lengths like {lengths}" in capsys.readouterr().out
    assert Path("a.png").stat().st_size > 1000


def test_the_files_of_a_comparison(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from odc.experiments import compare, report

    monkeypatch.setattr(report, "compare", lambda *_: ({}, {}))
    monkeypatch.setattr(report, "write_report", lambda *_: None)
    monkeypatch.setattr(compare, "write_pictures", lambda *_: {})
    carry_out(SimpleNamespace(output=Path()), Path("out", ODD), lambda _: None, lambda *_: [])
    assert f"figures  'out/{ODD}'" in capsys.readouterr().out


def test_the_heads_of_a_ledger() -> None:
    pytest.importorskip("transformers", reason="needs the train extra")
    from rich.console import Console

    from odc.doctor.ledger import ledger_table

    config = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    shown = io.StringIO()
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    Console(file=shown).print(ledger_table({ODD: config | heads}, 2, 1))
    assert ODD in shown.getvalue()


def test_the_error_of_a_rank(capsys: Any) -> None:
    from rich.console import Console

    Console().print(table([RankStatus(0, 1, [], error=f"no socket {ODD}")]))
    assert f"no socket {ODD}" in capsys.readouterr().out
