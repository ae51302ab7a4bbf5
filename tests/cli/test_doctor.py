"""`odc doctor`: absent is not broken, broken is, and both are said."""

from __future__ import annotations

import pytest
import torch

from odc.cli import doctor as doctor_module
from odc.cli.app import run


@pytest.mark.parametrize(
    ("status", "word", "code"),
    [((True, "verl 9"), "ok", 0), ((None, "no verl"), "absent", 0), ((False, "oh"), "BROKEN", 1)],
)
def test_doctor(monkeypatch, capsys, status, word, code) -> None:
    monkeypatch.setattr(doctor_module, "plugin_status", lambda: status)
    assert run(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok", word]
    assert lines[1].endswith(f"torch {torch.__version__}") and lines[2].endswith(status[1])


def test_a_torch_that_does_not_fit_is_broken(monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor_module, "plugin_status", lambda: (None, "no verl"))
    monkeypatch.setitem(__import__("sys").modules, "odc.fsdp", None)
    assert run(["doctor"]) == 1
    assert "BROKEN   torch: ModuleNotFoundError" in capsys.readouterr().out
