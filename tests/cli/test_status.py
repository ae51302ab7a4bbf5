"""`odc status`: a table that 80 columns hold, jobs kept apart, and watching until Ctrl-C."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

import pytest
from support.command import odc

from odc.cli import status
from odc.runtime.daemon import RankStatus

pytest.importorskip("rich", reason="needs the cli extra")

call = partial(odc, "status")

QUEUE = {"total": 20, "offered": 9, "claimed": 2, "handed_out": 17}
MINE = os.getpid()


def root(name: str = "0-1", **changes: Any) -> dict[str, Any]:
    fields = {"root": name, "epoch": 12345, "state": "finishing", "microbatch": 12, "queue": None, "waits_for": 1}
    fields |= {"fetched_bytes": 98765 << 20, "pushed_bytes": 98765 << 20, "slots_in_use": 12, "slots": 64}
    return fields | {"waits_in_epoch": 12345} | changes


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[RankStatus]:
    """Of two jobs: this process, and one that is gone."""
    found = [RankStatus(0, MINE, [root()]), RankStatus(1, 4_190_000, [root(queue=QUEUE)])]
    monkeypatch.setattr(sys.modules[RankStatus.__module__], "ask_all", lambda: found)
    monkeypatch.setenv("COLUMNS", "80")
    return found


def test_eighty_columns_hold_it(answers: list[RankStatus], capsys: pytest.CaptureFixture[str]) -> None:
    del answers[1]
    assert call() == 0
    head, row = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert " ".join(head.split()) == "job rank pid epoch state mb in/out MiB slots waits for"
    expected = f"{os.getppid()} 0 {MINE} 12345 finishing 12 98765.0/98765.0 12/64 1 (epoch 12345)"
    assert " ".join(row.split()) == expected
    assert max(map(len, (head, row))) <= 80


def test_eighty_columns_hold_ranks_of_other_hosts(
    answers: list[RankStatus], capsys: pytest.CaptureFixture[str]
) -> None:
    far = {name: value for name, value in root().items() if not name.startswith("slots")}
    answers[:] = [
        RankStatus(100, MINE, [root() | {"host": 12, "hosts": 13}]),
        RankStatus(1000, MINE, [far | {"host": 0, "hosts": 13}], elsewhere=True),
    ]
    assert call() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    head, here, there = (" ".join(line.split()) for line in lines)
    assert head == "job host rank pid epoch state mb in/out MiB slots waits for"
    assert here == f"{os.getppid()} 12 100 {MINE} 12345 finishing 12 98765/98765 12/64 1 (epoch 12345)"
    assert there == f"{os.getppid()} 0 1000 - 12345 finishing 12 98765/98765 - 1 (epoch 12345)"
    assert max(map(len, lines)) <= 80
    answers[0].roots[0]["saved_bytes"] = 98765 << 20
    assert call() == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "job host rank pid epoch state mb in/out MiB saved slots waits for"
    assert [line.split("98765/98765 ")[1].split(" ")[0] for line in lines[1:3]] == ["98765", "0"]
    assert call("--json") == 0
    assert [(one["pid"], one["job"]) for one in json.loads(capsys.readouterr().out)] == [
        (MINE, os.getppid()),
        (None, os.getppid()),
    ]


def test_columns_that_say_something_are_added(
    answers: list[RankStatus], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    answers[0].roots.append(root("0-2"))
    answers.append(RankStatus(2, 4_190_001, [], "TimeoutError: silent"))
    answers.append(RankStatus(3, 4_190_002, []))
    assert call() == 0
    printed = capsys.readouterr().out
    for text in ("root", "0-2", "claimed", "2 (all: 17/20)", "no answer", "no root yet"):
        assert text in printed, text
    assert "rank 2, process 4190001: TimeoutError: silent" in printed


def test_generations_are_shown_where_a_job_survives_deaths(
    answers: list[RankStatus], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {"generation": 3, "recoveries": 2, "kept": 12344, "connecting": False}
    new = {"generation": 3, "recoveries": 0, "kept": None, "connecting": True}
    found = root(epoch=345, waits_in_epoch=345)
    answers[:] = [RankStatus(0, MINE, [found], recovery=shown), RankStatus(1, MINE, [], recovery=new)]
    assert call() == 0
    head, met, connecting = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert " ".join(head.split()) == "job rank pid gen kept epoch state mb in/out MiB slots waits for"
    expected = f"{os.getppid()} 0 {MINE} 3 (2) 12344 345 finishing 12 98765/98765 12/64 1 (epoch 345)"
    assert " ".join(met.split()) == expected
    assert " ".join(connecting.split()) == f"{os.getppid()} 1 {MINE} 3 - - connecting - - - -"


def test_a_job_is_chosen(answers: list[RankStatus], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "--job", str(os.getppid())) == 0
    assert [(one["job"], one["pid"]) for one in json.loads(capsys.readouterr().out)] == [(os.getppid(), MINE)]
    assert call("--job", "1") == 0
    assert capsys.readouterr().out == "no rank of job 1 runs on this host\n"
    answers.clear()
    assert call() == 0
    assert capsys.readouterr().out == "no odc job of this user runs on this host\n"


def test_watching_asks_again_until_interrupted(
    answers: list[RankStatus], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        answers[0].roots[0]["epoch"] = 777
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    assert call("--watch") == 0
    assert len(looks) == 2 and "777" in capsys.readouterr().out
