"""Options made from dataclasses: what the user gave reaches the command, and each default shows in the help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

typer = pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("transformers", reason="needs the train extra")

from typer.testing import CliRunner  # noqa: E402

from odc.cli.options import options_from  # noqa: E402


@dataclass(frozen=True)
class Options:
    name: str = field(metadata={"help": "A name."})
    size: int | None = field(default=None, metadata={"help": "A size. (default: the usual)"})
    kind: Literal["a", "b"] = field(default="a", metadata={"help": "a or b.", "panel": "Kinds"})
    lag: Literal[0, 1] = field(default=0, metadata={"help": "A lag."})
    timeout_s: float = field(default=6.5, metadata={"help": "Seconds.", "flag": "--timeout"})
    words: tuple[str, ...] = field(default=("x", "y"), metadata={"help": "With commas."})
    fast: bool = field(default=False, metadata={"help": "Fast."})
    checked: bool = field(default=True, metadata={"help": "Checked."})
    unnamed: int = 3
    left_out: int = field(default=4, metadata={"help": "Not here."})


calls: list[Any] = []


def run(*arguments: str) -> str:
    commands = typer.Typer(add_completion=False)

    @commands.command()
    @options_from(Options, without=("left_out",))
    def say(given: dict[str, Any], lag: int = 7, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        """Say it."""
        calls.append((given, lag, loud))

    @commands.command()
    def other() -> None: ...

    calls.clear()
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(commands, ["say", *arguments])
    return done.output


def test_only_what_was_given_reaches_the_command() -> None:
    run("--name", "n")
    assert calls == [({"name": "n"}, 7, False)]
    run("--name", "n", "--size", "0", "--kind", "c", "--timeout", "6.5", "--words", "x, z", "--fast", "--no-checked")
    assert calls == [
        ({"name": "n", "size": 0, "kind": "c", "timeout_s": 6.5, "words": ("x", "z"), "fast": True, "checked": False},
         7, False)
    ]  # fmt: skip


def test_own_parameters_come_before_fields() -> None:
    run("--name", "n", "--lag", "1", "--loud")
    assert calls == [({"name": "n"}, 1, True)]


def test_what_is_missing_or_no_option_is_refused() -> None:
    assert "Missing option" in run() and not calls
    for flag in ("--unnamed", "--left-out", "--no-fast"):
        assert "No such option" in run("--name", "n", flag), flag
    assert "Invalid value" in run("--name", "n", "--size", "many")


def test_help_shows_each_default() -> None:
    message = run("--help")
    for text in (
        "Say it.",
        "A name.",
        "Kinds",
        "A size.",
        "[default: (the usual)]",
        "[default: a]",
        "[default: 6.5]",
        "[default: x,y]",
        "--no-checked",
    ):
        assert text in message, text
    assert "(default:" not in message
