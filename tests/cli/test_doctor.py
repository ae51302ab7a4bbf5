from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import command

import odc.doctor
from odc.doctor import Finding, State
from odc.simulate.catalog import MODELS

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


def test_the_memory_of_a_model(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    small = MODELS["qwen2.5-1.5b"] | {"num_hidden_layers": 1, "vocab_size": 64}
    (tmp_path / "small.json").write_text(json.dumps(small))
    assert command.odc("doctor", "--model", f"{tmp_path}/small.json,qwen2.5-7b", "--ranks", "16", "--hosts", "2") == 0
    lines = capfd.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    rows = [re.split("  +", line.strip()) for line in lines if line.strip()]
    assert rows[0] == ["GB a GPU, 16 ranks on 2 hosts", "small", "qwen2.5-7b"]
    table = {name: [float(number) for number in numbers] for name, *numbers in rows[2:-3]}
    assert table["FSDP2"][1] == pytest.approx(7.616e9 * 16 / 16 / 1e9, rel=0.01)
    parts = ["published", "accumulator", "staging", "cache", "sums"]
    assert table["odc adds"][1] == pytest.approx(sum(table[part][1] for part in parts), abs=0.03)
    (name, *less), (share, *shares) = rows[-2:]
    assert (name, share) == ("with gradient_views", "share of FSDP2")
    assert float(less[1]) == pytest.approx(table["odc adds"][1] - table["FSDP2"][1] / 4, abs=0.02)
    assert float(shares[1]) == pytest.approx(float(less[1]) / table["FSDP2"][1], abs=0.01)
    assert command.odc("doctor", "--model", "qwen9-1b") == 2
    assert "odc: model: 'qwen9-1b' is neither a config file nor one of " in capfd.readouterr().err
