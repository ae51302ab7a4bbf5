"""What the `odc` command calls first.

Chose to look for the command line's libraries here, before anything else is imported, so that an installation without
them says in one line which extra is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (default: the process's own) and exit with its code.

    Codes: 0 done, 1 a job failed, 2 it was told something that cannot be, 130 interrupted.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f"odc: {error.name} is not installed; the command line needs: pip install 'odc-fsdp[cli]'", file=sys.stderr
        )
        raise SystemExit(2) from None
    from odc.cli.app import run

    raise SystemExit(run(sys.argv[1:] if arguments is None else list(arguments)))
