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
    assert "Linux [6.1]" in printed, "brackets are no markup"
    assert "odc-fsdp[cli]" not in printed, "advice is for what is needed"


def test_it_fits_a_screen_and_says_what_each_line_is_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    checks = odc.doctor.all_checks()
    states = [State.OK if number % 3 else State.ABSENT for number in range(len(checks))]
    findings = [
        Finding(check.what, state, "found " * 30, check.use, check.advice)
        for check, state in zip(checks, states, strict=True)
    ]
    assert call(monkeypatch, findings) == 1
    lines = capfd.readouterr().out.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    lines = lines[lines.index(next(line for line in lines if line.startswith("Run here"))) :]
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    titles = [line.split(" (")[0] for line in lines if line[0] != " "]
    assert titles == [*odc.doctor.GROUPS, "Integrations and other extras", lines[-1]]
    grouped = {use for uses in odc.doctor.GROUPS.values() for use in uses}
    for check, state in zip(checks, states, strict=True):
        name = check.what.removeprefix("extra ")
        where = [line for line in lines[:-1] if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", line)]
        assert where, name
        own = check.use in grouped and not check.what.startswith("extra ")
        assert not own or any(line.split()[0] == state for line in where), where
    assert " ".join(" ".join(lines).split()).count("package index yet") == 1


def test_an_extra_that_does_not_fit_is_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    assert call(monkeypatch, [WELL, Finding("extra verl", State.BROKEN, "verl 0.8 is too old", "verl", "newer")]) == 0
    printed = capfd.readouterr().out
    assert "broken  extra verl: verl 0.8 is too old" in printed and "package index" not in printed
    assert call(monkeypatch, [WELL, Finding("verl plugin", State.OK, "verl 0.9.1: strategy odc", "verl")]) == 0
    assert "ok      verl plugin: verl 0.9.1: strategy odc" in capfd.readouterr().out


def test_how_to_install_an_extra_stands_below_those_that_are_absent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plugin = Finding("verl plugin", State.OK, "strategy odc for " + "models [of many kinds] " * 4, "verl")
    assert call(monkeypatch, [WELL, Finding("extra trl", State.ABSENT, "not installed", "trl", "do"), plugin]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert re.search(r"absent trl pip install .* ok verl plugin: strategy odc", printed), printed
    assert printed.count("models [of many kinds]") == 4, "whole, in as many lines as it takes"


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
    table = {name: [float(number) for number in numbers] for name, *numbers in rows[2:-4]}
    assert table["FSDP2"][1] == pytest.approx(7.616e9 * 16 / 16 / 1e9, rel=0.01)
    parts = ["published", "accumulator", "staging", "cache", "sums", "changes"]
    assert table["odc adds"][1] == pytest.approx(sum(table[part][1] for part in parts), abs=0.03)
    (name, *less), (share, *shares), (rounded, *more) = rows[-3:]
    assert (name, share) == ("with gradient_views", "share of FSDP2")
    assert float(less[1]) == pytest.approx(table["odc adds"][1] - table["FSDP2"][1] / 4, abs=0.02)
    more_bytes = 7.616 / 2 / 8 * 2.1  # docs/int8.md: an element of this rank's share of what crosses takes so many more
    assert rounded == "with int8 sums"
    assert float(more[1]) - table["odc adds"][1] == pytest.approx(more_bytes, rel=0.15)
    assert float(shares[1]) == pytest.approx(float(less[1]) / table["FSDP2"][1], abs=0.01)
    assert command.odc("doctor", "--model", "qwen9-1b") == 2
    assert "odc: model: 'qwen9-1b' is neither a config file nor one of " in capfd.readouterr().err
