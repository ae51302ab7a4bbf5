from __future__ import annotations

import json

import pytest
from support import command

import odc.doctor
from odc.doctor import Finding, State

WELL = Finding("system", State.OK, "Linux [6.1]")
NO_GPU = Finding("driver", State.ABSENT, "no driver", "cuda", "pip install 'odc-fsdp[cli]'")
NO_MEMORY = Finding("shared memory", State.BROKEN, "refused", "run", "allow memfd_create")


def call(monkeypatch: pytest.MonkeyPatch, findings: list[Finding], *arguments: str) -> int:
    monkeypatch.setattr(odc.doctor, "examine", lambda probes: findings)
    return command.odc("doctor", *arguments)


def test_what_is_optional_does_not_fail(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    assert call(monkeypatch, [WELL, NO_GPU]) == 0
    printed = capfd.readouterr().out
    assert "odc can run here" in printed
    assert "Linux [6.1]" in printed and "odc-fsdp[cli]" in printed, "brackets are no markup"


def test_what_is_needed_does(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    assert call(monkeypatch, [WELL, NO_MEMORY]) == 1
    printed = capfd.readouterr().out.splitlines()
    assert printed[:3] == ["odc cannot run here", "  shared memory: refused", "    -> allow memfd_create"], (
        "what counts first"
    )
    assert call(monkeypatch, [WELL, NO_GPU], "--need", "cuda") == 1
    assert "odc cannot run here, with cuda" in capfd.readouterr().out


def test_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    assert call(monkeypatch, [WELL, NO_MEMORY], "--json") == 1
    assert [one["state"] for one in json.loads(capfd.readouterr().out)] == ["ok", "broken"]


def test_an_unknown_need(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    assert call(monkeypatch, [WELL], "--need", "gpu") == 2
    assert "odc: need: gpu is none of " in capfd.readouterr().err
