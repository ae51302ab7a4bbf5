from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from odc.doctor import State, packages
from odc.doctor.finding import version_tuple
from odc.doctor.packages import by_extra, extras, verl_plugin
from odc.errors import install

LINES = [
    "torch<2.14,>=2.11",
    'typer>=0.15; extra == "cli"',
    'rich>=13 ; extra == "cli"',
    'odc-fsdp[cli,plot]; extra == "train"',
    'transformers>=5.0; extra == "train"',
    "matplotlib>=3.9; extra == 'plot'",
    'ruff>=0.15; extra == "lint"',
]


def test_extras_within_extras() -> None:
    assert by_extra(LINES) == {
        "cli": [("typer", ">=0.15"), ("rich", ">=13")],
        "train": [("transformers", ">=5.0"), ("typer", ">=0.15"), ("rich", ">=13"), ("matplotlib", ">=3.9")],
        "plot": [("matplotlib", ">=3.9")],
        "lint": [("ruff", ">=0.15")],
    }


def test_extras_that_name_each_other_end() -> None:
    lines = ['odc-fsdp[b]; extra == "a"', 'odc-fsdp[a]; extra == "b"', 'x>=1; extra == "b"']
    assert by_extra(lines) == {"a": [("x", ">=1")], "b": [("x", ">=1")]}


@pytest.mark.parametrize(
    ("name", "release", "state", "said"),
    [("Linux", "6.1.0-13-amd64", State.OK, "Linux 6.1.0"), ("Linux", "4.19.1", State.BROKEN, "5.3 or newer"),
     ("Darwin", "24.1.0", State.BROKEN, "Linux only")],
)  # fmt: skip
def test_system(name: str, release: str, state: State, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.platform, "system", lambda: name)
    monkeypatch.setattr(packages.platform, "release", lambda: release)
    (found,) = packages.system()
    assert found.state is state and said in f"{found.found} {found.do}"


def have(monkeypatch: pytest.MonkeyPatch, requires: list[str] | None = None, **versions: str) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(packages.metadata, "version", version)
    monkeypatch.setattr(packages.metadata, "requires", lambda _: requires or LINES)


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, typer="0.15.1", rich="12.9", matplotlib="3.10")
    found = {one.what: one for one in extras()}
    assert found.keys() == {"extra cli", "extra train", "extra plot"}, "developers' extras are not the user's"
    assert found["extra plot"].state is State.OK
    assert found["extra cli"].found == "rich 12.9 is older than 13"
    assert found["extra train"].found == "transformers is not installed, rich 12.9 is older than 13"
    assert found["extra train"].do == install("train")


def test_not_installed_as_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(_: str) -> list[str]:
        raise metadata.PackageNotFoundError("odc-fsdp")

    monkeypatch.setattr(packages.metadata, "requires", requires)
    (found,) = extras()
    assert found.state is State.ABSENT and packages.names_of_extras() == []


def entry(value: str, error: Exception | None = None) -> Any:
    def load() -> Any:
        if error:
            raise error
        return SimpleNamespace(TESTED="0.9", kinds=lambda: ["actor", "critic"])

    return SimpleNamespace(value=value, load=load)


@pytest.mark.parametrize(
    ("entries", "state", "said"),
    [
        ([], State.ABSENT, "not registered"),
        ([entry("other.plugin")], State.ABSENT, "not registered"),
        (
            [entry("other.plugin"), entry("odc.integrations.verl.plugin")],
            State.OK,
            "verl 0.9.3: strategy odc for actor and critic",
        ),
        ([entry("odc.x", ImportError("no such name"))], State.BROKEN, "ImportError: no such name"),
    ],
)
def test_verl_plugin(entries: list[Any], state: State, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, verl="0.9.3")
    monkeypatch.setattr(packages.metadata, "entry_points", lambda group: entries if group == "verl.plugins" else [])
    (found,) = verl_plugin()
    assert found.state is state and said in found.found


def test_a_verl_that_was_not_tested_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, verl="0.10.1")
    monkeypatch.setattr(packages.metadata, "entry_points", lambda group: [entry("odc.integrations.verl.plugin")])
    (found,) = verl_plugin()
    assert found.found == "verl 0.10.1 (tested with 0.9 only): strategy odc for actor and critic"


def test_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch)
    (found,) = verl_plugin()
    assert (found.state, found.use) == (State.ABSENT, "verl")


def test_a_torch_that_odc_does_not_know_is_named() -> None:
    program = """
import torch
del torch.autograd._unsafe_preserve_version_counter
from odc.doctor.packages import torch_itself
(found,) = torch_itself()
print(found.state, found.found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("broken odc supports torch")
    assert "_unsafe_preserve_version_counter" in done.stdout


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("3.7.1", (3, 7, 1)), ("6.1.0-13-amd64", (6, 1, 0)), ("2.4rc1", (2, 4))],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert version_tuple(text)[:3] == numbers
