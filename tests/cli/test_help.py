"""The help of every command: defaults of all options, one spelling for one thing, and the version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

typer = pytest.importorskip("typer", reason="needs the cli extra")

from click import Context  # noqa: E402
from support import command  # noqa: E402
from typer.main import get_command  # noqa: E402

import odc  # noqa: E402
from odc.cli.app import app  # noqa: E402

COMMANDS = ("train", "train-mm", "compare", "compare-grpo", "grpo", "plan", "simulate", "bench", "doctor", "status")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_says_its_default(name: str) -> None:
    group = get_command(app)
    context = Context(group)
    _, command, _ = group.resolve_command(context, [name])
    for option in command.params:
        if option.param_type_name != "option" or option.required or option.name == "help":
            continue
        shown = option.default is not None and option.show_default
        named = isinstance(option.show_default, str) and "(default:" not in (option.help or "")
        assert getattr(option, "is_flag", False) or shown or named, f"{name} {option.opts[0]}"


def test_one_spelling_for_one_thing() -> None:
    group = get_command(app)
    assert set(group.commands) == set(COMMANDS)
    flags = {name: group.resolve_command(Context(group), [name])[1].params for name in COMMANDS}
    written = {name: {flag for one in options for flag in one.opts} for name, options in flags.items()}
    assert [name for name in COMMANDS if "--picture" in written[name]] == ["simulate"]
    assert {"--lengths"} <= written["plan"] & written["simulate"]
    for name in ("train", "compare", "simulate"):
        (slow,) = (one for one in flags[name] if "--slow" in one.opts)
        assert "RANK:FACTOR" in slow.help and "with commas" in slow.help
    assert not [name for name in COMMANDS if written[name] & {"--draw", "--plot", "--image"}]


def test_the_version_is_that_of_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert odc.__version__ == project["version"]
    assert command.odc("--version") == 0
    assert capfd.readouterr().out == f"odc {odc.__version__}\n"


def test_the_package_itself_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "odc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"odc {odc.__version__}\n"
