"""What the `odc` command calls first: finds the command line's libraries before it imports anything else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from odc.errors import install


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line with `arguments` (default: the process's own) and exits with its code.

    Codes: 0 done, 1 a job failed, 2 the command cannot be carried out as given, 130 interrupted.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        message = f"odc: {error.name} is not installed; the command line needs: {install('cli')}"
        print(message, file=sys.stderr)
        raise SystemExit(2) from None
    from odc.cli.app import run

    raise SystemExit(run(sys.argv[1:] if arguments is None else list(arguments)))
