"""The end of a comparison: its tables are printed whatever becomes of its files."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from odc.cli.compare import carry_out
from odc.errors import ConfigError

pytest.importorskip("typer", reason="needs the cli extra")


@pytest.mark.parametrize(
    ("full", "message"),
    [("figures", r"^json: cannot write .*a\.json: No space"), ("pictures", "^output: cannot write")],
)
def test_tables_are_printed_though_the_disk_is_full(
    full: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from odc.experiments import compare, report

    def no_space(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "compare", lambda *_: ({"arms": 2}, {}))
    monkeypatch.setattr(compare, "write_pictures", no_space)
    if full == "figures":
        monkeypatch.setattr(report, "write_report", no_space)
    path = tmp_path / "a.json"
    with pytest.raises(ConfigError, match=message):
        carry_out(SimpleNamespace(output=tmp_path), path, lambda _: None, lambda figures, _: [f"table of {figures}"])
    assert "table of {'arms': 2}" in capsys.readouterr().out
    assert path.exists() == (full == "pictures")
