"""What the scripts of this folder share: options, and a result with when and how it was taken."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from odc.bench.report import store
from odc.provenance import begin


class Script:
    """A script with `--results FOLDER` and the options that are given as `name=(default, help)`, maybe with choices.

    An option has the type of its default; several values where that is a list, and a switch where it is False. They are
    attributes of `given`. Make one before anything is measured: the state of the machine is taken here.
    """

    def __init__(self, about: str | None, **options: tuple[Any, ...]) -> None:
        self.parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        options["results"] = (Path("runs/bench"), "folder of the results")
        for name, (default, help_, *choices) in options.items():
            kind: dict[str, Any] = {"type": type(default), "choices": choices[0] if choices else None}
            if default is False:
                kind = {"action": "store_true"}
            elif isinstance(default, list):
                kind |= {"type": type(default[0]), "nargs": "+"}
            self.parser.add_argument(
                f"--{name.replace('_', '-')}", default=default, help=f"{help_} ({default})", **kind
            )
        self.given, self.begun = self.parser.parse_args(), begin()

    def need_verl(self) -> None:
        """End the program where verl is not installed."""
        if find_spec("verl") is None:
            self.parser.error(
                "this needs verl: run it in the environment that `make .venv-integrations/.ready` sets up"
            )

    def store(self, name: str, title: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        """As `odc.bench.report.store`, which writes `<results>/<name>.json` and `.md`."""
        store(self.given.results, name, title, rows, begun=self.begun, **more)
