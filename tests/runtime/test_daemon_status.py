from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.listeners import PATIENCE_S, asked_alone, served, status_of
from support.rank_worker import report
from support.ranks import RankProcesses, spawn_ranks
from support.waiting import until
from torch import nn

from odc.cli.status import status, table
from odc.net.requests import ask
from odc.runtime.daemon import RankStatus, ask_all

WIDTH = 32
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4 // 2  # of one rank's shard


def train_and_linger(rank: int, world: int, go_on: str) -> None:
    """One minibatch of two microbatches on rank 0 and one on rank 1; then rank 0 dawdles in the next."""
    import odc

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in model:
        odc.fully_shard(layer)
    odc.fully_shard(model)
    with model.minibatch():
        for _ in range(2 - rank):
            model(torch.ones(1, WIDTH)).sum().backward()
    with model.minibatch():
        if rank == 0:
            for _ in range(3):
                model(torch.ones(1, WIDTH))
        report("in the second minibatch")
        while rank == 0 and not Path(go_on).exists():
            time.sleep(0.01)
    odc.shutdown()


MODULE = sys.modules["odc.runtime.daemon"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """`odc status` waits for busy ranks as tests do."""
    monkeypatch.setattr(MODULE, "ask_all", functools.partial(ask_all, PATIENCE_S))


@contextmanager
def job(folder: Path) -> Iterator[RankProcesses]:
    """Two ranks, the second of which waits for the first; they are let go at the end."""
    with spawn_ranks(2, train_and_linger, str(folder / "go on")) as ranks:
        ranks.until_reported(1)
        until(lambda: any(root["waits_for"] == 0 for one in status_of(ranks.pids[1:]) for root in one.roots))
        yield ranks
        (folder / "go on").touch()
        assert [outcome.exit_code for outcome in ranks.wait()] == [0, 0]


def test_another_process_sees_what_every_rank_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(tmp_path) as ranks:
        answers = status_of(ranks.pids)
        with asked_alone(ranks.pids):
            status(as_json=True)
        printed = [one for one in json.loads(capsys.readouterr().out) if one["pid"] in ranks.pids]
    assert [(answer.rank, answer.pid, answer.error) for answer in answers] == [
        (0, ranks.pids[0], None),
        (1, ranks.pids[1], None),
    ]
    ((first,), (second,)) = (answer.roots for answer in answers)
    assert first["root"] == second["root"]
    assert (first["rank"], second["rank"], first["ranks"]) == (0, 1, 2)
    assert (first["epoch"], first["done"], first["state"], first["microbatch"]) == (2, 1, "open", 3)
    assert (second["epoch"], second["done"], second["state"], second["microbatch"]) == (2, 2, "finishing", 0)
    assert (first["waits_for"], second["waits_for"], second["waits_in_epoch"]) == (None, 0, 2)
    # Each forward fetches both layers; the backward of the first epoch may fetch again what was freed after forward.
    assert first["fetched_bytes"] >= 5 * 2 * UNIT_BYTES and first["fetched_bytes"] % UNIT_BYTES == 0
    assert second["fetched_bytes"] >= 2 * UNIT_BYTES and second["fetched_bytes"] < first["fetched_bytes"]
    assert (first["pushed_bytes"], second["pushed_bytes"]) == (2 * 2 * UNIT_BYTES, 2 * UNIT_BYTES)
    assert first["slots"] >= 2 and first["slots_in_use"] == 0
    assert first["heap_bytes"] == second["heap_bytes"] > 2 * 2 * UNIT_BYTES
    assert [(one["rank"], len(one["roots"]), one["error"]) for one in printed] == [(0, 1, None), (1, 1, None)]
    assert status_of(ranks.pids) == [], "nothing is left to ask after the job"


# listeners that are not well -----------------------------------------------------------------------------------


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """Names of this test alone."""
    prefix = f"odc-test.{time.monotonic_ns()}."
    monkeypatch.setattr(MODULE, "LISTENER_PREFIX", prefix)
    return f"{prefix}{os.getuid()}"


@contextmanager
def listening(name: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(8)
        yield


def answering(roots: Any) -> Callable[..., Any]:
    return lambda request, peer: ({"roots": roots} if request == {"op": "status"} else {"error": "?"}, ())


def test_answers_come_by_rank_and_process(prefix: str) -> None:
    with (
        served(f"{prefix}.10.5.ab", answering([{"root": "c"}])),
        served(f"{prefix}.2.77.ab", answering([{"root": "b"}])),
        served(f"{prefix}.2.8.ab", answering([{"root": "a"}])),
    ):
        found = [(answer.rank, answer.pid, answer.roots) for answer in ask_all(PATIENCE_S)]
    assert found == [(2, 8, [{"root": "a"}]), (2, 77, [{"root": "b"}]), (10, 5, [{"root": "c"}])]


def test_a_rank_that_does_not_answer_is_shown_as_such(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(address: str, request: dict[str, Any], timeout_s: float) -> Any:
        return ask(address, request, 2.0 if ".99." in address else timeout_s)

    monkeypatch.setattr(MODULE, "ask", asked)
    with listening(f"{prefix}.3.99.ab"), served(f"{prefix}.4.98.ab", answering([])):
        silent, other = ask_all(PATIENCE_S)
    assert (silent.rank, silent.pid, silent.roots) == (3, 99, [])
    assert silent.error is not None and silent.error.startswith("TimeoutError")
    assert other == RankStatus(4, 98, [])


@pytest.mark.parametrize("reply", [{"error": "what?"}, {"roots": None}])
def test_an_answer_that_is_not_odcs_is_shown_as_an_error(prefix: str, reply: dict[str, Any]) -> None:
    with served(f"{prefix}.3.99.ab", lambda request, peer: (reply, ())):
        (answer,) = ask_all(PATIENCE_S)
    assert answer.roots == [] and answer.error is not None


@pytest.mark.parametrize("name", [".nonsense", ".1", ".1.x.ab", ".-1.5.ab", ".1.5", ".1.5.a.b"])
def test_names_that_no_daemon_has_are_passed_over(prefix: str, name: str) -> None:
    with listening(prefix + name):
        assert ask_all(PATIENCE_S) == []


# the table -----------------------------------------------------------------------------------------------------------

ROOT = {
    "root": "3.0a1b",
    "rank": 1,
    "ranks": 2,
    "epoch": 17,
    "done": 16,
    "state": "finishing",
    "microbatch": 4,
    "fetched_bytes": 3 << 20,
    "pushed_bytes": 1 << 19,
    "slots": 6,
    "slots_in_use": 5,
    "waits_for": 7,
    "waits_in_epoch": 17,
    "heap_bytes": 1,
    "queue": None,
}


def rows(answers: list[RankStatus]) -> list[list[str]]:
    """Of the table's columns behind the job."""
    made = table(answers).renderables[0]
    return [list(row)[1:] for row in zip(*(column.cells for column in made.columns), strict=True)]


def test_the_table_has_a_row_for_every_root() -> None:
    calm = ROOT | {"root": "4.ffff", "waits_for": None, "waits_in_epoch": None, "state": "closed"}
    assert rows([RankStatus(1, 42, [ROOT, calm])]) == [
        ["1", "42", "3.0a1b", "17", "finishing", "4", "3.0/0.5", "5/6", "7 (epoch 17)"],
        ["1", "42", "4.ffff", "17", "closed", "4", "3.0/0.5", "5/6", "-"],
    ]


def test_the_table_shows_how_far_a_queue_is() -> None:
    early = {"offered": 9, "claimed": 0, "handed_out": None, "total": None}
    later = {"offered": 9, "claimed": 2, "handed_out": 7, "total": 20}
    without = {key: value for key, value in ROOT.items() if key != "queue"}  # a job of an older version
    found = rows([RankStatus(1, 42, [ROOT | {"queue": early}, ROOT | {"queue": later}, without])])
    assert [row[6] for row in found] == ["offers 9", "2 (all: 7/20)", "-"]


def test_the_table_shows_ranks_without_a_root_or_an_answer() -> None:
    quiet, silent = rows([RankStatus(0, 41, []), RankStatus(1, 42, [], "TimeoutError: no")])
    assert quiet[:4] == ["0", "41", "-", "no root yet"]
    assert silent[:4] == ["1", "42", "-", "no answer"], "the error stands below the table"


def test_without_a_job_status_prints_that(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    status()
    assert capsys.readouterr().out.strip() == "no odc job of this user runs on this host"
    status(as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_status_prints_the_table(
    prefix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with served(f"{prefix}.1.42.ab", answering([ROOT])):
        status()
    printed = capsys.readouterr().out
    assert "waits for" in printed and "3.0/0.5" in printed and "7 (epoch 17)" in printed
