"""The commands, and how their errors are shown. Command files import torch only inside their functions."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from odc.cli.bench import bench
from odc.cli.compare import compare, compare_grpo
from odc.cli.doctor import doctor
from odc.cli.options import Command
from odc.cli.plan import plan
from odc.cli.simulate import simulate
from odc.cli.status import status
from odc.cli.train import grpo, train
from odc.cli.train_mm import train_mm
from odc.errors import OdcError
from odc.provenance import VERSION

app = typer.Typer(
    name="odc",
    help="Train models sharded over ranks, with parameters fetched on demand instead of gathered by collectives.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_INTERRUPTED = 130  # typer's exit code, too
_COMMANDS: tuple[Command, ...] = (train, train_mm, compare, grpo, compare_grpo, plan, simulate, bench, doctor, status)
for _command in _COMMANDS:
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"odc {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    trace: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print odc's version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    _shown["traceback"] = trace


_shown = {"traceback": False}


def run(arguments: list[str]) -> int:
    """Runs one command and returns the exit code. Errors of odc, and of the system, are one line, unless `--traceback`
    was given. Where standard output was closed early there is no line.
    """
    code = 0
    try:
        app(args=arguments, prog_name="odc")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except KeyboardInterrupt:  # before typer runs the command, or as it ends
        code = _INTERRUPTED
    except (OdcError, OSError) as error:
        if _shown["traceback"]:
            traceback.print_exc()
            for rank, text in getattr(error, "tracebacks", {}).items():
                print(f"--- rank {rank}\n{text}", file=sys.stderr)
        _print_error(error)
        code = 2 if isinstance(error, ValueError) else 1
    if code == _INTERRUPTED:
        print("odc: interrupted", file=sys.stderr)
    lost = _flush()
    if lost is not None and not code:
        _print_error(lost)
    return code or int(lost is not None)


def _print_error(error: Exception) -> None:
    if not isinstance(error, BrokenPipeError):
        notes = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        print(f"odc: {notes}{error}", file=sys.stderr)


def _flush() -> OSError | None:
    """Writes what standard output holds; returns why it could not. It is dropped then: Python would try again as it
    ends.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
